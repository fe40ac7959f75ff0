"""`asyncrl diff`: the first step at which two runs differ, and in what.

Each step is compared in the order in which one thing leads to the next, so that the first difference is the cause
of all later ones or next to it:

    tasks ─▶ episodes ─▶ tokens ─▶ versions ─▶ behaviour log-probs ─▶ rewards ─▶ metrics ─▶ digest of the weights

Episodes are matched by their place in the batch, never by id: ids count what was admitted, dropped groups too.
Times are not compared, nor what the hub counts by the clock (`asyncrl.metrics.reader.learned`). Both journals are
opened read-only; the runs may be going on. Called by the command line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from asyncrl.journal import EpisodeTokens, Journal, JournalError, StoredBatch
from asyncrl.metrics.format import as_text
from asyncrl.metrics.reader import learned
from asyncrl.reclaim import reclaimed_step
from asyncrl.settings import UsageError

UNLIKE = ("run.name", "run.dir", "hub.port", "reward.endpoint")
"""Settings that are different in any two runs, or say nothing about them."""


@dataclass(frozen=True)
class Seen:
    """One step of one run."""

    batch: StoredBatch
    tasks: list[str]
    """Of the batch's groups, in order."""
    tokens: list[EpisodeTokens] | None
    """Of its episodes; None: they were removed to save space."""
    metrics: dict[str, float] | None
    """None: it is not trained yet."""
    digest: str


Finding = str
"""Where two steps differ, with both values; empty: nowhere."""


def diff(first: Path, second: Path) -> tuple[str, int]:
    """Compares two run folders; returns the text and the exit code: 0 equal, 1 different.

    Raises:
        UsageError: a journal cannot be read, or is damaged.
    """
    try:
        one = Journal.open(first / "run.db", read_only=True)
        try:
            two = Journal.open(second / "run.db", read_only=True)
            try:
                return _diff(one, two)
            finally:
                two.close()
        finally:
            one.close()
    except JournalError as error:
        raise UsageError(str(error)) from error


def _diff(one: Journal, two: Journal) -> tuple[str, int]:
    names = differing_settings(one.get("config_json"), two.get("config_json"))
    settings = f"settings that differ: {', '.join(names)}" if names else "settings: equal"
    ends = [int(journal.rows("SELECT coalesce(max(batch_id), 0) FROM batch")[0][0]) for journal in (one, two)]
    gone = max(reclaimed_step(journal) or 0 for journal in (one, two))
    note = f"\ntokens of steps 1 to {gone} were removed to save space, so they are not compared" if gone else ""
    for step in range(1, min(ends) + 1):
        pair = _seen(one, step, gone), _seen(two, step, gone)
        found = [(what, check(*pair)) for what, check in CHECKS.items()]
        if where := next(((what, text) for what, text in found if text), None):
            table = Table("step " + str(step), "", box=None, header_style="bold")
            for what, text in found:
                table.add_row(what, text or "equal")
            equal = f"equal up to step {step - 1}; " if step > 1 else ""
            sentence = f"{equal}the first difference is in step {step}, in {where[0]}: {where[1]}"
            return f"{settings}{note}\n{as_text(table)}\n{sentence}", 1
    both = f"all {min(ends)} steps that both have are equal"
    if ends[0] != ends[1]:
        longer = f"{(one, two)[ends[1] > ends[0]].path.parent} goes on to step {max(ends)}"
        return f"{settings}{note}\n{both}; {longer}", 1
    return f"{settings}{note}\n{both}", 0


def differing_settings(one: str, two: str) -> list[str]:
    """Dotted keys at which two configurations (JSON) differ."""
    mine, theirs = (
        {f"{section}.{key}": value for section, of in json.loads(text).items() for key, value in of.items()}
        for text in (one, two)
    )
    keys = sorted(mine.keys() | theirs.keys())
    return [key for key in keys if key not in UNLIKE and mine.get(key) != theirs.get(key)]


# ---- reading -------------------------------------------------------------------------------------


def _seen(journal: Journal, step: int, gone: int) -> Seen:
    batch = journal.batch(step)
    ids = [episode.episode_id for episode in batch.episodes]
    held = journal.episode_tokens(ids) if step > gone else {}
    tasks = journal.rows(
        "SELECT task_id FROM json_each(?) JOIN grp ON group_id = value JOIN task USING (task_index)"
        " ORDER BY json_each.key",
        json.dumps(batch.group_ids),
    )
    done = journal.rows("SELECT metrics_json, digest FROM step WHERE step = ?", step)
    return Seen(
        batch,
        [task for (task,) in tasks],
        [held[i] for i in ids] if step > gone else None,
        learned(json.loads(done[0][0])) if done else None,
        done[0][1] if done else "",
    )


# ---- comparing -----------------------------------------------------------------------------------


