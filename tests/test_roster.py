"""The roster against hand-written traces; `test_roster_hostile.py` has the rest."""

from __future__ import annotations

import pytest

from asyncrl.config import Config
from asyncrl.leases import AWAY_S
from asyncrl.messages import Applied, Go, Offer, Prepare, Resync, Sent, TensorMeta, TransferFailed
from asyncrl.roster import MAX_FAILURES, Roster, transfer_limit_s
from asyncrl.rounds import Effect, Note, Published, Restart, Send, Skipped, Unusable

TIMEOUT_S = 8.0
CONFIG = Config.model_validate({"weights": {"timeout_s": TIMEOUT_S}})
BUCKETS = [[TensorMeta("w", "float32", [4])], [TensorMeta("b", "float32", [2])]]


def make_offer(version: int, port: int = 1) -> Offer:
    return Offer(version, "127.0.0.1", port, BUCKETS)


def make_applied(epoch: int, version: int) -> Applied:
    return Applied(epoch, version, 0.01, 0.1)


class Desk:
    """A roster with its effects sorted by kind, for tests that read as a story."""

    def __init__(self, *generators: str, version: int = 0, published: int = 0) -> None:
        self.roster = Roster(CONFIG, published)
        self.now = 100.0
        self.roster.publisher_joined("p1", self.now)
        for name in generators:
            self.roster.generator_joined(name, "i1", version, self.now)

    def effects(self) -> list[Effect]:
        return self.roster.take_effects()

    def sends(self, kind: type) -> dict[str, list]:
        found: dict[str, list] = {}
        for effect in self.effects():
            if isinstance(effect, Send) and isinstance(effect.message, kind):
                found.setdefault(effect.to, []).append(effect.message)
        return found

    def offer(self, version: int, port: int = 1) -> dict[str, list[Prepare]]:
        self.roster.offer(make_offer(version, port), self.now)
        return self.sends(Prepare)

    def ready(self, epoch: int, *names: str) -> dict[str, list[Go]]:
        for name in names:
            self.roster.ready(name, epoch, self.now)
        return self.sends(Go)

    def complete(self, version: int, *names: str) -> int:
        """A whole round without trouble; returns its epoch. Leaves the effects of its end."""
        epoch = next(iter(self.offer(version).values()))[0].epoch
        self.ready(epoch, *names)
        self.roster.sent(Sent(epoch, version, 0.5, 24), self.now)
        for name in names:
            self.roster.applied(name, make_applied(epoch, version), self.now)
        return epoch

    def refuse(self, version: int, refusing: tuple[str, ...], applying: tuple[str, ...] = ()) -> None:
        """A round in which some find the version at fault. Leaves the effects of its end."""
        epoch = next(iter(self.offer(version).values()))[0].epoch
        self.ready(epoch, *refusing, *applying)
        self.roster.sent(Sent(epoch, version, 0.5, 24), self.now)
        for name in applying:
            self.roster.applied(name, make_applied(epoch, version), self.now)
        for name in refusing:
            self.roster.failed(name, TransferFailed(epoch, version, "w is not finite", refused=True), self.now)

    def run_out(self, *away: str) -> None:
        """Time passes until something happens; heartbeats arrive from all but those that are `away`."""
        while (due := self.roster.next_deadline()) is not None and not self.roster._effects:
            self.now = due
            for name in self.roster._generators.keys() - set(away):
                self.roster.heard(name, self.now)
            self.roster.expire(self.now)

    def round_ends(self) -> float:
        """Seconds that the round has left."""
        assert self.roster._round is not None
        return self.roster._round.deadline - self.now


def test_a_round_prepares_then_goes_then_publishes_once_everybody_has_applied() -> None:
    desk = Desk("a", "b")
    prepares = desk.offer(1)
    assert {name: (p[0].rank, p[0].world_size) for name, p in prepares.items()} == {"a": (1, 3), "b": (2, 3)}
    epoch = prepares["a"][0].epoch
    assert desk.ready(epoch, "a") == {}
    gos = desk.ready(epoch, "b")
    assert gos == {name: [Go(epoch, 1, ["a", "b"])] for name in ("publisher", "a", "b")}
    desk.roster.sent(Sent(epoch, 1, 0.5, 24), desk.now)
    desk.roster.applied("a", make_applied(epoch, 1), desk.now)
    assert desk.effects() == []
    desk.roster.applied("b", make_applied(epoch, 1), desk.now)
    assert desk.effects() == [Published(1, 0.5, 24)]
    assert desk.roster.next_deadline() is None


