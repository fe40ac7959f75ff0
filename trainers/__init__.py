"""Algorithms and their parts, imported as `asyncrl.trainers`.

`presets` and `filters` are free of torch, because the hub and the command line import them.
"""
