"""Who gets which weights, and when: the hub's state machine of weight transfers.

It is pure: no socket, no clock, no torch. The hub feeds it events with the time of their arrival and sends
what `take_effects` returns; weights themselves never pass through the hub (`asyncrl.weights` moves them).

One *round* brings one version to the generators that are behind it:

         offer: someone is behind                every member is Ready
    IDLE ────────────────────────▶ PREPARE ─────────────────────────────▶ SENDING ──▶ IDLE
     │  ▲                           │   │  Send(member, Prepare)              Send(publisher, Go)
     │  │   no member is left:      │   │                                     Send(member, Go)
     │  └───── Go([]) ──────────────┘   │ a member dies, fails or misses the deadline:
     │                                  └──▶ PREPARE again, new epoch, without it
     └─▶ offer: nobody is behind: Go([])

SENDING ends when the publisher has said `Sent` or `TransferFailed` and every member has said `Applied`,
`TransferFailed`, or died; or at its deadline. The last offer is always answered by a Go, and the publisher
offers only after an answer, so what a Go names is always what the publisher holds. When a round leaves
somebody behind, or a generator joins, the publisher is asked to offer again (`Resync`).

An *epoch* numbers a process group. It is reused while members, incarnations and store stay the same and
nothing fails. Otherwise it grows by one; it starts from the clock in milliseconds, so that
a restarted hub never reuses one.

    | waits for               | who       | limit                                                       |
    |-------------------------|-----------|-------------------------------------------------------------|
    | Ready                   | a round   | `ready_s`                                                   |
    | Sent, Applied           | a round   | `transfer_limit_s`; `timeout_s` after Sent; `ready_s` after |
    |                         |           | the first failure, for then the collective has ended for all |
    | Offer after a Resync    | the roster| `timeout_s`, then it asks again                             |

A generator that is *away* (not heard for `leases.AWAY_S`, or three heartbeats) takes part in nothing until it is
heard again, and is never blamed: not it failed, but its link. A round that waits for it goes on without it, or,
when it is SENDING, ends, for the collective hangs with it; the Resync that follows makes the publisher give that
up. Who comes back within a round is told again what the link may have lost; later it is behind, as a joiner is.

Blame: when a round fails, members that stayed silent are blamed; if none did and none died, those that
reported the failure. Who has failed is served in a round apart from those who have not, until it succeeds.
`MAX_FAILURES` in a row, and the generator is to be restarted.

A version that a member *refuses* (it arrived, but is damaged, not finite or for another model) is not sent to it
again; the next one is. If nobody else can use it either, nobody is blamed, and nobody must wait for it: `Skipped`;
after `MAX_FAILURES` such versions in a row the run is to be stopped. If another generator does use it, whoever
refused it is blamed.
"""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.leases import AWAY_S
from asyncrl.messages import Applied, Go, Offer, Prepare, Resync, Sent, TransferFailed
from asyncrl.rounds import Effect, Member, Note, Published, Restart, Round, Send, Skipped, Unusable

PUBLISHER = "publisher"
"""Name under which the learner's weight sender says Hello."""
MAX_FAILURES = 3
"""Failed rounds in a row after which a generator is restarted."""
READY_S = 10.0
"""Longest wait for a member's Ready (less if `weights.timeout_s` is less)."""
LOOK_S = 1.0
"""Interval at which a round looks for members that are away."""


def transfer_limit_s(timeout_s: float, buckets: int) -> float:
    """Longest that an honest transfer can last: build, each broadcast (and the trailer), apply."""
    return timeout_s * (buckets + 3)


