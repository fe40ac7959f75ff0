"""A generator across a bad network: what delay, loss and a link that is away for half a minute do to a run.

Hub and learner in one network namespace, the generator in another, packets forwarded by `tests/links.py`. First a
run over a slow, lossy link; then runs whose link is cut in the middle, in both directions and in one. The load is
made steady, so that what is measured is the link: the engine takes a fixed time for each step (as a GPU would),
episodes last some seconds, and `max_lag` is large enough that generation never waits for the learner. Tokens are
counted in the generator's engine, four times a second, so the time without a link is seen as well.

*Back* is the time from the link's return to the beginning of the first three seconds whose mean is at least 95 %
of that of the fifteen seconds before the cut. Every run goes on to its end and must account for every episode.

    python tests/benchmarks/links.py --json tests/benchmarks/results/links.json [--cut 30] [--only both]
"""

from __future__ import annotations

import argparse
import bisect
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import zmq

from asyncrl.metrics.reader import RunReader
from asyncrl.toy import init_model

CUTS = {"both": "ab ba", "to the generator": "ab", "from the generator": "ba"}
SETTLE_S, BEFORE_S, AFTER_S, WINDOW_S = 10.0, 15.0, 15.0, 3.0
LIMIT_S = 400.0
STEP_S = 0.15
STEPS = 32
SETTINGS = (
    f"--algo.filter none --train.steps {STEPS} --train.groups_per_step 4 --train.group_size 4 "
    "--checkpoint.every 1000 --sampling.max_tokens 40 --generator.engine transformers --generator.slots 32 "
    "--generator.ahead 16 --generator.max_model_len 96 --generator.chunk_tokens 8 --staleness.max_lag 24"
).split()
STEADY = f"""
import json, os, threading, time
from asyncrl.generator.engines.driver import EngineDriver
begin = EngineDriver.__init__

def tell(driver):
    with open(os.environ["LINKS_TOLD"], "w", buffering=1) as told:
        while True:
            print(json.dumps([time.time(), driver.stats.sampled_tokens]), file=told)
            time.sleep(0.25)  # Four readings a second.

def init(self, engine, *args, **kwargs):
    step, due = engine.step, [0.0]
    def steady():
        due[0] = max(due[0] + {STEP_S}, time.monotonic())
        time.sleep(max(0.0, due[0] - time.monotonic()))  # A steady pace, so that the link is what is measured.
        return step()
    engine.step = steady
    begin(self, engine, *args, **kwargs)
    threading.Thread(target=tell, args=(self,), daemon=True).start()

EngineDriver.__init__ = init
"""
"""What every Python process of the generator runs first (`sitecustomize`)."""