def test_the_epoch_is_reused_until_members_store_or_luck_change() -> None:
    desk = Desk("a", "b")
    first = desk.complete(1, "a", "b")
    assert desk.complete(2, "a", "b") == first
    desk.roster.generator_joined("a", "i2", 2, desk.now)  # Restarted: same name, another process.
    third = desk.complete(3, "a", "b")
    assert third > first
    desk.effects()
    moved = desk.offer(4, port=2)["a"][0].epoch
    assert moved > third
    desk.ready(moved, "a", "b")
    desk.roster.failed("publisher", TransferFailed(moved, 4, "broken pipe"), desk.now)
    for name in ("a", "b"):
        desk.roster.failed(name, TransferFailed(moved, 4, "connection closed"), desk.now)
    assert desk.sends(Resync).keys() == {"publisher"}
    assert desk.offer(4, port=2)["a"][0].epoch > moved


def test_an_offer_that_nobody_needs_is_answered_and_published_without_a_transfer() -> None:
    desk = Desk("a", version=5, published=4)
    desk.roster.offer(make_offer(5), desk.now)
    assert desk.effects() == [Send("publisher", Go(0, 5)), Published(5, 0.0, 0)]
    desk = Desk(published=4)
    desk.roster.offer(make_offer(5), desk.now)
    assert desk.effects() == [Send("publisher", Go(0, 5))]


def test_a_member_that_dies_before_go_is_left_out_at_once() -> None:
    desk = Desk("a", "b", "c")
    epoch = desk.offer(1)["a"][0].epoch
    desk.ready(epoch, "a", "c")
    desk.roster.generator_left("b", desk.now)
    again = desk.sends(Prepare)
    assert again.keys() == {"a", "c"}
    assert again["c"][0].epoch == epoch + 1
    assert again["c"][0].rank == 2
    assert desk.ready(epoch, "a", "c") == {}, "an answer to the old epoch must not count"
    assert desk.ready(epoch + 1, "a", "c")["publisher"] == [Go(epoch + 1, 1, ["a", "c"])]


def test_a_member_that_is_not_ready_in_time_is_left_out_and_tried_again_afterwards() -> None:
    desk = Desk("a", "b")
    epoch = desk.offer(1)["a"][0].epoch
    desk.ready(epoch, "a")
    desk.run_out()
    assert desk.sends(Prepare).keys() == {"a"}
    desk.ready(epoch + 1, "a")
    desk.roster.sent(Sent(epoch + 1, 1, 0.5, 24), desk.now)
    desk.roster.applied("a", make_applied(epoch + 1, 1), desk.now)
    effects = desk.effects()
    assert effects[0] == Published(1, 0.5, 24)
    assert effects[1] == Send("publisher", Resync("behind version 1: b"))
    assert desk.offer(1).keys() == {"b"}


def test_a_joiner_gets_the_current_version_while_no_step_happens() -> None:
    desk = Desk("a")
    desk.complete(1, "a")
    desk.effects()
    desk.roster.generator_joined("b", "i1", 0, desk.now)
    assert desk.sends(Resync).keys() == {"publisher"}
    epoch = desk.offer(1)["b"][0].epoch
    assert desk.ready(epoch, "b")["publisher"] == [Go(epoch, 1, ["b"])]


def test_a_silent_member_is_blamed_and_not_those_that_reported() -> None:
    desk = Desk("a", "b")
    for count in range(1, MAX_FAILURES + 1):
        epoch = desk.offer(1)["b"][0].epoch
        names = ["a", "b"] if count == 1 else ["b"]
        desk.ready(epoch, *names)
        started = desk.now
        desk.roster.failed("publisher", TransferFailed(epoch, 1, "timed out"), desk.now)
        if count == 1:
            desk.roster.failed("a", TransferFailed(epoch, 1, "connection closed"), desk.now)
        desk.run_out()
        assert desk.now - started == TIMEOUT_S, "after the first failure the silent ones get ready_s"
        effects = desk.effects()
        notes = [effect.detail for effect in effects if isinstance(effect, Note)]
        assert "b (silent)" in notes[0]
        restarts = [effect.name for effect in effects if isinstance(effect, Restart)]
        assert restarts == (["b"] if count == MAX_FAILURES else [])
        if count == 1:
            desk.roster.applied("a", make_applied(epoch, 1), desk.now)
    assert desk.sends(Resync) == {}, "a generator that was given up is not served"
    desk.roster.generator_joined("b", "i2", 0, desk.now)
    assert desk.sends(Resync).keys() == {"publisher"}


