"""Real runs in which one version of the weights goes wrong: it is named in the journal, and the next one is used.

The faults are injected from here, into the processes of a run, before they import anything; see `start`.
"""

from __future__ import annotations

import os
import signal

import pytest

pytestmark = pytest.mark.slow

IN_LEARNER = """
import sys
if "learner" in sys.orig_argv:
    import time
    from asyncrl.messages import TensorMeta
    from asyncrl.weights import publisher
    from asyncrl.weights.buckets import Snapshot
    fill, seal, send = Snapshot.fill, Snapshot.seal, publisher.send
    done = []
    def now(snapshot):
        # Once, for the first version from 4 on that is really served.
        if snapshot.version < 4 or done:
            return False
        done.append(snapshot)
        return True
"""
NAN = f"""{IN_LEARNER}
    def damaged(snapshot):
        if now(snapshot):
            snapshot._views[1][1].view(-1)[:3] = float("nan")
        seal(snapshot)
    Snapshot.seal = damaged
"""
WRONG_SHAPE = f"""{IN_LEARNER}
    right = {{}}
    def damaged(snapshot):
        seal(snapshot)
        if now(snapshot):
            right[snapshot] = snapshot.buckets
            first, *others = snapshot.buckets[0]
            turned = TensorMeta(first.name, first.dtype, first.shape[::-1])
            snapshot.buckets = [[turned, *others], *snapshot.buckets[1:]]
    def filled(snapshot, version, weights):
        snapshot.buckets = right.pop(snapshot, snapshot.buckets)
        fill(snapshot, version, weights)
    Snapshot.seal, Snapshot.fill = damaged, filled
"""
NEVER_COMPLETES = f"""{IN_LEARNER}
    def stuck(group, snapshot):
        if now(snapshot):
            time.sleep(6)  # The fault: longer than the time-out of a transfer.
        send(group, snapshot)
    publisher.send = stuck
"""
STOPS_ITSELF = """
import os, signal, sys
if "generator-1" in sys.orig_argv:
    from asyncrl.weights.groups import Group
    begin, count = Group.begin, []
    def stopped(group, tensor):
        count.append(1)
        if len(count) == 20:
            os.kill(os.getpid(), signal.SIGSTOP)
        return begin(group, tensor)
    Group.begin = stopped
"""


def _details(reader, what: str) -> list[str]:
    return [event.detail for event in reader.events() if event.what == what]


def _starts(reader) -> dict[str, int]:
    """How often each process was started."""
    started = [e.source for e in reader.events() if e.what == "started" and e.detail.startswith("pid")]
    return {name: started.count(name) for name in started}


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


@pytest.mark.parametrize(
    ("lag", "fault", "reason"),
    [
        (0, NAN, "3 of 64 values of tensor model.norm.weight are not finite"),
        (2, WRONG_SHAPE, "tensor model.embed_tokens.weight is float32 [64, 264], expected float32 [264, 64]"),
    ],
    ids=["nan", "shape"],
)
def test_an_unusable_version_is_refused_by_name_and_the_next_one_is_used(
    start, account, applied, lag: int, fault: str, reason: str
) -> None:
    run = start("--staleness.max_lag", str(lag), fault=fault)
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 12, 16)
        details = _details(reader, "version_refused")
        refused = int(details[0].split("version ")[1].split(":")[0])
        assert refused >= 4
        assert all(f"version {refused}: {reason}; nothing was applied" in detail for detail in details)
        for versions in applied(reader).values():
            assert refused not in versions
            assert max(versions) > refused
        assert set(_starts(reader).values()) == {1}, "somebody was blamed"
        lags = reader.lag_histogram()
        # A synchronous run goes on with the version before for one step, and says so.
        assert lag > 0 or (lags.keys() == {0, 1} and lags[1] < lags[0] / 4)


def test_a_broadcast_that_never_completes_is_given_up_and_the_next_one_works(start, account, applied) -> None:
    run = start("--weights.timeout_s", "2", fault=NEVER_COMPLETES)
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 12, 16)
        details = _details(reader, "transfer_failed")
        assert "publisher (silent)" in details[0]
        assert "no sign of life from publisher (rank 0)" in details[0]
        assert "at most 2 s (weights.timeout_s)" in details[0]
        failed = int(details[0].split()[1].rstrip(","))
        for versions in applied(reader).values():
            assert max(versions) > failed >= 4
        assert set(_starts(reader).values()) == {1}, "somebody was blamed"


def test_a_generator_stopped_in_a_broadcast_is_left_out_and_rejoins(start, account, applied) -> None:
    run = start(
        "--weights.timeout_s", "3", "--weights.bucket_mb", "0.05", "--hub.lease_s", "3", "--steps", "30",
        "--supervise.hang_s", "120", fault=STOPS_ITSELF,
    )  # fmt: skip
    run.wait_for_step(1)
    pid = run.pid("generator-1")
    run.wait_for("the stop", lambda _: _state(pid) == "T")
    with run.reader() as reader:
        step, before = reader.last_step(), applied(reader)
    run.wait_for_step(step + 5)
    assert _state(pid) == "T", "training waited for it"
    with run.reader() as reader:
        during = applied(reader)
        assert any("generator-1 (away)" in detail for detail in _details(reader, "transfer_failed"))
    assert during.get("generator-1") == before.get("generator-1")
    newest = max(during["generator-0"])
    # The stop may come before generator-0 has told of any version.
    assert newest > max(before.get("generator-0", [0]))
    os.kill(pid, signal.SIGCONT)
    run.wait_for(
        "a later version in generator-1", lambda reader: max(applied(reader).get("generator-1", [0])) > newest
    )
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 30, 16)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_run_over_shared_memory_broadcasts_nothing_and_trains(start, account, applied, lag: int) -> None:
    run = start("--weights.backend", "shm", "--staleness.max_lag", str(lag))
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 12, 16)
        for versions in applied(reader).values():
            assert versions == sorted(versions)
            assert versions[-1] >= 10
        assert sum(row.nbytes > 0 for row in reader.versions()) >= 6
        if lag == 0:
            assert not _details(reader, "version_refused")
            assert reader.lag_histogram().keys() == {0}
