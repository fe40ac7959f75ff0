"""The commands of `asyncrl`, by what they are about."""
