"""Environments of other ecosystems, each behind its own optional dependency; none is imported by another."""
