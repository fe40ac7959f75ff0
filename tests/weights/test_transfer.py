"""Weights from a publisher to member processes, with the roster in between, and what faults do to it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from asyncrl.messages import Applied, Hello, Prepare, ProcessEvent, Sent, TransferFailed
from asyncrl.rounds import Note, Published, Restart, Send, Skipped
from asyncrl.weights import publisher as publisher_module
from asyncrl.weights.buckets import Snapshot

every_backend = pytest.mark.parametrize("backend", ["gloo", "shm"])


@every_backend
def test_every_member_gets_every_bit_over_one_group_and_the_same_buffers(
    make_site, make_weights, digest_of, backend
) -> None:
    site = make_site(backend)
    site.start("a", "b")
    epochs, pointers = set(), []
    for version in (1, 2, 3, 4):
        site.publisher.offer(version, iter(make_weights(version)))
        epochs.add(site.wait_message("publisher", Sent).epoch)
        assert site.wait_effect(Published).version == version
        for name in ("a", "b"):
            last = site.wait_told(name, 2 * version)[2 * version - 1]
            assert (last["sent"], last["version"]) == ("Applied", version)
            assert last["digest"] == digest_of(make_weights(version))
        pointers.append([buffer.data_ptr() for buffer in site.publisher._sender._serving.buffers])
    assert len(epochs) == 1
    assert pointers[0] == pointers[2]
    assert pointers[1] == pointers[3]
    assert len(pointers[0]) > 3, "the weights must span several buckets"


def test_a_member_killed_in_a_broadcast_is_named_and_the_next_group_does_without_it(
    make_site, make_weights, digest_of
) -> None:
    site = make_site()
    site.start("a", "b", a=("kill", 2, 3))
    site.publisher.offer(1, make_weights(1))
    site.wait_effect(Published)
    started = time.monotonic()
    site.publisher.offer(2, make_weights(2))
    failure = site.wait_message("publisher", TransferFailed)
    assert "no sign of life from a (rank 1)" in failure.reason
    site.tell_hub(ProcessEvent("a", "died"))
    assert "a (died)" in site.wait_effect(Note).detail
    assert site.wait_effect(Published).version == 2
    assert time.monotonic() - started < site.config.weights.timeout_s, "nobody waited for a time limit"
    told = site.wait_told("b", 6)
    assert [line["sent"] for line in told] == ["Ready", "Applied", "Ready", "TransferFailed", "Ready", "Applied"]
    assert (told[3]["version"], told[3]["digest"]) == (1, digest_of(make_weights(1))), "the engine was touched"
    assert told[5]["digest"] == digest_of(make_weights(2))


def test_a_stopped_member_costs_one_time_limit_and_is_left_out(make_site, make_weights, digest_of) -> None:
    site = make_site(timeout_s=2.0)
    site.start("a", "b", b=("stop", 2, 2))
    site.publisher.offer(1, make_weights(1))
    site.wait_effect(Published)
    site.publisher.offer(2, make_weights(2))
    failure = site.wait_message("publisher", TransferFailed)
    assert "no sign of life from b (rank 2)" in failure.reason
    assert "b (silent)" in site.wait_effect(Note).detail
    assert site.wait_effect(Published).version == 2
    assert site.wait_told("a", 6)[5]["digest"] == digest_of(make_weights(2))
    # Awake again it catches up by itself.
    os.kill(site.nursery.pids["b"], signal.SIGCONT)
    while site.told["b"][-1]["version"] != 2:
        site.wait(lambda entry: entry == ("stdout", "b"))
    assert site.told["b"][-1]["digest"] == digest_of(make_weights(2))


@every_backend
def test_a_joiner_gets_the_current_version_while_no_step_happens(
    make_site, make_weights, digest_of, backend
) -> None:
    site = make_site(backend)
    site.publisher.offer(7, make_weights(7))
    site.wait_message("publisher", Hello)
    site.start("a")
    assert site.wait_effect(Published).version == 7
    site.start("b")
    assert site.wait_told("b", 2)[1]["digest"] == digest_of(make_weights(7))
    assert len(site.told["a"]) == 2, "a has it already and takes no part"


@every_backend
def test_a_damaged_version_is_refused_by_name_and_the_next_one_is_applied(
    make_site, make_weights, digest_of, monkeypatch, backend
) -> None:
    site = make_site(backend)
    site.start("a", "b")
    site.publisher.offer(1, make_weights(1))
    site.wait_effect(Published)
    seal = Snapshot.seal

    def flip_a_bit_after_the_sum(snapshot: Snapshot) -> None:
        seal(snapshot)
        if snapshot.version == 2:
            snapshot.buffers[1][5] ^= 1

    monkeypatch.setattr(Snapshot, "seal", flip_a_bit_after_the_sum)
    site.publisher.offer(2, make_weights(2))
    assert "refused by a, b: version 2: wrong checksum of bucket 1 of 4" in site.wait_effect(Note).detail
    assert site.wait_effect(Skipped) == Skipped(2, ("a", "b"))
    failed = site.wait_told("a", 4)[3]
    assert (failed["version"], failed["digest"]) == (1, digest_of(make_weights(1))), "the engine was touched"
    site.publisher.offer(3, make_weights(3))
    assert site.wait_effect(Published).version == 3
    for name in ("a", "b"):
        assert site.wait_told(name, 6)[5]["digest"] == digest_of(make_weights(3))


@every_backend
def test_weights_that_are_not_finite_are_refused_by_all_and_nobody_is_blamed(
    make_site, make_weights, digest_of, backend
) -> None:
    site = make_site(backend)
    site.start("a", "b")
    seen = []
    for version in range(1, 9):
        weights = make_weights(version)
        if version % 2 == 0:  # Four times, once more than a generator may fail in a row.
            weights[2][1][7, 3:6] = float("nan")
        site.publisher.offer(version, weights)
        if version % 2 == 0:
            entry = site.wait(lambda entry: seen.append(entry) or isinstance(entry, Note))
            assert entry.detail == (
                f"refused by a, b: version {version}: 3 of 6144 values of tensor layers.0.w are not finite; "
                "nothing was applied"
            )
        site.wait(lambda entry: seen.append(entry) or isinstance(entry, Published | Skipped))
    assert site.wait_told("a", 16)[15]["digest"] == digest_of(make_weights(7))
    assert not [entry for entry in seen if isinstance(entry, Restart)]


def test_a_restarted_hub_learns_of_publisher_and_members_and_serves_a_joiner(
    make_site, make_weights, digest_of
) -> None:
    site = make_site()
    site.start("a")
    site.publisher.offer(1, make_weights(1))
    before = site.wait_message("a", Applied).epoch
    site.restart_hub()
    site.wait_message("publisher", Hello)
    site.start("b")
    prepare = site.wait(lambda entry: isinstance(entry, Send) and isinstance(entry.message, Prepare)).message
    assert prepare.epoch > before
    assert site.wait_told("b", 2)[1]["digest"] == digest_of(make_weights(1))


@every_backend
def test_a_newer_version_replaces_the_one_that_still_waits(make_site, make_weights, digest_of, backend) -> None:
    site = make_site(backend)
    site.start("a")
    for version in range(1, 30):
        site.publisher.offer(version, make_weights(version))
    sent = []
    while not sent or sent[-1] < 29:
        sent.append(site.wait_message("publisher", Sent).version)
    assert sent == sorted(set(sent))
    assert len(sent) < 29
    while site.told["a"][-1]["version"] != 29:
        site.wait(lambda entry: entry == ("stdout", "a"))
    for told in site.told["a"]:
        if told["sent"] == "Applied":
            assert told["digest"] == digest_of(make_weights(told["version"])), "a mixture of two versions"


def test_close_waits_until_the_last_offer_has_been_sent(make_site, make_weights, digest_of) -> None:
    site = make_site()
    site.start("a")
    site.publisher.offer(1, make_weights(1))
    site.publisher.close()
    assert site.wait_told("a", 2)[1]["digest"] == digest_of(make_weights(1))
    site.publisher.close()


def test_a_failed_publisher_thread_surfaces_in_the_learner(make_site, make_weights) -> None:
    site = make_site()
    site.hub.refuse_publisher = True
    publisher = site.publisher  # It greets the hub, which refuses it.
    publisher._thread.join(10)
    with pytest.raises(RuntimeError, match="the weight publisher failed") as caught:
        publisher.offer(1, make_weights(1))
    assert "no publishers here" in str(caught.value.__cause__)


def test_a_publisher_that_died_at_its_start_lets_go_of_the_learner(make_site, make_weights, monkeypatch) -> None:
    def no_client(*_arguments: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(publisher_module, "Client", no_client)
    site = make_site("shm")
    publisher = site.publisher
    publisher._thread.join(10)
    for call in (lambda: publisher.offer(1, make_weights(1)), publisher.close, publisher.close):
        error = within(10, call)
        assert isinstance(error, RuntimeError)
        assert str(error.__cause__) == "too many open files"


@every_backend
def test_a_publisher_that_dies_in_mid_life_lets_go_of_the_learner(
    make_site, make_weights, monkeypatch, backend
) -> None:
    site = make_site(backend)
    site.start("a")
    publisher = site.publisher
    publisher.offer(1, make_weights(1))
    site.wait_effect(Published)

    def no_offer(_sender: object) -> None:
        raise MemoryError("no room for sums")

    monkeypatch.setattr(publisher_module._Sender, "_offer", no_offer)
    assert within(10, lambda: publisher.offer(2, make_weights(2))) is None, "it is handed over, and fails then"
    publisher._thread.join(10)
    # The learner may ask for the first time while the thread is just ending: no send may wait for it.
    monkeypatch.setattr(publisher, "check", lambda: None)
    for version in (3, 4):
        assert within(10, lambda version=version: publisher.offer(version, make_weights(version))) is None
    monkeypatch.undo()
    for call in (lambda: publisher.offer(5, make_weights(5)), publisher.close):
        error = within(10, call)
        assert isinstance(error, RuntimeError)
        assert str(error.__cause__) == "no room for sums"


def test_a_broadcast_that_never_ends_is_given_up_and_the_next_version_is_sent(
    make_site, make_weights, digest_of, monkeypatch
) -> None:
    """As NCCL's first one can when a member dies in it."""
    stuck, go_on = [], threading.Event()

    def send(group, snapshot) -> None:
        if snapshot.version == 1:
            stuck.append(threading.current_thread())
            go_on.wait(60)
        send_really(group, snapshot)

    send_really = publisher_module.send
    monkeypatch.setattr(publisher_module, "send", send)
    monkeypatch.setattr(publisher_module, "transfer_limit_s", lambda timeout_s, buckets: 0.5)
    site = make_site(timeout_s=3.0)
    site.start("a")
    site.publisher.offer(1, make_weights(1))
    failure = site.wait_message("publisher", TransferFailed)
    assert "gloo broadcast of version 1 to a did not end within 0.5 s and was given up" in failure.reason
    site.publisher.offer(2, make_weights(2))
    while site.told["a"][-1:] == [] or site.told["a"][-1]["version"] != 2:
        site.wait(lambda entry: entry == ("stdout", "a"))
    assert site.told["a"][-1]["digest"] == digest_of(make_weights(2))
    assert all(thread.is_alive() for thread in stuck), "it was not stuck"
    go_on.set()