def load_links() -> Any:
    """The module `tests/links.py`, which is also a script."""
    spec = importlib.util.spec_from_file_location("the_links", Path(__file__).parents[1] / "links.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["the_links"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Told:
    """What the generator's engine has sampled, as a function of time."""

    def __init__(self, path: Path) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        self._times, self._tokens = [row[0] for row in rows], [row[1] for row in rows]

    def rate(self, start: float, end: float) -> float:
        """Tokens per second between two times."""
        return (self._at(end) - self._at(start)) / (end - start)

    def _at(self, when: float) -> float:
        i = min(max(1, bisect.bisect(self._times, when)), len(self._times) - 1)
        (t0, t1), (n0, n1) = self._times[i - 1 : i + 1], self._tokens[i - 1 : i + 1]
        return float(n0 + (n1 - n0) * (when - t0) / (t1 - t0))


def accounted(reader: RunReader) -> dict[str, Any]:
    """Checks that nothing was lost or trained twice; returns what happened to the leases."""
    assert reader.status == "finished", reader.status
    assert [row.step for row in reader.steps()] == list(range(1, STEPS + 1))
    states, uses = reader.episode_states(), reader.uses()
    assert {state for state, _ in states} <= {"trained", "filtered", "failed"}, states
    assert set(uses.values()) == {1}
    assert set(uses) == reader.episode_ids("trained")
    leases = reader._one("SELECT count(*) FROM lease")
    lapsed = reader._one("SELECT count(*) FROM lease WHERE state = 'lapsed'")
    return {"episodes": len(uses), "leases": leases, "lapsed": lapsed}


def run(links: Any, folder: Path, model: Path, during: Callable[[Any], None]) -> tuple[RunReader, Told]:
    """One run to its end; `during(link)` is called once it has done three steps."""
    (folder / "first").mkdir(parents=True)
    (folder / "first" / "sitecustomize.py").write_text(STEADY)
    variables = {"PYTHONPATH": str(folder / "first"), "LINKS_TOLD": str(folder / "told"), "OMP_NUM_THREADS": "1"}
    settings = [*SETTINGS, "--model.path", str(model)]
    with links.Link() as link, links.Crossing(link, folder, *settings, environment=variables) as crossing:
        link.set(delay_s=0.01)
        crossing.start("generator-7")
        deadline = time.monotonic() + LIMIT_S
        while True:
            with RunReader(crossing.dir) as reader:
                if reader.last_step() >= 3:
                    break
            assert time.monotonic() < deadline, crossing.output()
            assert all(process.poll() is None for process in crossing.processes.values()), crossing.output()
            time.sleep(0.2)  # Another process writes the journal; there is no event to wait for.
        during(link)
        codes = crossing.wait(LIMIT_S)
        assert codes == {"learner": 0, "generator-7": 0}, (codes, crossing.output())
    return RunReader(crossing.dir), Told(folder / "told")


def cut_run(links: Any, folder: Path, model: Path, cut: str, cut_s: float) -> dict[str, Any]:
    """A run whose link is cut in the middle."""
    times: list[float] = []

    def during(link: Any) -> None:
        time.sleep(SETTLE_S + BEFORE_S)  # Measured time passes.
        for wanted, wait_s in ((cut, cut_s), ("", AFTER_S + WINDOW_S)):
            link.set(cut=wanted)
            times.append(time.time())
            time.sleep(wait_s)  # Measured time passes.

    reader, told = run(links, folder, model, during)
    away, back = times
    before = told.rate(away - BEFORE_S, away)
    starts = [i / 4 for i in range(int(4 * AFTER_S))]
    good = [s for s in starts if told.rate(back + s, back + s + WINDOW_S) >= 0.95 * before]
    with reader:
        applied = [event.time - back for event in reader.events() if event.what == "weights_applied"]
        return {
            "before_tokens_s": before,
            "during_tokens_s": [told.rate(away + i, away + i + 1) for i in range(int(cut_s))],
            "after_tokens_s": [told.rate(back + i, back + i + 1) for i in range(int(AFTER_S))],
            "after_mean_share": told.rate(back + 5, back + AFTER_S) / before,
            "back_s": good[0] if good else None,
            "weights_s": min((t for t in applied if t > 0), default=None),
            **accounted(reader),
        }


def lossy_run(links: Any, folder: Path, model: Path) -> dict[str, Any]:
    """A run over a slow link that loses packets."""
    reader, told = run(links, folder, model, lambda link: link.set(delay_s=0.05, loss=0.01))
    with reader:
        rows = reader.steps()
        start, end = rows[4].ended, rows[-6].ended
        return {"tokens_s": told.rate(start, end), **accounted(reader)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--cut", type=float, default=30.0, metavar="S", help="length of the cut [30]")
    parser.add_argument("--only", choices=["lossy", *CUTS], help="one of the runs")
    options = parser.parse_args()
    links, found = load_links(), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = init_model(folder / "model", hidden=64, layers=2)
        if options.only in (None, "lossy"):
            row = found["lossy"] = lossy_run(links, folder / "lossy", model)
            print(f"50 ms and 1 % loss each way: {row['tokens_s']:.0f} tokens/s; {row['episodes']} episodes, all "
                  "accounted for", flush=True)  # fmt: skip
        for cut, directions in CUTS.items():
            if options.only not in (None, cut):
                continue
            row = found[cut] = cut_run(links, folder / cut.replace(" ", "_"), model, directions, options.cut)
            weights = "never" if row["weights_s"] is None else f"{row['weights_s']:.1f} s"
            print(f"cut {cut}: {row['before_tokens_s']:.0f} tokens/s before; back after {row['back_s']} s; "
                  f"{100 * row['after_mean_share']:.0f} % from 5 s on; new weights after {weights}; "
                  f"{row['lapsed']} of {row['leases']} leases lapsed; all accounted for", flush=True)  # fmt: skip
            print("  per second during: " + " ".join(f"{rate:.0f}" for rate in row["during_tokens_s"]))
            print("  per second after:  " + " ".join(f"{rate:.0f}" for rate in row["after_tokens_s"]), flush=True)
    if options.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "zmq": zmq.zmq_version()}
        about = {"date": date.today().isoformat(), "cores": os.cpu_count(), "cut_s": options.cut, **versions}
        options.json.write_text(json.dumps({"about": about, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
