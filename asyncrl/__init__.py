"""asyncrl: asynchronous actor-learner reinforcement learning for language models.

This module is only the package's front door: it imports nothing, so that `asyncrl --help` and the hub
stay free of torch. Start at `asyncrl.cli` for the commands and `asyncrl.hub` for the heart of a run.
"""

__version__ = "0.1.0"