def test_a_lost_publisher_cancels_the_round_and_the_next_one_starts_a_new_epoch() -> None:
    desk = Desk("a")
    epoch = desk.offer(7)["a"][0].epoch
    desk.ready(epoch, "a")
    desk.roster.publisher_left(desk.now)
    assert [effect.what for effect in desk.effects() if isinstance(effect, Note)] == ["transfer_cancelled"]
    desk.roster.failed("a", TransferFailed(epoch, 7, "connection closed"), desk.now)
    assert desk.effects() == []
    desk.roster.publisher_joined("p2", desk.now)
    assert desk.offer(5)["a"][0].epoch > epoch


def test_an_offer_in_place_of_sending_starts_over_at_once() -> None:
    desk = Desk("a", "b")
    epoch = desk.offer(1)["a"][0].epoch
    desk.ready(epoch, "a", "b")
    desk.roster.applied("a", make_applied(epoch, 1), desk.now)
    again = desk.offer(2)
    assert {name: prepare[0].epoch for name, prepare in again.items()} == {"a": epoch + 1, "b": epoch + 1}


def test_an_offer_during_the_last_members_update_waits_for_it() -> None:
    desk = Desk("a", "b")
    epoch = desk.offer(1)["a"][0].epoch
    desk.ready(epoch, "a", "b")
    desk.roster.sent(Sent(epoch, 1, 0.5, 24), desk.now)
    desk.roster.applied("a", make_applied(epoch, 1), desk.now)
    assert desk.offer(2) == {}
    desk.roster.applied("b", make_applied(epoch, 1), desk.now)
    assert {name: prepare[0].epoch for name, prepare in desk.sends(Prepare).items()} == {"a": epoch, "b": epoch}


def test_who_is_well_never_shares_a_round_with_who_has_just_failed() -> None:
    desk = Desk("a", "b")
    epoch = desk.offer(1)["a"][0].epoch
    desk.ready(epoch, "a", "b")
    desk.roster.sent(Sent(epoch, 1, 0.5, 24), desk.now)
    desk.roster.applied("a", make_applied(epoch, 1), desk.now)
    desk.roster.failed("b", TransferFailed(epoch, 1, "wrong checksum"), desk.now)
    desk.effects()
    epoch = desk.offer(2)["a"][0].epoch
    desk.ready(epoch, "a")
    desk.roster.sent(Sent(epoch, 2, 0.5, 24), desk.now)
    desk.roster.applied("a", make_applied(epoch, 2), desk.now)
    assert desk.sends(Resync).keys() == {"publisher"}
    assert desk.offer(2).keys() == {"b"}


def test_reports_of_an_older_epoch_do_not_end_the_round_but_count_as_versions() -> None:
    desk = Desk("a")
    old = desk.complete(1, "a")
    desk.roster.generator_joined("a", "i2", 0, desk.now)
    epoch = desk.offer(2)["a"][0].epoch
    desk.ready(epoch, "a")
    desk.roster.sent(Sent(old, 1, 0.5, 24), desk.now)
    assert desk.round_ends() == transfer_limit_s(TIMEOUT_S, 2), "the round goes on"
    desk.roster.sent(Sent(epoch, 2, 0.5, 24), desk.now)
    desk.effects()
    desk.roster.applied("a", make_applied(old, 1), desk.now)
    assert desk.roster.version_of("a") == 1
    assert desk.effects() == [], "the round goes on"


def test_failures_count_in_a_row_only() -> None:
    desk = Desk("a")
    for version in range(1, 2 * MAX_FAILURES, 2):
        epoch = desk.offer(version)["a"][0].epoch
        desk.ready(epoch, "a")
        desk.roster.sent(Sent(epoch, version, 0.5, 24), desk.now)
        desk.roster.failed("a", TransferFailed(epoch, version, "wrong checksum"), desk.now)
        desk.complete(version + 1, "a")
    assert not [effect for effect in desk.effects() if isinstance(effect, Restart)]


