"""Environments: the protocol (`base`), the registry of plug-ins (`registry`) and the built-in ones."""
