"""What the episodes that ended have brought: mean reward, turns and counts, and why a run may wait for ever.

The scheduler decides what becomes of an episode; this only counts, in memory, between two steps and between two
batches. Called by the hub.
"""

from __future__ import annotations

from collections import Counter

from asyncrl.config import Config
from asyncrl.groups import Episode, reason_of_failure
from asyncrl.messages import EpisodeEnd

FUTILE_BATCHES = 100
"""The run is given up when this many batches' worth of groups in a row were dropped."""


class Harvest:
    """Counts ended episodes; `filtered_groups` is the scheduler's count of all groups that were dropped so far."""

    def __init__(self, config: Config, filtered_groups: int) -> None:
        self._config = config
        self._rewards: list[float] = []
        self._counts: Counter[str] = Counter()
        self.batch_served(filtered_groups)

    def ended(self, end: EpisodeEnd, episode: Episode) -> None:
        """Counts an end that the scheduler accepted."""
        reason = reason_of_failure(end, episode, self._config.learner.token_budget)
        self._ended += 1
        if reason is not None:
            self._failures[reason] += 1
        elif end.reward is not None and not episode.greedy:
            self._rewards.append(end.reward)
            self._counts.update({"turns": end.turns} | {f"env/{name}": n for name, n in end.info.items()})

    def take_metrics(self) -> dict[str, float]:
        """Means over all episodes that ended with a reward since the last call, if any did, and their number.

        `reward`, `turns`, and `env/tool_calls` and the like. A batch's own mean is blind to the groups that
        dynamic sampling dropped; this is what the policy earns.
        """
        rewards, counts = self._rewards, self._counts
        self._rewards, self._counts = [], Counter()
        totals: dict[str, float] = {**counts, "reward": sum(rewards)}
        means = {name: total / len(rewards) for name, total in totals.items()} if rewards else {}
        return means | {"episodes_ended": len(rewards)}

    def batch_served(self, filtered_groups: int) -> None:
        """The learner has got a batch."""
        self._filtered_before = filtered_groups
        self._ended = 0
        self._failures: Counter[str] = Counter()

    def hopeless(self, filtered_groups: int, step: int) -> str | None:
        """Why the batch of `step` will not come: most episodes fail, or dynamic sampling refills for ever.

        None while fewer than `FUTILE_BATCHES` batches' worth of groups were dropped since the last batch.
        """
        futile, config = filtered_groups - self._filtered_before, self._config
        if futile < FUTILE_BATCHES * config.train.groups_per_step:
            return None
        text = f"the last {futile} groups were dropped and step {step} is still without a batch: "
        failed = self._failures.total()
        if 2 * failed >= self._ended > 0:
            reason, count = self._failures.most_common(1)[0]
            return (
                f"{text}{failed} of {self._ended} episodes failed, {count} of them with: {reason}. Repair that "
                "first; `asyncrl episodes RUN --state failed` lists them"
            )
        return (
            f"{text}the filter {config.algo.filter!r} refuses their rewards, so the policy solves all of these "
            "tasks or none. Choose easier or harder tasks (env.args), a warmer start, or --algo.filter none"
        )
