"""Learner and hub at one end of a network, a generator at the other, and what networks do: delay, loss, a cut."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from asyncrl.metrics.reader import RunReader

LIMIT_S = 200.0
CUT_S = 8.0
"""Longer than a connection without any traffic lives, and than a lease where others are heard."""

pytestmark = pytest.mark.slow


def _links() -> ModuleType:
    """The module `tests/links.py`, which is also a script."""
    path = Path(__file__).parents[1] / "links.py"
    spec = importlib.util.spec_from_file_location("links", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["links"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


links = _links()


def _wait_for(run: links.Crossing, happened: Callable[[RunReader], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        assert all(process.poll() is None for process in run.processes.values()), run.output()
        with RunReader(run.dir) as reader:
            if happened(reader):
                return
        time.sleep(0.1)  # Another process writes the journal; there is no event to wait for.
    raise AssertionError(run.output())


def test_a_slow_lossy_link_that_is_cut_loses_nothing_and_restarts_nobody(tmp_path, tiny_model, account) -> None:
    settings = ["--model.path", str(tiny_model), "--algo.filter", "none", "--train.steps", "8"]
    settings += ["--train.groups_per_step", "4", "--train.group_size", "4", "--sampling.max_tokens", "100"]
    settings += ["--generator.engine", "transformers", "--generator.slots", "16", "--generator.ahead", "8"]
    settings += ["--generator.max_model_len", "160", "--generator.chunk_tokens", "8", "--staleness.max_lag", "8"]
    settings += ["--hub.lease_s", "6", "--checkpoint.every", "100"]
    try:
        link = links.Link(seed=1)
    except links.LinkUnavailable as error:
        pytest.skip(f"a link needs user namespaces and TUN devices: {error}")
    with link, links.Crossing(link, tmp_path, *settings) as run:
        link.set(delay_s=0.02, loss=0.01)
        run.start("generator-7")
        _wait_for(run, lambda reader: reader.last_step() >= 2)
        link.set(cut="ab ba")
        cut_at = time.time()
        time.sleep(CUT_S)  # The link is away for so long: nothing else ends it.
        with RunReader(run.dir) as reader:
            before = reader.last_step()
        link.set(cut="")
        assert run.wait(LIMIT_S) == {"learner": 0, "generator-7": 0}, run.output()
    with RunReader(run.dir) as reader:
        account(reader, 8, 16)
        assert before < 8, "the run ended without the link"
        arrived = f"SELECT count(*) FROM lease WHERE state = 'lapsed' AND granted < {cut_at - 2.0}"
        assert reader._one(arrived) == 0, "nobody else could go on with its episode"
        assert not [event for event in reader.events() if event.what in ("given_up", "restart")]
