"""A few thousand hostile messages at every bound socket of real processes; the whole is `benchmarks/fuzz.py`."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from asyncrl import keys
from asyncrl.intake import Intake
from asyncrl.messages import Chunks, Hello, NextBatch, Offer, ProcessEvent, Sent, Shutdown, StepDone, Turn, decode
from asyncrl.peers import MAX_PEERS, Control, Peers, introduces, may_say
from asyncrl.scheduler import Verdict

BENCHMARKS = Path(__file__).parent / "benchmarks"


def _benchmark(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


hostile = _benchmark("hostile")
fuzz = _benchmark("fuzz")


@pytest.mark.slow
@pytest.mark.parametrize(("target", "keyed"), [("hub", True), ("worker", False)])
def test_hostile_messages_end_run_and_leave_nothing(
    target: str, keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keys.ENVIRONMENT, "")
    rows = asyncio.run(fuzz.bench(target, 3000, 0.1, keyed))
    assert all(row["alive"] and row["traces"] == [] for row in rows)
    assert all(row["rss_mib"][-1] - row["rss_mib"][0] < 64 for row in rows)
    if target == "hub":
        assert rows[-1]["malformed"] > 2000


# ---- what may be said to the hub ---------------------------------------------------------------------


def _of(tag: str) -> object:
    return next(each for each in hostile.HUB if msgspec.to_builtins(each)["type"] == tag)


def test_every_message_has_exactly_the_senders_that_its_docstring_names() -> None:
    roles = ("generator", "learner", "publisher", "supervisor")
    for each in hostile.HUB:
        if isinstance(each, Hello):
            continue
        told = (type(each).__doc__ or "").lower()
        may = {role for role in roles if may_say(role, f"{role}-0", each)}
        named = {role for role in roles if role in told.split(" to hub")[0]} if " to hub" in told else set()
        if isinstance(each, ProcessEvent):
            named = {"supervisor"}  # The generator's own is below.
        assert may == (set() if isinstance(each, Chunks) else named), each


def test_a_generator_may_only_say_that_it_leaves_itself() -> None:
    assert may_say("generator", "generator-1", ProcessEvent("generator-1", "left"))
    assert not may_say("generator", "generator-1", ProcessEvent("generator-2", "left"))
    assert not may_say("generator", "generator-1", ProcessEvent("generator-1", "died"))
    assert not may_say("generator", "generator-1", Shutdown("now"))


@pytest.mark.parametrize("asked", [NextBatch(0, 0, 1), NextBatch(1, 1, 1), NextBatch(1, 7, 2)])
def test_a_share_that_no_batch_has_is_not_asked_for(asked: NextBatch) -> None:
    assert not may_say("learner", "learner-0", asked)


@pytest.mark.parametrize(
    ("identity", "role", "name"),
    [
        (b"generator-0/b", "generator", "generator-0"),
        (b"generator-0/a", "generator", "generator-1"),
        (b"\xff\xfe/a", "generator", "\ufffd\ufffd"),
        (b"/a", "generator", ""),
        (b"a/b/a", "generator", "a/b"),
        (b"publisher/a", "generator", "publisher"),
        (b"other/a", "publisher", "other"),
        (b"learner-0/a", "generator", "learner-0"),
        (b"generator-0/a", "learner", "generator-0"),
        (b"root/a", "root", "root"),
        (b"x" * 254 + b"/a", "generator", "x" * 254),
    ],
)
def test_a_hello_under_a_name_that_is_not_its_own_is_none(identity: bytes, role: str, name: str) -> None:
    assert not introduces(identity, Hello(role, name, "a"))


def test_real_processes_are_introduced() -> None:
    for role, name in (("generator", "node7"), ("learner", "learner-3"), ("publisher", "publisher")):
        assert introduces(f"{name}/a".encode(), Hello(role, name, "a"))


def test_more_peers_than_the_hub_remembers_push_out_the_oldest_only() -> None:
    peers = Peers()
    friend = Hello("generator", "friend", "a")
    forgotten = []
    for number in range(3 * MAX_PEERS):
        if number % 1000 == 0:
            forgotten.append(peers.add(b"friend/a", friend))
        forgotten.append(peers.add(f"g{number}/a".encode(), Hello("generator", f"g{number}", "a")))
        peers.forget(forgotten[-1] or "")
    assert peers.find("friend") == b"friend/a"
    assert "friend" not in forgotten
    assert len(peers.generators()) == MAX_PEERS


BEYOND = {
    "a step before the first": {"type": "next_batch", "step": -1, "rank": 0, "ranks": 1},
    "more ranks than there are machines": {"type": "next_batch", "step": 1, "rank": 0, "ranks": 10**9},
    "no ranks": {"type": "next_batch", "step": 1, "rank": 0, "ranks": 0},
    "a number that SQLite does not hold": {"type": "step_done", "step": 1, "batch_id": 2**63, "metrics": {}},
    "a million leases": {"type": "heartbeat", "leases": list(range(1_000_000))},
    "a hundred thousand metrics": {"type": "heartbeat", "stats": {str(i): 1.0 for i in range(100_000)}},
    "a name of a megabyte": {"type": "hello", "role": "generator", "name": "x" * 2**20, "incarnation": "a"},
    "a duration that is none": {"type": "sent", "epoch": 1, "version": 1, "seconds": float("nan"), "nbytes": 1},
    "a duration without end": {"type": "sent", "epoch": 1, "version": 1, "seconds": float("inf"), "nbytes": 1},
    "an infinite capacity": {"type": "hello", "role": "g", "name": "g", "incarnation": "a", "capacity": 2**62},
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_value_that_no_handler_could_take_is_not_decoded(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode(BEYOND[name]))


def test_the_control_socket_decodes_nothing_that_is_not_for_it() -> None:
    decoder = msgspec.msgpack.Decoder(Control)
    for tag in ("score", "lease", "chunks", "welcome", "batch"):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(msgspec.msgpack.encode(_of(tag)))
    for tag in ("hello", "offer", "shutdown"):
        decoder.decode(msgspec.msgpack.encode(_of(tag)))
    assert {Offer, Sent, StepDone} <= set(Control.__args__)


class _Scheduler:
    """Accepts every turn."""

    def turn(self, _turn: Turn) -> Verdict:
        return Verdict.ACCEPTED


@pytest.mark.parametrize(
    "value",
    [msgspec.msgpack.Ext(1, b"\x80"), float("nan"), hostile.nested(700)],
    ids=["an extension", "no number", "nested 700 deep"],
)
def test_a_turn_that_the_journal_could_not_give_back_is_refused_and_the_hub_goes_on(value: object) -> None:
    rewards = {"r": value} if isinstance(value, float) else {"r": 1.0}
    tree = msgspec.msgpack.decode(value) if isinstance(value, bytes) else value
    content = "x" if isinstance(value, float) else tree
    message = Chunks(1, [], [Turn(3, 5, 0, 0, [{"content": content}], rewards=rewards)])
    travelled = decode(msgspec.msgpack.encode(message))
    rows: list[object] = []
    intake = Intake(_Scheduler(), None, None, lambda *row: rows.extend(row), None)  # type: ignore[arg-type]
    assert isinstance(travelled, Chunks)
    ack = intake.take(travelled, [])
    assert ack is not None
    assert ack.refused == ([3] if rows == [] else [])
    assert rows == [] or isinstance(value, bytes)


def test_what_is_sent_is_the_same_for_the_same_seed() -> None:
    first, second = (list(hostile.messages(random.Random(7), hostile.HUB, 300, frozenset())) for _ in range(2))
    assert first == second