class Roster:
    """Generators, their versions, and the round in progress. All times are seconds of one clock."""

    def __init__(self, config: Config, published: int) -> None:
        self._timeout_s = config.weights.timeout_s
        self._ready_s = min(READY_S, self._timeout_s)
        self._away_s = max(AWAY_S, 3 * config.hub.heartbeat_s)
        self._backend = config.weights_backend
        self._published = published
        self._generators: dict[str, Member] = {}
        self._publisher: str | None = None
        self._latest: Offer | None = None
        self._unanswered: Offer | None = None
        self._round: Round | None = None
        self._resync_deadline: float | None = None
        self._epoch = 0
        self._group: tuple[object, ...] | None = None
        """Identity of the last group, None when it failed; `_group_key` makes it."""
        self._cost: tuple[int, float, int] = (-1, 0.0, 0)
        """Version, seconds and bytes of the last Sent."""
        self._skipped: set[int] = set()
        """Versions that all have refused, since one was used."""
        self._effects: list[Effect] = []

    # ---- what the hub asks -----------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float | None:
        """When `expire` must be called at the latest; None: nothing is waited for."""
        deadlines = [] if self._resync_deadline is None else [self._resync_deadline]
        deadlines += [self._round.deadline, self._round.look] if self._round else []
        return min(deadlines, default=None)

    def version_of(self, name: str) -> int | None:
        """Version that a live generator has in use; None if it is not live."""
        generator = self._generators.get(name)
        return None if generator is None else generator.version

    # ---- events: who is there ----------------------------------------------------------------------

    def generator_joined(self, name: str, incarnation: str, version: int, now: float) -> None:
        """A generator said Hello: it started, or only reconnected (same incarnation)."""
        known = self._generators.get(name)
        if known is not None and known.incarnation == incarnation:
            known.version, known.heard = max(known.version, version), now
            known.failures, known.given_up = 0, False
            self._say_again(name, known)
        else:
            if known is not None:
                self._remove(name, now)
            self._generators[name] = Member(incarnation, version, now)
        self._settle(now)

    def heard(self, name: str, now: float) -> None:
        """A generator's heartbeat; after a silence it takes part again."""
        generator = self._generators.get(name)
        if generator is not None:
            was_away = self._is_away(generator, now)
            generator.heard = now
            if was_away:
                self._settle(now)

    def generator_left(self, name: str, now: float) -> None:
        """A generator died."""
        if name in self._generators:
            self._remove(name, now)
            self._settle(now)

    def publisher_joined(self, incarnation: str, now: float) -> None:
        """The publisher said Hello; it will offer by itself if it has weights."""
        if self._publisher == incarnation:
            return
        if self._publisher is not None:
            self.publisher_left(now)
        self._publisher = incarnation
        for generator in self._generators.values():
            # It may bring a version that was refused once more, and sound.
            generator.refused = generator.skipped = -1

    def publisher_left(self, now: float) -> None:
        """The publisher died: its round is cancelled, its offer void."""
        if self._round is not None:
            self._cancel("the publisher left")
        self._publisher = self._latest = self._unanswered = self._resync_deadline = None
        self._settle(now)

    # ---- events: a round ---------------------------------------------------------------------------

    def offer(self, offer: Offer, now: float) -> None:
        """The publisher holds weights and waits for a Go."""
        if self._publisher is None:
            return
        self._latest, self._resync_deadline = offer, None
        running = self._round
        if running is not None and not running.sending and running.offer == offer:
            return  # It only repeats itself.
        if running is not None and not running.publisher_done:
            # It would not offer if it had got, or could still get, this round's Go.
            self._cancel(f"the publisher offered version {offer.version} instead of sending")
        self._unanswered = offer
        self._settle(now)

    def ready(self, name: str, epoch: int, now: float) -> None:
        """A member's receiver waits for Go."""
        running = self._round
        if running is not None and not running.sending and running.epoch == epoch:
            running.waiting.discard(name)
            self._settle(now)

    def applied(self, name: str, applied: Applied, now: float) -> None:
        """A generator has switched to a version; counts even if its round is long over."""
        generator = self._generators.get(name)
        if generator is None:
            return
        generator.version, generator.heard = max(generator.version, applied.version), now
        generator.failures = 0
        running = self._round
        current = running is not None and running.sending and running.epoch == applied.epoch
        if running is not None and current and name in running.waiting:
            running.waiting.discard(name)
            running.applied.add(name)
        self._settle(now)

    def sent(self, sent: Sent, now: float) -> None:
        """The publisher's part of the round is complete."""
        running = self._round
        if running is not None and running.sending and running.epoch == sent.epoch:
            running.sent = sent
            running.deadline = min(running.deadline, now + self._timeout_s)
            self._cost = (sent.version, sent.seconds, sent.nbytes)
            self._settle(now)

    def failed(self, name: str, failure: TransferFailed, now: float) -> None:
        """A member, or the publisher, gave the transfer up; its old weights stay in use."""
        running = self._round
        if running is None or running.epoch != failure.epoch:
            return
        if name == PUBLISHER:
            if not running.sending:
                return
            running.publisher_failed = failure.reason
        elif name not in running.members:
            return
        elif failure.refused:
            if name in running.waiting:
                running.waiting.discard(name)
                running.refused[name] = failure.reason
            self._settle(now)
            return
        elif not running.sending:
            self._blame(name, f"did not get ready: {failure.reason}")
            self._prepare_without({name}, now)
            return
        elif name in running.waiting:
            running.waiting.discard(name)
            running.failed[name] = failure.reason
        running.deadline = min(running.deadline, now + self._ready_s)
        self._settle(now)

    def expire(self, now: float) -> None:
        """Acts on deadlines that have passed."""
        if self._resync_deadline is not None and now >= self._resync_deadline:
            self._resync_deadline = None
            self._effects.append(Note("publisher_silent", "the publisher did not offer; asked again"))
        running = self._round
        if running is not None and now >= running.deadline:
            if running.sending:
                self._end()
            else:
                silent = set(running.waiting)
                for name in sorted(silent):
                    self._blame(name, f"was not ready for version {running.offer.version} in time")
                self._prepare_without(silent, now)
                return
        elif running is not None and now >= running.look:
            running.look = now + LOOK_S
            away = {name for name in running.waiting if self._is_away(self._generators[name], now)}
            if away and not running.sending:
                self._prepare_without(away, now)
                return
            if away:
                running.waiting -= away
                running.gone |= dict.fromkeys(sorted(away), "away")
                self._end()
        self._settle(now)

    # ---- moving on ---------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Moves on as far as possible: start or end a round, ask for an offer, announce a version."""
        running = self._round
        if running is not None and not running.waiting:
            if running.refused and not running.sending:
                self._prepare_without(set(), now)
                return
            if not running.sending:
                self._go(running, now)
            elif running.publisher_done:
                self._end()
        if self._round is not None:
            return
        offer, self._unanswered = self._unanswered, None
        if offer is not None:
            self._prepare(offer, self._next_members(offer, now), now)
        if self._round is not None or self._latest is None:
            return
        version, behind = self._latest.version, self._behind(self._latest, now)
        if any(generator.version >= version for generator in self._generators.values()):
            self._publish(version)
        elif not behind:
            self._skip(version)
        if behind and self._resync_deadline is None:
            self._resync_deadline = now + self._timeout_s
            self._effects.append(Send(PUBLISHER, Resync(f"behind version {version}: {', '.join(behind)}")))

    def _publish(self, version: int) -> None:
        if version > self._published:
            self._published = version
            seconds, nbytes = self._cost[1:] if self._cost[0] == version else (0.0, 0)
            self._effects.append(Published(version, seconds, nbytes))
            self._skipped.clear()

    def _skip(self, version: int) -> None:
        """Nobody uses the version and nobody wants it: whoever has refused it must do without."""
        names = [name for name, g in sorted(self._generators.items()) if g.refused == version != g.skipped]
        if not names:
            return
        for name in names:
            self._generators[name].skipped = version
        self._effects.append(Skipped(version, tuple(names)))
        if version not in self._skipped:
            self._skipped.add(version)
            if len(self._skipped) == MAX_FAILURES:
                text = f"{MAX_FAILURES} versions of the weights in a row were refused by every generator"
                self._effects.append(Unusable(f"{text}; the last is version {version}"))

    def _behind(self, offer: Offer, now: float) -> tuple[str, ...]:
        """Who is to get the offer: not who is away."""
        return tuple(
            name
            for name, generator in sorted(self._generators.items())
            if generator.version < offer.version and generator.refused != offer.version
            if not generator.given_up and not self._is_away(generator, now)
        )

    def _is_away(self, generator: Member, now: float) -> bool:
        return now - generator.heard >= self._away_s

    def _next_members(self, offer: Offer, now: float) -> tuple[str, ...]:
        """Who takes part in the next round: of those behind, the ones that failed least often.

        So nobody who is well ever waits in one round with somebody who has just failed.
        """
        behind = {name: self._generators[name].failures for name in self._behind(offer, now)}
        return tuple(name for name, failures in behind.items() if failures == min(behind.values()))

    def _prepare(self, offer: Offer, members: tuple[str, ...], now: float) -> None:
        """Starts a round, or answers that none is needed."""
        if not members:
            self._effects.append(Send(PUBLISHER, Go(self._epoch, offer.version)))
            return
        key = self._group_key(offer, members)
        if key != self._group:
            self._epoch = self._epoch + 1 if self._epoch else int(now * 1000)
        self._group = key
        self._round = Round(self._epoch, offer, members, now + self._ready_s, set(members), now + LOOK_S)
        for name in members:
            self._say(self._round, name)

    def _say(self, running: Round, name: str) -> None:
        """Tells a member, or the publisher, what the round is at: Prepare, or Go."""
        offer = running.offer
        if running.sending:
            self._effects.append(Send(name, Go(running.epoch, offer.version, list(running.members))))
            return
        prepare = Prepare(
            epoch=running.epoch,
            version=offer.version,
            store_host=offer.store_host,
            store_port=offer.store_port,
            rank=running.members.index(name) + 1,
            world_size=len(running.members) + 1,
            backend=self._backend,
            buckets=offer.buckets,
            addresses=offer.addresses,
        )
        self._effects.append(Send(name, prepare))

    def _say_again(self, name: str, generator: Member) -> None:
        """A member has a new connection: what was said on the one before, by it or to it, may be lost."""
        running = self._round
        if running is None or name not in running.waiting:
            return
        if generator.version < running.offer.version:
            self._say(running, name)
        elif running.sending:
            running.waiting.discard(name)
            running.applied.add(name)

    def _prepare_without(self, names: set[str], now: float) -> None:
        """PREPARE failed for some members, or was refused: again for the others, as a new group."""
        running, self._round, self._group = self._round, None, None
        assert running is not None
        self._note_refusals(running)
        names = names | running.refused.keys()
        self._prepare(running.offer, tuple(name for name in running.members if name not in names), now)
        self._settle(now)

    def _go(self, running: Round, now: float) -> None:
        running.sending = True
        running.waiting = set(running.members)
        running.deadline = now + transfer_limit_s(self._timeout_s, len(running.offer.buckets))
        for name in (PUBLISHER, *running.members):
            self._say(running, name)

    def _end(self) -> None:
        """Ends SENDING, at its deadline or before, and blames for what failed, but nobody if a member is away."""
        running, self._round = self._round, None
        assert running is not None
        self._note_refusals(running)
        if running.sent is not None and len(running.applied) + len(running.refused) == len(running.members):
            return
        self._group = None
        told = [f"{name} (silent)" for name in sorted(running.waiting)]
        told += [f"{name} ({how})" for name, how in running.gone.items()]
        told += [f"{name} ({reason})" for name, reason in running.failed.items()]
        if running.sent is None:
            told.append(f"{PUBLISHER} ({running.publisher_failed or 'silent'})")
        detail = f"version {running.offer.version}, epoch {running.epoch}: {'; '.join(told)}"
        self._effects.append(Note("transfer_failed", detail))
        guilty = [] if "away" in running.gone.values() else sorted(running.waiting)
        if not guilty and not running.gone and running.publisher_done:
            guilty = list(running.failed)
        for name in guilty:
            self._blame(name, running.failed.get(name, "was silent during the transfer"))

    def _note_refusals(self, running: Round) -> None:
        """What a version's refusal means for those who refused it."""
        if not running.refused:
            return
        self._group = None
        version = running.offer.version
        used = any(generator.version >= version for generator in self._generators.values())
        by_reason: dict[str, list[str]] = {}
        for name, reason in sorted(running.refused.items()):
            by_reason.setdefault(reason, []).append(name)
            if name in self._generators:
                self._generators[name].refused = version
            if used:
                self._blame(name, f"refused what others use: {reason}")
        told = [f"refused by {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
        self._effects.append(Note("version_refused", "; ".join(told)))

    def _cancel(self, reason: str) -> None:
        running, self._round, self._group = self._round, None, None
        assert running is not None
        detail = f"version {running.offer.version}, epoch {running.epoch}: {reason}"
        self._effects.append(Note("transfer_cancelled", detail))

    def _remove(self, name: str, now: float) -> None:
        del self._generators[name]
        running = self._round
        if running is None or name not in running.members:
            return
        if not running.sending:
            self._prepare_without({name}, now)
        elif name in running.waiting:
            running.waiting.discard(name)
            running.gone[name] = "died"

    def _blame(self, name: str, reason: str) -> None:
        generator = self._generators.get(name)
        if generator is None or generator.given_up:
            return
        generator.failures += 1
        if generator.failures >= MAX_FAILURES:
            generator.given_up = True
            told = f"{name} failed {generator.failures} weight transfers in a row; the last: {reason}"
            self._effects += [Note("given_up", told), Restart(name, told)]

    def _group_key(self, offer: Offer, members: tuple[str, ...]) -> tuple[object, ...]:
        incarnations = tuple(self._generators[name].incarnation for name in members)
        return (members, incarnations, offer.store_host, offer.store_port, self._publisher)
