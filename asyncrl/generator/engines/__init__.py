"""Inference engines behind one protocol (`asyncrl.generator.engines.base`)."""
