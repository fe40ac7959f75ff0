"""What settings of different sections say against each other.

Not here: what an algorithm's parts say against each other (`asyncrl.trainers.presets`), and what depends on this
machine or on a model (`asyncrl.launch`). Called by `asyncrl.config` whenever a `Config` is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config import Config


def refuse(config: Config) -> None:
    """Checks a configuration.

    Raises:
        ValueError: the settings, their values, and what to change.
    """
    if config.sampling.max_tokens >= config.generator.max_model_len:
        raise ValueError(
            f"sampling.max_tokens = {config.sampling.max_tokens} leaves no room for a prompt in "
            f"generator.max_model_len = {config.generator.max_model_len}; raise the latter"
        )
    if config.generator.max_model_len > config.learner.token_budget:
        raise ValueError(
            f"learner.token_budget = {config.learner.token_budget} cannot hold one sequence of "
            f"generator.max_model_len = {config.generator.max_model_len} tokens; raise the former"
        )
    if config.learner.minibatches > config.train.groups_per_step:
        raise ValueError(
            f"learner.minibatches = {config.learner.minibatches} is more than the groups of a batch "
            f"(train.groups_per_step = {config.train.groups_per_step}); a minibatch needs at least one group"
        )
    if config.staleness.over_age == "wait" and config.replay.order != "fifo":
        raise ValueError(
            "staleness.over_age = 'wait' seals in order of admission, which contradicts "
            f"replay.order = {config.replay.order!r}; set replay.order to fifo, or over_age to train or mask"
        )
    if config.hub.host in ("0.0.0.0", "::", "*"):
        raise ValueError(
            f"hub.host = {config.hub.host!r} is no address that others can connect to; give the one at which "
            "other machines reach this one, or 127.0.0.1"
        )
    if config.hub.heartbeat_s * 3 > config.hub.lease_s:
        raise ValueError(
            f"hub.lease_s = {config.hub.lease_s} must be at least three heartbeats "
            f"(hub.heartbeat_s = {config.hub.heartbeat_s})"
        )
    if config.env.pass_rate is not None and config.env.pass_rate[0] > config.env.pass_rate[1]:
        raise ValueError(f"env.pass_rate = {config.env.pass_rate}: the lower bound comes first")
    _refuse_reward(config)


def _refuse_reward(config: Config) -> None:
    """The same for the reward model and its scorer."""
    reward, default = config.reward, type(config.reward).model_fields
    for key in ("model_device", "model_batch"):
        if reward.model is None and getattr(reward, key) != default[key].default:
            raise ValueError(
                f"reward.{key} = {getattr(reward, key)} is for the scorer that the run starts, and "
                "reward.model is not given; give it, or leave this out (one that runs already has its own "
                "flags: asyncrl scorer --help)"
            )
    if reward.endpoint is None:
        if reward.model is None and "model" in reward.weights:
            raise ValueError(
                f"reward.weights has model = {reward.weights['model']:g}, and there is no reward model; give "
                "--reward.model, or --reward.endpoint for a scorer that runs already"
            )
        return
    host, _, port = reward.endpoint.removeprefix("tcp://").rpartition(":")
    if host == "0.0.0.0" or not 0 < int(port) < 65536:
        raise ValueError(
            f"reward.endpoint = {reward.endpoint} is no address that others can connect to; give the host at "
            "which the generators reach the scorer, and a port from 1 to 65535"
        )
    if config.hub.port and host == config.hub.host and int(port) in (config.hub.port, config.hub.port + 1):
        raise ValueError(
            f"reward.endpoint = {reward.endpoint}, and ports {config.hub.port} and {config.hub.port + 1} of "
            f"{host} are the hub's (hub.port and the next one); give the scorer another port"
        )
