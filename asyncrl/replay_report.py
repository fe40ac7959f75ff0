"""What `asyncrl replay` says: is it equal; if not, where does the difference begin, and how large is it?

The numbers are `asyncrl.learner.replaying`'s; here they are only compared. Called by `asyncrl.replay`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from asyncrl.metrics.format import as_text

if TYPE_CHECKING:
    from asyncrl.learner.replaying import Distance, Replayed, Step
    from asyncrl.replay import Plan

TOLERANCE = 1e-5
"""Largest difference, absolute or relative, between numbers of ranks that sum in another order."""
ROWS = 12
"""Most steps in a table; of more, those at both ends are shown."""
SHOWN = ("loss", "grad_norm", "entropy", "tokens_trained")
"""Metrics in the table of another algorithm; JSON has all."""


class Gap(NamedTuple):
    """One metric of one step that is not what was recorded."""

    step: int
    name: str
    recorded: float | None
    replayed: float

    @property
    def size(self) -> float:
        """Absolute below 1, else relative."""
        if self.recorded is None or not math.isfinite(self.recorded - self.replayed):
            return math.inf
        return abs(self.recorded - self.replayed) / max(1.0, abs(self.recorded))


def report(plan: Plan, found: Replayed, as_json: bool) -> tuple[str, int]:
    """The text, or JSON, and the exit code."""
    gaps = [gap for step in found.steps for gap in gaps_of(step)]
    digests = [step.step for step in found.steps if step.recorded_digest not in ("", step.digest)]
    equal = not (gaps or digests or found.unequal)
    sizes = [gap.size for gap in gaps] + [distance.relative for distance in found.checkpoints.values()]
    close = max(sizes, default=0.0) <= TOLERANCE
    alike = equal or (close and not plan.exact)
    sentence = _sentence(plan, found, gaps, digests, alike, max(sizes, default=0.0))
    status = 0 if alike or found.other is not None else 1
    if as_json:
        return json.dumps(_as_json(plan, found, gaps, equal, sentence), indent=2), status
    table = _others(found.steps, found.other) if found.other is not None else _steps(found.steps)
    begin = f"from checkpoint step {found.start}" if found.start else "from the initial model"
    ranks = f"{plan.config.learner.ranks} rank(s) on {plan.config.learner.device}"
    head = f"{plan.run_dir}: steps {plan.first} to {plan.last}, {begin}, {ranks}"
    if plan.note:
        head += f"\nnot all of these steps were trained with one set of settings: {plan.note}"
    return f"{head}\n{as_text(table)}\n{sentence}", status


def gaps_of(step: Step) -> list[Gap]:
    """The metrics of a step that differ by a bit."""
    pairs = [(name, step.recorded.get(name), value) for name, value in step.replayed.items()]
    return [Gap(step.step, *pair) for pair in pairs if not _same(*pair[1:])]


def _same(recorded: float | None, replayed: float) -> bool:
    return recorded is not None and (recorded == replayed or (math.isnan(recorded) and math.isnan(replayed)))


def _sentence(
    plan: Plan, found: Replayed, gaps: list[Gap], digests: list[int], alike: bool, largest: float
) -> str:
    """What came out, in one line, and what it may mean."""
    count = len(found.steps)
    many = f"{count} step{'s' if count > 1 else ''}"
    stored = f"; checkpoints compared: {', '.join(map(str, found.checkpoints))}" if found.checkpoints else ""
    if not gaps and not found.unequal and not digests:
        told = f"{many} replayed: bitwise equal{stored}"
    elif not plan.exact:
        worst = max(gaps, key=lambda gap: gap.size, default=None)
        where = f" ({worst.name} of step {worst.step})" if worst and worst.size == largest else " (weights)"
        verdict = f"equal to {TOLERANCE:g}" if alike else f"NOT equal to {TOLERANCE:g}"
        told = f"{many} replayed: {verdict}; largest difference {largest:.2g}{where}{stored}"
    else:
        first = min([gap.step for gap in gaps] + digests + found.unequal)
        names = ", ".join(gap.name for gap in gaps if gap.step == first) or "the state only"
        told = f"{many} replayed: they DIFFER from step {first} on ({names}){stored}"
    if found.moved is None:
        return told
    algo = plan.other.algo.name if plan.other is not None else ""
    return (
        f"the run's own algorithm: {told}\n{many} with the other one (preset {algo}): at the end its weights are "
        f"{found.moved.relative:.3g} away from the run's (relative L2), the largest difference of a number is "
        f"{found.moved.largest:.3g}"
    )


def _ends(rows: Sequence[Any]) -> list[Any | None]:
    """All rows, or those at both ends with None between."""
    half = ROWS // 2
    return list(rows) if len(rows) <= ROWS else [*rows[:half], None, *rows[-half:]]


def _steps(steps: Sequence[Step]) -> Table:
    table = Table("step", "loss", "grad_norm", "reward", "digest", "", box=None, header_style="bold")
    for step in _ends(steps):
        if step is None:
            table.add_row("…")
            continue
        names = [gap.name for gap in gaps_of(step)]
        told = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        digest = step.digest if step.recorded_digest in ("", step.digest) else f"{step.digest} ≠ recorded"
        metrics = [_number(step.replayed.get(name)) for name in ("loss", "grad_norm", "reward")]
        table.add_row(str(step.step), *metrics, digest, f"differ: {told}" if told else "equal")
    return table


def _others(recorded: Sequence[Step], other: Sequence[Step]) -> Table:
    table = Table("step", *SHOWN, title="recorded → with the other algorithm", box=None, header_style="bold")
    for pair in _ends(list(zip(recorded, other, strict=True))):
        if pair is None:
            table.add_row("…")
            continue
        own, now = pair
        cells = [f"{_number(own.recorded.get(name))} → {_number(now.replayed.get(name))}" for name in SHOWN]
        table.add_row(str(own.step), *cells)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _as_json(plan: Plan, found: Replayed, gaps: list[Gap], equal: bool, sentence: str) -> dict[str, Any]:
    def row(step: Step) -> dict[str, Any]:
        digests = {"recorded_digest": step.recorded_digest, "digest": step.digest}
        return {"step": step.step, "recorded": step.recorded, "replayed": step.replayed} | digests

    def weights(distance: Distance | None) -> dict[str, float] | None:
        return None if distance is None else distance._asdict()

    return {
        "run": str(plan.run_dir),
        "start": found.start,
        "ranks": plan.config.learner.ranks,
        "exact": plan.exact,
        "note": plan.note,
        "equal": equal,
        "steps": [row(step) for step in found.steps],
        "differences": [gap._asdict() for gap in gaps],
        "checkpoints": {step: weights(distance) for step, distance in found.checkpoints.items()},
        "unequal_checkpoints": found.unequal,
        "other": None if found.other is None else [row(step) for step in found.other],
        "other_algo": None if plan.other is None else plan.other.algo.model_dump(mode="json"),
        "weights_moved": weights(found.moved),
        "sentence": sentence,
    }