def _tasks(one: Seen, two: Seen) -> Finding:
    for place, pair in enumerate(zip(one.tasks, two.tasks, strict=False)):
        if pair[0] != pair[1]:
            return f"group {place} is of task {pair[0]} and of task {pair[1]}"
    mine, theirs = len(one.tasks), len(two.tasks)
    return f"{mine} and {theirs} groups" if mine != theirs else ""


def _episodes(one: Seen, two: Seen) -> Finding:
    """How many of each group, which are greedy, and how they ended."""
    for place, (a, b) in enumerate(zip(_groups(one), _groups(two), strict=False)):
        if len(a) != len(b):
            return f"group {place} has {len(a)} and {len(b)} episodes"
        for member, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return f"episode {member} of group {place}: {x} and {y}"
    return ""


def _groups(seen: Seen) -> list[list[str]]:
    """Of each group's episodes, what they are."""
    found: dict[int, list[str]] = {group_id: [] for group_id in seen.batch.group_ids}
    for episode in seen.batch.episodes:
        found.setdefault(episode.group_id, []).append(episode.status + (" (greedy)" if episode.greedy else ""))
    return list(found.values())


def _in_tokens(values: Callable[[EpisodeTokens], NDArray[Any]], one: Seen, two: Seen) -> Finding:
    """The first token of the first episode of which something differs."""
    for place, (a, b) in enumerate(zip(one.tokens or [], two.tokens or [], strict=False)):
        mine, theirs = values(a), values(b)
        short = min(len(mine), len(theirs))
        unequal = np.flatnonzero(mine[:short].view(np.int32) != theirs[:short].view(np.int32))
        if len(unequal) or len(mine) != len(theirs):
            at = int(unequal[0]) if len(unequal) else short
            told = [_at(found, values(found), at) for found in (a, b)]
            return f"{_name(one, place)}, token {at}: {told[0]} and {told[1]}"
    return ""


def _at(held: EpisodeTokens, values: NDArray[Any], at: int) -> str:
    if at >= len(values):
        return f"none (it has {len(values)})"
    sampled = np.repeat([span.sampled for span in held.spans], [span.n for span in held.spans])
    return f"{values[at].item()!r} ({'sampled' if sampled[at] else 'observed'})"


def _versions(held: EpisodeTokens) -> NDArray[np.int32]:
    """[length] the version that sampled each token; -1: observed."""
    versions = [span.version if span.sampled else -1 for span in held.spans]
    return np.repeat(np.array(versions, np.int32), [span.n for span in held.spans])


def _rewards(one: Seen, two: Seen) -> Finding:
    for place, (a, b) in enumerate(zip(one.batch.episodes, two.batch.episodes, strict=False)):
        if (a.reward, a.rewards) != (b.reward, b.rewards):
            return f"{_name(one, place)}: {a.reward!r} {a.rewards} and {b.reward!r} {b.rewards}"
    return ""


def _name(seen: Seen, place: int) -> str:
    """An episode as a reader finds it again: its place in its group, and the group's task."""
    episodes = seen.batch.episodes
    group = episodes[place].group_id
    member = sum(episode.group_id == group for episode in episodes[:place])
    return f"episode {member} of task {seen.tasks[seen.batch.group_ids.index(group)]}"


def _metrics(one: Seen, two: Seen) -> Finding:
    if one.metrics is None or two.metrics is None:
        trained = [seen.metrics is not None for seen in (one, two)]
        return "" if trained[0] == trained[1] else f"trained in the {'first' if trained[0] else 'second'} run only"
    unequal = list(_unequal(one.metrics, two.metrics))
    if not unequal:
        return ""
    name = "loss" if "loss" in unequal else unequal[0]
    more = f" (and {len(unequal) - 1} more)" if len(unequal) > 1 else ""
    return f"{name} {one.metrics.get(name)!r} and {two.metrics.get(name)!r}{more}"


def _unequal(one: Mapping[str, float], two: Mapping[str, float]) -> Iterator[str]:
    for name in sorted(one.keys() | two.keys()):
        a, b = one.get(name), two.get(name)
        if a != b and not (a is not None and b is not None and math.isnan(a) and math.isnan(b)):
            yield name


def _digest(one: Seen, two: Seen) -> Finding:
    known = one.digest and two.digest
    return f"{one.digest} and {two.digest}" if known and one.digest != two.digest else ""


CHECKS: dict[str, Callable[[Seen, Seen], Finding]] = {
    "tasks": _tasks,
    "episodes": _episodes,
    "tokens": partial(_in_tokens, lambda held: held.tokens),
    "versions": partial(_in_tokens, _versions),
    "behaviour log-probs": partial(_in_tokens, lambda held: held.logprobs),
    "rewards": _rewards,
    "metrics": _metrics,
    "digest": _digest,
}
"""In the order in which one leads to the next."""
