"""The roster in a hostile world: processes die, fail, answer late or not at all (hypothesis, simulated time)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.config import Config
from asyncrl.leases import AWAY_S
from asyncrl.messages import Applied, Go, Offer, Prepare, Resync, Sent, TensorMeta, TransferFailed
from asyncrl.roster import Roster
from asyncrl.rounds import Published, Restart, Send, Skipped

TIMEOUT_S = 8.0
CONFIG = Config.model_validate({"weights": {"timeout_s": TIMEOUT_S}})
BUCKETS = [[TensorMeta("w", "float32", [4])], [TensorMeta("b", "float32", [2])]]


def make_offer(version: int, port: int = 1) -> Offer:
    return Offer(version, "127.0.0.1", port, BUCKETS)


def make_applied(epoch: int, version: int) -> Applied:
    return Applied(epoch, version, 0.01, 0.1)


@dataclass
class Process:
    """A generator as the simulation knows it."""

    incarnation: int
    version: int = 0
    prepared: Prepare | None = None
    going: list[Go] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)


class HostileWorld(RuleBasedStateMachine):
    """Processes die, fail, answer late or not at all, in any order; messages to the dead are lost."""

    names = st.sampled_from(["a", "b", "c"])
    deeds = st.sampled_from(["works", "fails", "refuses"])

    @initialize()
    def start(self) -> None:
        self.now = 50.0
        self.roster = Roster(CONFIG, 0)
        self.live: dict[str, Process] = {}
        self.publisher: int | None = None
        self.incarnations = 0
        self.newest = 0
        self.asked: list[int] = []
        self.gos: list[Go] = []
        self.resyncs = 0
        self.last_epoch = 0
        self.last_published = 0
        self.round: tuple[int, int] | None = None
        self.restarted: list[str] = []

    # -- effects, with what must hold for each

    def take(self) -> None:
        for effect in self.roster.take_effects():
            if isinstance(effect, Published):
                assert effect.version > self.last_published
                assert any(process.version >= effect.version for process in self.live.values())
                self.last_published = effect.version
            elif isinstance(effect, Skipped):
                for name, process in self.live.items():
                    assert process.version < effect.version
                    assert effect.version in process.refused or name not in effect.generators
            elif isinstance(effect, Restart):
                assert effect.name in self.live
                self.restarted.append(effect.name)
            elif isinstance(effect, Send):
                self.deliver(effect)
        for name in self.restarted:
            self.kill(name)
            self.join(name)
        self.restarted.clear()

    def deliver(self, effect: Send) -> None:
        message = effect.message
        if effect.to == "publisher":
            assert self.publisher is not None, "sent to a dead publisher"
            if isinstance(message, Go):
                assert set(message.members) <= self.live.keys(), "a Go names a dead member"
                self.asked = [version for version in self.asked if version != message.version]
                self.gos.append(message)
            else:
                assert isinstance(message, Resync)
                self.resyncs += 1
            return
        assert effect.to in self.live, "sent to a dead generator"
        process = self.live[effect.to]
        if isinstance(message, Prepare):
            assert message.epoch >= self.last_epoch, "an epoch went back"
            assert process.version < message.version
            self.last_epoch = message.epoch
            process.prepared = message
        else:
            assert isinstance(message, Go)
            assert message.epoch == self.last_epoch, "a Go of a round that is over"
            assert process.prepared is not None
            assert message.members[process.prepared.rank - 1] == effect.to
            process.going.append(message)

    # -- what may happen

    @rule(name=names)
    def join(self, name: str) -> None:
        if name not in self.live:
            self.incarnations += 1
            self.live[name] = Process(self.incarnations)
        process = self.live[name]
        self.roster.generator_joined(name, str(process.incarnation), process.version, self.now)
        self.take()

    @rule(name=names)
    def kill(self, name: str) -> None:
        if self.live.pop(name, None) is not None:
            self.roster.generator_left(name, self.now)
            self.take()

    @rule(name=names)
    def restart_unnoticed(self, name: str) -> None:
        if name in self.live:
            self.incarnations += 1
            # Its Hello is the first that the roster hears of the death.
            self.live[name] = Process(self.incarnations)
            self.roster.generator_joined(name, str(self.incarnations), 0, self.now)
            self.take()

    @rule()
    def publisher_starts(self) -> None:
        self.incarnations += 1
        self.publisher = self.incarnations
        self.asked, self.gos, self.resyncs = [], [], 0
        self.roster.publisher_joined(str(self.publisher), self.now)
        self.take()

    @rule()
    def publisher_dies(self) -> None:
        if self.publisher is not None:
            self.publisher = None
            self.asked, self.gos, self.resyncs = [], [], 0
            self.roster.publisher_left(self.now)
            self.take()

    @precondition(lambda self: self.publisher is not None)
    @rule(step=st.integers(0, 2))
    def publisher_offers(self, step: int) -> None:
        """The real publisher waits for the answer to its last offer; this one sometimes does not."""
        self.newest += step
        self.asked = [self.newest]
        self.resyncs = 0
        self.roster.offer(make_offer(self.newest, port=self.publisher or 0), self.now)
        self.take()

    @precondition(lambda self: self.gos)
    @rule(works=st.booleans())
    def publisher_acts_on_go(self, works: bool) -> None:
        go = self.gos.pop(0)
        if not go.members:
            return
        if works:
            self.roster.sent(Sent(go.epoch, go.version, 0.1, 24), self.now)
        else:
            self.roster.failed("publisher", TransferFailed(go.epoch, go.version, "no"), self.now)
        self.take()

    @rule(name=names, deed=deeds)
    def generator_acts_on_prepare(self, name: str, deed: str) -> None:
        process = self.live.get(name)
        if process is None or process.prepared is None:
            return
        epoch, version = process.prepared.epoch, process.prepared.version
        if deed == "works":
            self.roster.ready(name, epoch, self.now)
        else:
            self.fail(name, process, epoch, version, deed)
        self.take()

    def fail(self, name: str, process: Process, epoch: int, version: int, deed: str) -> None:
        if deed == "refuses":
            process.refused.add(version)
        self.roster.failed(name, TransferFailed(epoch, version, "bad", deed == "refuses"), self.now)

    @rule(name=names, deed=deeds)
    def generator_acts_on_go(self, name: str, deed: str) -> None:
        process = self.live.get(name)
        if process is None or not process.going:
            return
        go = process.going.pop(0)
        if deed == "works":
            process.version = max(process.version, go.version)
            self.roster.applied(name, make_applied(go.epoch, go.version), self.now)
        else:
            self.fail(name, process, go.epoch, go.version, deed)
        self.take()

    @rule(seconds=st.floats(0.0, 3 * TIMEOUT_S), heard=st.sets(names))
    def time_passes(self, seconds: float, heard: set[str]) -> None:
        """Some generators' heartbeats arrive meanwhile; the links of the others are away."""
        while seconds > 0:
            self.now, seconds = self.now + min(seconds, AWAY_S / 2), seconds - AWAY_S / 2
            for name in heard:
                self.roster.heard(name, self.now)
                self.take()
            self.roster.expire(self.now)
            self.take()

    @rule(name=names)
    def reconnect(self, name: str) -> None:
        """Whatever was under way to and from it is lost."""
        if name in self.live:
            process = self.live[name]
            process.prepared, process.going = None, []
            self.roster.generator_joined(name, str(process.incarnation), process.version, self.now)
        self.take()

    # -- what must hold

    @invariant()
    def every_wait_has_a_deadline(self) -> None:
        if not hasattr(self, "roster"):
            return
        due = self.roster.next_deadline()
        waiting = self.roster._round is not None or self.roster._resync_deadline is not None
        assert (due is not None) == waiting

    def teardown(self) -> None:
        """From any state: one publisher, one generator, no more failures, and time."""
        if not hasattr(self, "roster"):
            return
        for name in list(self.live):
            if name != "a":
                self.kill(name)
        self.join("a")
        if self.publisher is None:
            self.publisher_starts()
        self.newest += 1
        self.publisher_offers(0)
        for _ in range(40):
            while self.act_honestly():
                pass
            if self.live["a"].version == self.newest and self.roster.next_deadline() is None:
                break
            due = self.roster.next_deadline()
            assert due is not None, "the generator is behind and nothing is waited for"
            self.now = max(self.now, due)
            self.roster.heard("a", self.now)
            self.roster.expire(self.now)
            self.take()
        assert self.live["a"].version == self.newest
        assert self.last_published == self.newest
        assert self.asked == [], "the last offer was never answered"

    def act_honestly(self) -> bool:
        process = self.live["a"]
        if process.going:
            self.generator_acts_on_go("a", "works")
        elif process.prepared is not None:
            self.generator_acts_on_prepare("a", "works")
            process.prepared = process.prepared if self.live["a"].going else None
        elif self.gos:
            self.publisher_acts_on_go(True)
        elif self.resyncs:
            self.publisher_offers(0)
        else:
            return False
        return True


HostileWorld.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_whatever_dies_or_fails_the_survivor_gets_the_newest_version = HostileWorld.TestCase