def test_a_version_that_all_refuse_is_skipped_and_nobody_is_blamed() -> None:
    desk = Desk("a", "b")
    for bad in range(1, 2 * MAX_FAILURES, 2):
        desk.refuse(bad, ("a", "b"))
        note = Note("version_refused", "refused by a, b: w is not finite")
        assert desk.effects() == [note, Skipped(bad, ("a", "b"))], "it is asked for again, or somebody is blamed"
        assert desk.roster.next_deadline() is None
        desk.roster.offer(make_offer(bad), desk.now)
        assert desk.effects() == [Send("publisher", Go(desk.roster._epoch, bad))], "it was sent once more"
        desk.complete(bad + 1, "a", "b")
        assert desk.effects() == [Published(bad + 1, 0.5, 24)]


def test_one_unusable_version_after_the_other_ends_the_run() -> None:
    desk = Desk("a", "b")
    for bad in range(1, MAX_FAILURES + 1):
        assert not any(isinstance(effect, Unusable) for effect in desk.effects())
        desk.refuse(bad, ("a", "b"))
    (end,) = [effect for effect in desk.effects() if isinstance(effect, Unusable)]
    assert (
        end.reason == "3 versions of the weights in a row were refused by every generator; the last is version 3"
    )


def test_who_keeps_refusing_what_others_use_is_restarted() -> None:
    desk = Desk("a", "b")
    desk.refuse(1, ("b",), ("a",))
    for version in range(2, MAX_FAILURES + 1):
        effects = desk.effects()
        assert not [effect for effect in effects if isinstance(effect, Restart)]
        assert not [
            effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Resync)
        ]
        desk.complete(version, "a")  # From now on b is served in a round of its own, after a.
        desk.refuse(version, ("b",))
    (restart,) = [effect for effect in desk.effects() if isinstance(effect, Restart)]
    assert restart.name == "b"
    assert restart.reason.endswith("refused what others use: w is not finite")


def test_a_version_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    desk = Desk("a", "b", "c")
    epoch = desk.offer(1)["a"][0].epoch
    desk.ready(epoch, "b")
    for name in ("a", "c"):
        desk.roster.failed(name, TransferFailed(epoch, 1, "w is [5]", refused=True), desk.now)
    effects = desk.effects()
    assert effects[0] == Note("version_refused", "refused by a, c: w is [5]")
    assert [(effect.to, type(effect.message)) for effect in effects[1:]] == [("b", Prepare)]
    desk.roster.failed("b", TransferFailed(epoch + 1, 1, "w is [5]", refused=True), desk.now)
    assert desk.effects() == [
        Note("version_refused", "refused by b: w is [5]"),
        Send("publisher", Go(epoch + 1, 1)),
        Skipped(1, ("a", "b", "c")),
    ]


def test_a_joiner_that_refuses_too_does_without_as_well() -> None:
    desk = Desk("a")
    desk.refuse(1, ("a",))
    desk.effects()
    desk.roster.generator_joined("b", "i1", 0, desk.now)
    assert desk.sends(Resync).keys() == {"publisher"}
    desk.refuse(1, ("b",))
    assert desk.effects() == [Note("version_refused", "refused by b: w is not finite"), Skipped(1, ("b",))]


def test_a_new_publisher_may_bring_a_refused_version_once_more() -> None:
    desk = Desk("a")
    desk.refuse(1, ("a",))
    desk.effects()
    desk.roster.publisher_joined("p2", desk.now)
    assert desk.offer(1).keys() == {"a"}


def test_where_the_weights_lie_is_passed_on() -> None:
    desk = Desk("a")
    desk.roster.offer(Offer(1, "", 0, BUCKETS, ["/proc/1/fd/3", "/proc/1/fd/4", "/proc/1/fd/5"]), desk.now)
    assert desk.sends(Prepare)["a"][0].addresses == ["/proc/1/fd/3", "/proc/1/fd/4", "/proc/1/fd/5"]


