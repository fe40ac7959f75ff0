"""Whether an algorithm fits the run's other settings: group size, minibatches, weights of the rewards.

What an algorithm's own parts say about each other is `asyncrl.trainers.presets`; here is what they say about the
rest of the configuration, so that a run that would never learn anything is refused before it starts. Called by
`asyncrl.launch` only.
"""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.settings import UsageError

COMPARING = frozenset(
    {"grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_k", "gdpo", "reinforce_pp_baseline", "dpo", "otb", "prime"}
)
"""Advantage estimators that compare an episode with the others of its group: alone, it has advantage 0."""


def fitted(config: Config) -> Config:
    """Checks a configuration whose algorithm is resolved, and gives `gdpo` the weights of the rewards.

    Raises:
        UsageError: the algorithm cannot work with another setting.
    """
    algo = config.algo
    if algo.advantage in COMPARING and config.train.group_size == 1:
        raise UsageError(
            f"train.group_size = 1 with algo.advantage = {algo.advantage!r}, which compares a group's episodes, "
            "so every advantage would be 0 and nothing would be learnt; use a group size of at least 2, or an "
            "estimator that needs no group (reinforce, reinforce_pp, remax, gae, vtrace)"
        )
    if algo.filter == "equal_rewards" and config.train.group_size == 1:
        raise UsageError(
            "train.group_size = 1 with algo.filter = 'equal_rewards' would drop every group, because one "
            "episode's rewards are all equal; use algo.filter = 'none'"
        )
    if algo.advantage == "dpo":
        _check_pairs(config)
    if algo.advantage == "gdpo" and not algo.advantage_args["weights"]:
        # It adds up the named rewards itself, so the user's signs and sizes must reach it.
        arguments = algo.advantage_args | {"weights": dict(config.reward.weights)}
        config = config.model_copy(update={"algo": algo.model_copy(update={"advantage_args": arguments})})
    return config


def _check_pairs(config: Config) -> None:
    if config.learner.minibatches > 1:
        raise UsageError(
            f"algo.advantage = 'dpo' with learner.minibatches = {config.learner.minibatches}: the scale of a pair "
            "is that of the whole batch, which a minibatch is not; use learner.minibatches = 1"
        )
    if config.algo.kl != "none" and config.algo.kl_in == "reward":
        raise UsageError(
            f"algo.advantage = 'dpo' with algo.kl = {config.algo.kl!r} and algo.kl_in = 'reward': the term would "
            "make pairs of episodes whose rewards are equal; use algo.kl = 'none', for DPO has its own tie to the "
            "reference (algo.advantage_args.beta)"
        )
