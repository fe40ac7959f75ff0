"""Where code that a model wrote is run: the protocol, its backends, and what each of them stops."""