def test_a_publisher_that_does_not_offer_is_asked_again() -> None:
    desk = Desk("a")
    desk.complete(1, "a")
    desk.roster.generator_joined("b", "i1", 0, desk.now)
    assert len(desk.sends(Resync)["publisher"]) == 1
    assert desk.roster.next_deadline() == desk.now + TIMEOUT_S
    desk.run_out()
    assert len(desk.sends(Resync)["publisher"]) == 1


def test_an_offer_that_is_repeated_while_members_get_ready_changes_nothing() -> None:
    desk = Desk("a", "b")
    epoch = desk.offer(1)["a"][0].epoch
    desk.ready(epoch, "a")
    assert desk.offer(1) == {}
    assert desk.ready(epoch, "b").keys() == {"publisher", "a", "b"}


def test_a_restarted_hub_never_reuses_an_epoch() -> None:
    before = Desk("a")
    epoch = before.complete(1, "a")
    after = Desk("a")
    after.now += 0.5
    assert after.offer(1)["a"][0].epoch > epoch


def test_a_transfer_has_time_for_every_bucket_and_no_more() -> None:
    desk = Desk("a")
    epoch = desk.offer(1)["a"][0].epoch
    desk.ready(epoch, "a")
    assert desk.round_ends() == transfer_limit_s(TIMEOUT_S, 2) == 5 * TIMEOUT_S
    desk.roster.sent(Sent(epoch, 1, 0.5, 24), desk.now)
    assert desk.round_ends() == TIMEOUT_S


@pytest.mark.parametrize("version", [3, 9])
def test_a_version_is_published_once_and_never_an_older_one(version: int) -> None:
    desk = Desk("a", version=2, published=9)
    desk.complete(version, "a")
    assert not [effect for effect in desk.effects() if isinstance(effect, Published)]


def test_a_member_that_is_away_holds_up_nobody_and_is_not_blamed() -> None:
    desk = Desk("a", "b")
    epoch = desk.offer(1)["a"][0].epoch
    desk.ready(epoch, "a")
    started = desk.now
    desk.run_out("b")
    assert desk.now - started <= AWAY_S + 1.0
    assert desk.sends(Prepare).keys() == {"a"}
    desk.ready(epoch + 1, "a")
    desk.roster.sent(Sent(epoch + 1, 1, 0.5, 24), desk.now)
    desk.roster.applied("a", make_applied(epoch + 1, 1), desk.now)
    assert desk.effects() == [Published(1, 0.5, 24)], "b is asked for again while it is away"
    assert desk.roster._generators["b"].failures == 0
    desk.roster.heard("b", desk.now)
    assert desk.sends(Resync).keys() == {"publisher"}
    assert desk.offer(1).keys() == {"b"}


def test_a_broadcast_to_who_goes_away_is_given_up_for_all_and_nobody_is_blamed() -> None:
    desk = Desk("a", "b")
    for _ in range(MAX_FAILURES):
        epoch = desk.offer(1)["a"][0].epoch
        desk.ready(epoch, "a", "b")
        desk.run_out("b")
        effects = desk.effects()
        assert effects[0] == Note(
            "transfer_failed", f"version 1, epoch {epoch}: a (silent); b (away); publisher (silent)"
        )
        assert effects[1:] == [Send("publisher", Resync("behind version 1: a"))]
        assert desk.offer(1).keys() == {"a"}
        desk.roster.generator_joined("b", "i1", 0, desk.now)
        desk.roster.publisher_left(desk.now)
        desk.roster.publisher_joined("p1", desk.now)
        desk.effects()
    assert {generator.failures for generator in desk.roster._generators.values()} == {0}


def test_who_reconnects_within_a_round_is_told_again_and_what_it_has_applied_counts() -> None:
    desk = Desk("a", "b")
    first = desk.offer(1)
    epoch = first["a"][0].epoch
    desk.roster.generator_joined("b", "i1", 0, desk.now)
    assert desk.effects() == [Send("b", first["b"][0])]
    desk.ready(epoch, "a", "b")
    desk.roster.generator_joined("b", "i1", 0, desk.now)
    assert desk.effects() == [Send("b", Go(epoch, 1, ["a", "b"]))]
    desk.roster.sent(Sent(epoch, 1, 0.5, 24), desk.now)
    desk.roster.applied("a", make_applied(epoch, 1), desk.now)
    desk.roster.generator_joined("b", "i1", 1, desk.now)
    assert desk.effects() == [Published(1, 0.5, 24)]
