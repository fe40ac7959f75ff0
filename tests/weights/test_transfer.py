"""Weights from a publisher to member processes, with the roster in between, and what faults do to it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from asyncrl.messages import Applied, Hello, Prepare, ProcessEvent, Sent, TransferFailed
from asyncrl.roster import Note, Published, Send
from asyncrl.weights import transfer


def test_every_member_gets_every_bit_over_one_group_and_the_same_buffers(
    make_site, make_weights, digest_of
) -> None:
    site = make_site()
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


def test_a_joiner_gets_the_current_version_while_no_step_happens(make_site, make_weights, digest_of) -> None:
    site = make_site()
    site.publisher.offer(7, make_weights(7))
    site.wait_message("publisher", Hello)
    site.start("a")
    assert site.wait_effect(Published).version == 7
    site.start("b")
    assert site.wait_told("b", 2)[1]["digest"] == digest_of(make_weights(7))
    assert len(site.told["a"]) == 2, "a has it already and takes no part"


def test_damaged_weights_are_refused_and_sent_again(make_site, make_weights, digest_of, monkeypatch) -> None:
    site = make_site()
    site.start("a")
    site.publisher.offer(1, make_weights(1))
    site.wait_effect(Published)
    right, damaged = transfer.checksum, []

    def flip_a_bit_after_the_sum(buffer):
        total = right(buffer)
        if len(damaged) < 2:
            damaged.append(len(buffer))
            if len(damaged) == 2:
                buffer[5] ^= 1
        return total

    monkeypatch.setattr(transfer, "checksum", flip_a_bit_after_the_sum)
    site.publisher.offer(2, make_weights(2))
    failure = site.wait_message("a", TransferFailed)
    assert "wrong checksum of bucket 1 of" in failure.reason
    failed = site.wait_told("a", 4)[3]
    assert (failed["version"], failed["digest"]) == (1, digest_of(make_weights(1)))
    # The snapshot itself is damaged now; the next version replaces it.
    site.publisher.offer(3, make_weights(3))
    while site.told["a"][-1]["version"] != 3:
        site.wait(lambda entry: entry == ("stdout", "a"))
    assert site.told["a"][-1]["digest"] == digest_of(make_weights(3))


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


def test_a_newer_version_replaces_the_one_that_still_waits(make_site, make_weights) -> None:
    site = make_site()
    site.start("a")
    for version in range(1, 30):
        site.publisher.offer(version, make_weights(version))
    sent = []
    while not sent or sent[-1] < 29:
        sent.append(site.wait_message("publisher", Sent).version)
    assert sent == sorted(set(sent))
    assert len(sent) < 29
    site.wait_effect(Published)


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


def test_weights_that_change_their_shape_are_refused_with_their_name(make_site, make_weights) -> None:
    site = make_site()
    site.publisher.offer(1, make_weights(1))
    changed = make_weights(2)
    changed[3] = ("layers.0.b", changed[3][1][:4])
    site.publisher.offer(2, make_weights(2))
    with pytest.raises(ValueError, match=r"layers\.0\.b.*shape=\[4\]"):
        site.publisher.offer(3, changed)
