"""What a run did, in words: the text at its end, the account of every episode, and the list of episodes.

All of it comes from run.db, so it can be asked for at any time, of a run that goes on as of one that died.
Called by `asyncrl train` and `asyncrl episodes`.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from asyncrl.metrics.format import as_text, count, duration, histogram, reasons, sparkline
from asyncrl.metrics.reader import EpisodeRow, RunReader, StepRow
from asyncrl.metrics.view import fold_states

if TYPE_CHECKING:
    from asyncrl.chat import ChatFormat

ENDS = 10
"""The first and last reward are means over this many steps."""
LIVE_STATES = ("queued", "leased", "done")
TEXT_CHARS = 60


def run_summary(run_dir: str | Path) -> str:
    """The text at the end of a run: reward, what was trained, dropped and why, and what to type next."""
    with RunReader(run_dir) as reader:
        by_state, drops = fold_states(reader.episode_states())
        tokens, sampled = reader.token_counts()
        steps = reader.steps()
        wall = steps[-1].ended - reader.created if steps else 0.0
        greedy = reader.greedy_states()
        rewards = [reward for _, reward in reader.rewards()]
        total = reader.config().get("train", {}).get("steps", 0)
        state = f"{reader.status}: {reader.reason}" if reader.reason else reader.status
        died = Counter({source: n for (source, what), n in reader.event_counts().items() if what == "died"})
        rows = [
            ("run", f"{reader.name} ({state})"),
            ("reward", _reward_text(rewards)),
            ("steps", f"{reader.last_step()} of {total} in {duration(wall)}"),
            ("tokens", f"{count(sampled)} sampled, {count(tokens)} in all"),
            ("episodes", f"{_trained(by_state, greedy, ' trained')}, {sum(drops.values())} dropped"),
            ("dropped", reasons(drops)),
            ("ended", reasons(reader.statuses())),
            *_per_episode(steps),
            ("token lag", histogram(reader.lag_histogram())),
            ("restarts", reasons(died)),
            *_repeated(reader),
            *_late(reader),
            ("run folder", str(run_dir)),
        ]
    model = Path(run_dir) / "model"
    if model.is_dir():
        rows.append(("model", str(model)))
    rows.append(("next", f"asyncrl eval {run_dir}"))
    rows.append(("", f"asyncrl episodes {run_dir} --summary"))
    return _aligned(rows)


def episodes_summary(run_dir: str | Path) -> str:
    """Accounts for every admitted episode, and says whether the account is right."""
    with RunReader(run_dir) as reader:
        group_size = int(reader.config().get("train", {}).get("group_size", 0))
        reuse = int(reader.config().get("replay", {}).get("reuse", 1))
        groups, greedy = reader.groups(), reader.greedy_states()
        admitted = groups * (group_size + bool(greedy))
        by_state, drops = fold_states(reader.episode_states())
        uses, trained_ids = reader.uses(), reader.episode_ids("trained")
        late = _late(reader)
    live = {state: by_state.get(state, 0) for state in LIVE_STATES}
    rows = [
        ("admitted", f"{admitted}  ({groups} groups of {group_size}{' and a greedy baseline' if greedy else ''})"),
        ("trained", _trained(by_state, greedy)),
        *[(reason, str(number)) for reason, number in sorted(drops.items())],
        ("live", f"{sum(live.values())}  ({', '.join(f'{n} {state}' for state, n in live.items())})"),
        *late,
    ]
    problems = find_problems(admitted, by_state, uses, trained_ids, reuse)
    final = by_state.get("trained", 0), sum(drops.values()), sum(live.values())
    verdict = (
        "DOES NOT ADD UP: " + "; ".join(problems)
        if problems
        else f"adds up: {final[0]} trained + {final[1]} dropped + {final[2]} live = {admitted} admitted, "
        "and every trained episode was in a trained batch"
    )
    return f"{_aligned(rows)}\n{verdict}"


def find_problems(
    admitted: int, by_state: Mapping[str, int], uses: Mapping[int, int], trained_ids: set[int], reuse: int
) -> list[str]:
    """What is wrong with the account; empty if nothing is.

    Args:
        admitted: groups admitted times their size.
        by_state: episodes by state.
        uses: batches whose step is done, by episode.
        trained_ids: the episodes whose state is `trained`.
        reuse: most batches that an episode may be part of.
    """
    problems = []
    known = {*LIVE_STATES, "trained", "filtered", "failed"}
    total = sum(by_state.values())
    if total != admitted:
        problems.append(f"{total} episodes are recorded, {admitted} were admitted")
    if strange := sorted(set(by_state) - known):
        problems.append(f"unknown states {', '.join(strange)}")
    if missing := trained_ids - uses.keys():
        problems.append(f"{len(missing)} trained episodes were in no trained batch, e.g. {min(missing)}")
    if reuse == 1 and (extra := uses.keys() - trained_ids):
        problems.append(f"{len(extra)} episodes of trained batches are not trained, e.g. {min(extra)}")
    if often := [episode for episode, number in uses.items() if number > reuse]:
        problems.append(f"{len(often)} episodes were trained more than replay.reuse = {reuse} times")
    return problems


def list_episodes(
    run_dir: str | Path,
    *,
    state: str | None = None,
    reason: str | None = None,
    group: int | None = None,
    limit: int = 20,
) -> str:
    """The newest episodes that match every filter, as a table, with their text if the model is at hand."""
    with RunReader(run_dir) as reader:
        found = reader.episodes(state=state, reason=reason, group=group, limit=limit)
        if not found:
            states = ", ".join(sorted({state for state, _ in reader.episode_states()})) or "none"
            return f"no episode matches; the states in this run are: {states}"
        chat = _chat_of(reader)
        columns = ("episode", "group", "task", "state", "reason", "reward", "tokens", "versions")
        table = Table(*columns, *(["text"] if chat else []), box=None, header_style="bold")
        for row in found:
            text = [_text_of(reader, row, chat)] if chat else []
            table.add_row(*_cells(row), *text)
        return as_text(table)


# ---- machinery -----------------------------------------------------------------------------------


def _per_episode(steps: Sequence[StepRow]) -> list[tuple[str, str]]:
    """Mean turns, tool calls and the like of an episode, at both ends of the run; nothing if all have one turn."""
    names = sorted({name for row in steps for name in row.metrics if name.startswith("env/")})
    if not names and all(row.metrics.get("turns", 1.0) == 1.0 for row in steps):
        return []
    ends = [[row.metrics for row in part if "turns" in row.metrics] for part in (steps[:ENDS], steps[-ENDS:])]
    told = []
    for name in ["turns", *names]:
        first, last = (sum(m.get(name, 0.0) for m in part) / max(1, len(part)) for part in ends)
        told.append(f"{name.removeprefix('env/')} {first:.2f} → {last:.2f}")
    return [("an episode", ", ".join(told))]


def _late(reader: RunReader) -> list[tuple[str, str]]:
    """What generators sent after they had lost its lease; nothing if there was none."""
    refused = reader.refused()
    return [("late", f"{refused} messages of lapsed leases, refused")] if refused else []


def _repeated(reader: RunReader) -> list[tuple[str, str]]:
    """Steps that were trained again after a restart and gave another result; nothing if all gave the same."""
    counts = reader.event_counts()
    differ = counts.get(("learner", "differs"), 0)
    if not differ:
        return []
    many = differ + counts.get(("learner", "repeated"), 0)
    events = reader.events(limit=-1)
    first = min(json.loads(event.detail)["step"] for event in events if event.what == "differs")
    text = f"{many} steps after a restart; {differ} of them DIFFER from the record, the first is step {first}"
    return [("repeated", text)]


def _reward_text(rewards: list[float]) -> str:
    if not rewards:
        return "no step was trained"
    first, last = rewards[:ENDS], rewards[-ENDS:]
    return (
        f"{sum(first) / len(first):.3f} (first {len(first)} steps) → {sum(last) / len(last):.3f} "
        f"(last {len(last)})  {sparkline(rewards, 40)}"
    )


def _trained(by_state: Mapping[str, int], greedy: Mapping[str, int], word: str = "") -> str:
    number, baselines = by_state.get("trained", 0), greedy.get("trained", 0)
    return f"{number}{word}" + (f" ({baselines} as greedy baselines)" if baselines else "")


def _aligned(rows: list[tuple[str, str]]) -> str:
    width = max(len(title) for title, _ in rows)
    return "\n".join(f"{title:<{width}}  {text}" for title, text in rows)


def _cells(row: EpisodeRow) -> list[str]:
    reward = "" if row.reward is None else f"{row.reward:g}"
    if len(row.rewards) > 1:
        reward += f" ({', '.join(f'{name} {value:g}' for name, value in sorted(row.rewards.items()))})"
    why = row.reason or row.status
    if row.greedy:
        why = f"{why} (greedy)".strip()
    low, high = row.min_version, row.max_version
    versions = str(low) if low == high else f"{low}-{high}"
    ids = [str(row.episode_id), str(row.group_id), row.task_id]
    return [*ids, row.state, why, reward, str(row.length), versions]


def _chat_of(reader: RunReader) -> ChatFormat | None:
    """The run's tokenizer; None if its model folder is no longer there or has none."""
    from asyncrl.chat import ChatFormat

    path = reader.config().get("model", {}).get("path")
    if not path or not (Path(path).expanduser() / "tokenizer.json").is_file():
        return None
    return ChatFormat(path)


def _text_of(reader: RunReader, row: EpisodeRow, chat: ChatFormat) -> str:
    """Prompt and completion, shortened to their last characters, where the answer is."""
    ids = array("i")
    for _, _, tokens in reader.episode_tokens(row.episode_id):
        ids.frombytes(tokens)
    if len(ids) < row.length:
        return "(reclaimed)"
    text = repr(chat.decode(ids))[1:-1]
    return text if len(text) <= TEXT_CHARS else "…" + text[-TEXT_CHARS + 1 :]