def test_a_broadcast_that_hangs_on_a_member_that_is_away_is_given_up_long_before_its_time_limit(
    make_site, make_weights, digest_of, monkeypatch
) -> None:
    stuck, go_on = [], threading.Event()

    def send(group, snapshot) -> None:
        if not stuck:
            stuck.append(threading.current_thread())
            go_on.wait(60)
        send_really(group, snapshot)

    send_really = publisher_module.send
    monkeypatch.setattr(publisher_module, "send", send)
    site = make_site(timeout_s=60.0)
    site.start("a", "b")
    site.hub.away = {"b"}
    site.publisher.offer(1, make_weights(1))
    assert "a (silent); b (away); publisher (silent)" in site.wait_effect(Note).detail
    assert site.wait_told("a", 3)[2]["digest"] == digest_of(make_weights(1)), "Ready twice, then Applied"
    assert stuck[0].is_alive()
    site.hub.away = set()
    while site.told["b"][-1]["sent"] != "Applied":
        site.wait(lambda entry: entry == ("stdout", "b"))
    assert site.told["b"][-1]["digest"] == digest_of(make_weights(1))
    go_on.set()


def within(limit_s: float, call: Callable[[], object]) -> BaseException | None:
    """What a call raises; fails when it has not returned in time."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert raised, f"it still waits after {limit_s:g} s"
    return raised[0]


def test_weights_that_change_their_shape_are_refused_with_their_name(make_site, make_weights) -> None:
    site = make_site()
    site.publisher.offer(1, make_weights(1))
    changed = make_weights(2)
    changed[3] = ("layers.0.b", changed[3][1][:4])
    site.publisher.offer(2, make_weights(2))
    with pytest.raises(ValueError, match=r"layers\.0\.b.*shape=\[4\]"):
        site.publisher.offer(3, changed)
