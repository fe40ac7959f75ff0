"""The scheduler: what is admitted, who samples it, what is trained, and what becomes of every episode.

A pure state machine: no I/O, no clock (`now` is passed in), no randomness but seeds derived from the run's.
The hub calls one method per event and then `take_records()`, and writes those records in one transaction,
in order, *before* any message that results from the event leaves it. So the journal is never behind what
the world was told, and `asyncrl.recovery.restore` brings the same scheduler back after a crash.

    may_admit, admit ──► queue ──grant──► generators ──chunk, end──► complete groups ──seal──► batches
                           ▲                  │                                                  │
                           └──lapse, left─────┘                    published, step_done ◄────────┘

Leases are in `asyncrl.leases`, states and the pacing formulas in `asyncrl.groups`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from asyncrl import records
from asyncrl.groups import (
    Episode,
    EpisodeState,
    Group,
    GroupState,
    KeepGroup,
    Rules,
    Sealed,
    Verdict,
    derive_seed,
    in_order,
    kind_of,
    reason_of_failure,
    reason_to_filter,
    rows_of,
)
from asyncrl.leases import Grant, Leases
from asyncrl.messages import Chunk, EpisodeEnd, Task, Turn
from asyncrl.records import Record

__all__ = ["Grant", "KeepGroup", "Rules", "Scheduler", "Sealed", "Verdict"]


class Scheduler:
    """The state machine. Attributes are for reading; only methods change them.

    Args:
        rules: the run's settings.
        keep_group: the group filter of the algorithm.
    """

    def __init__(self, rules: Rules, keep_group: KeepGroup) -> None:
        self.rules = rules
        self.keep_group = keep_group
        self.records: list[Record] = []
        self.leases = Leases(rules.lease_s, rules.heartbeat_s, self.records)
        self.groups: dict[int, Group] = {}
        """Live groups (running or complete) by id, oldest admitted first."""
        self.episodes: dict[int, Episode] = {}
        """The episodes of live groups by id."""
        self.pending: dict[int, list[int]] = {}
        """Sealed and not yet trained: step -> group ids."""
        self.totals: Counter[str] = Counter()
        """Final states over the whole run, as `counts` names them."""
        self.traffic: Counter[str] = Counter()
        """Chunks, turns and ends by verdict since the hub's last report, which clears it."""
        self.next_task_index = 0
        self.next_draw = 0
        """Index in the training split of the first task that was not drawn yet."""
        self.next_episode_id = 0
        self.filtered_groups = 0
        self.cut_short = 0
        """Groups that the end of the run closed with uses left; if it gets more steps, others replace them."""
        self.version = 0
        """Last published version."""
        self.sealed_step = 0
        self.step = 0
        """Last step that the learner has done."""
        self.finished = False

    # ---- admission ----

    def may_admit(self) -> bool:
        """Whether one more group may start: in time (`Rules.groups_wanted`), and needed by a remaining step.

        A filtered group gives its place back.
        """
        return not self.finished and self._kept < self.rules.groups_wanted(self.version) and self._needed()

    @property
    def _kept(self) -> int:
        """Groups admitted so far that were neither filtered nor cut short: accepted + running."""
        return self.next_task_index - self.filtered_groups - self.cut_short

    def _needed(self) -> bool:
        """Whether the live groups cannot fill the batches of all remaining steps.

        A group counts with the uses it has left, but at most once per step: towards the end of a run the
        uses that are left may lie in too few groups, because a batch takes no group twice.
        """
        rules, left = self.rules, self.rules.steps - self.sealed_step
        if left <= 0:
            return False  # A run that only has its export left to do: what was cut short needs no replacement.
        if self._kept * rules.reuse < rules.steps * rules.groups_per_step:
            return True
        supply = sum(min(rules.reuse - group.uses, left) for group in self.groups.values())
        return rules.reuse > 1 and supply < left * rules.groups_per_step

    def admit(self, task: Task, now: float, drawn: int | None = None) -> Group:
        """Starts the group of a task, whose index in the training split is `drawn` (default: `next_draw`).

        Its episodes are queued.

        Raises:
            RuntimeError: `may_admit` does not hold.
        """
        if not self.may_admit():
            raise RuntimeError(
                f"group {self.next_task_index} admitted with {self._kept} groups accepted or running, "
                f"{self.rules.groups_wanted(self.version)} allowed at version {self.version}"
            )
        group_id = self.next_task_index
        group = Group(group_id, group_id, task, self.rules.needs_version(self._kept))
        self.next_task_index += 1
        drawn = self.next_draw if drawn is None else drawn
        self.next_draw = drawn + 1
        self.records.append(records.task(group.task_index, drawn, task))
        self.records.append(records.group(group_id, group.task_index, group.needs_version, now))
        for member in range(self.rules.episodes_per_group):
            seed = derive_seed(self.rules.seed, "episode", group_id, member)
            greedy = member == self.rules.group_size
            episode = Episode(self.next_episode_id + member, seed, group, greedy)
            group.episodes.append(episode)
            self.episodes[episode.episode_id] = episode
            self.records.append(records.episode(episode.episode_id, group_id, seed, greedy))
            self.leases.enqueue(episode)
        self.next_episode_id += self.rules.episodes_per_group
        self.groups[group_id] = group
        return group

    # ---- generators and leases ----

    def generator_joined(
        self,
        name: str,
        incarnation: str,
        capacity: int,
        version: int,
        leases: Iterable[int],
        now: float,
    ) -> list[int]:
        """A generator says hello, holding `leases`; returns those that are not its own (revoke them).

        A new incarnation loses all leases of the older one. The same incarnation (it reconnects, or the hub
        was restarted) keeps and extends those that it names, and loses those that it does not.
        """
        return self.leases.join(name, incarnation, capacity, version, leases, now)

    def generator_left(self, name: str) -> list[Grant]:
        """A generator is gone: its leases lapse at once and are returned."""
        return self.leases.leave(name)

    def heartbeat(self, name: str, leases: Iterable[int], now: float) -> list[int]:
        """A sign of life: extends the named leases; returns those that are not (any more) its own."""
        return self.leases.extend(name, leases, now)

    def generator_version(self, name: str, version: int) -> None:
        """A generator applied `version`."""
        if name in self.leases.generators:
            self.leases.generators[name].version = version

    def grant(self, now: float) -> list[Grant]:
        """Leases queued episodes to generators with free capacity and weights of `needs_version` or newer.

        Episodes that lost a lease go first, then the oldest; generators with most free capacity first.
        """
        return self.leases.grant(now)

    def lapse(self, now: float) -> list[Grant]:
        """Ends the leases past their deadline, queues their episodes again, and returns the leases."""
        return self.leases.lapse(now)

    def next_deadline(self) -> float | None:
        """When `lapse` has something to do next, if no heartbeat comes."""
        return self.leases.next_deadline()

    # ---- streaming ----

    def chunk(self, c: Chunk) -> Verdict:
        """Takes a chunk's header. No record: the hub writes the chunk with its tokens (`records.chunk`)."""
        episode = self.episodes.get(c.episode_id)
        if episode is None or episode.lease_id != c.lease_id or c.n < 1 or (c.sampled and c.version < 0):
            return self._verdict(Verdict.REFUSED)
        if c.seq < episode.next_seq:
            return self._verdict(Verdict.DUPLICATE)
        if episode.state is not EpisodeState.LEASED:
            return self._verdict(Verdict.REFUSED)
        if c.seq > episode.next_seq:
            return self._verdict(Verdict.EARLY)
        episode.next_seq += 1
        episode.length += c.n
        if c.sampled:
            oldest = c.version if episode.min_version < 0 else min(episode.min_version, c.version)
            episode.sampled += c.n
            episode.min_version = oldest
            episode.max_version = max(episode.max_version, c.version)
        return self._verdict(Verdict.ACCEPTED)

    def turn(self, t: Turn) -> Verdict:
        """Takes an environment's answer, after the chunks that came before it; the hub writes it."""
        episode = self.episodes.get(t.episode_id)
        if episode is None or episode.lease_id != t.lease_id:
            return self._verdict(Verdict.REFUSED)
        if episode.state is not EpisodeState.LEASED:
            return self._verdict(Verdict.DUPLICATE)
        return self._verdict(Verdict.EARLY if t.seq > episode.next_seq else Verdict.ACCEPTED)

    def end(self, e: EpisodeEnd, now: float) -> Verdict:
        """Takes an episode's end; the last one of a group completes or filters the group."""
        episode = self.episodes.get(e.episode_id)
        if episode is None or episode.lease_id != e.lease_id:
            return self._verdict(Verdict.REFUSED)
        if episode.state is not EpisodeState.LEASED:
            return self._verdict(Verdict.DUPLICATE)
        if e.seq != episode.next_seq:
            return self._verdict(Verdict.EARLY if e.seq > episode.next_seq else Verdict.REFUSED)
        reason = reason_of_failure(e, episode, self.rules.token_budget)
        episode.state = EpisodeState.FAILED if reason else EpisodeState.DONE
        episode.reward = None if reason else e.reward
        self.leases.finish(e.lease_id)
        self._record_end(episode, e, reason or "", now)
        if reason:
            self.totals[f"failed: {kind_of(reason)}"] += 1
        if all(each.state in (EpisodeState.DONE, EpisodeState.FAILED) for each in episode.group.episodes):
            self._group_ended(episode.group)
        return self._verdict(Verdict.ACCEPTED)

    def _verdict(self, verdict: Verdict) -> Verdict:
        self.traffic[verdict] += 1
        return verdict

    def _record_end(self, episode: Episode, e: EpisodeEnd, reason: str, now: float) -> None:
        self.records.append(
            records.episode_ended(
                episode.episode_id,
                state=episode.state,
                reason=reason,
                status=e.status,
                reward=episode.reward,
                rewards={} if reason else e.rewards,
                turns=e.turns,
                info=e.info,
                next_seq=episode.next_seq,
                length=episode.length,
                sampled=episode.sampled,
                min_version=episode.min_version,
                max_version=episode.max_version,
                ended=now,
            )
        )

    def _group_ended(self, group: Group) -> None:
        reason = reason_to_filter(group, self.keep_group)
        if reason is None:
            group.state = GroupState.COMPLETE
            self.records.append(records.group_state(group.group_id, GroupState.COMPLETE))
        else:
            self._close(group, "filtered", reason)

    def _close(self, group: Group, state: str, reason: str = "") -> None:
        """Gives a group's episodes their final state, `trained` or `filtered`, and forgets the group.

        A greedy episode shares the state of those that it was the baseline of.
        """
        closed = sum(episode.state is not EpisodeState.FAILED for episode in group.episodes)
        self.totals[f"filtered: {kind_of(reason)}" if reason else state] += closed
        self.filtered_groups += state == "filtered"
        group_state = "filtered" if state == "filtered" else "retired"
        self.records.append(records.group_state(group.group_id, group_state, reason))
        self.records.append(records.episodes_closed(group.group_id, state, reason))
        for episode in group.episodes:
            del self.episodes[episode.episode_id]
        del self.groups[group.group_id]

    # ---- training ----

    def seal(self, now: float) -> Sealed | None:
        """Seals the next batch, if enough groups are complete: exactly `groups_per_step` different ones.

        On demand: the hub calls it when the learner asks for a step that has no batch, not ahead of that, so
        that each batch is chosen among all groups that are complete when it is needed.
        """
        size = self.rules.groups_per_step
        ready = self._ready()
        if self.finished or self.sealed_step >= self.rules.steps or len(ready) < size:
            return None
        groups = in_order(ready, self.rules.order)[:size]
        episodes = [episode for group in groups for episode in group.done]
        step = self.sealed_step + 1
        sealed = Sealed(
            batch_id=step,
            step=step,
            group_ids=[group.group_id for group in groups],
            episode_ids=[episode.episode_id for episode in episodes],
            plan=rows_of(episodes, self.rules.ranks, self.rules.token_budget, self.rules.minibatches),
            seed=derive_seed(self.rules.seed, "batch", step),
        )
        self.records.append(
            records.batch(step, sealed.group_ids, sealed.episode_ids, sealed.plan, sealed.seed, now)
        )
        for group in groups:
            group.uses += 1
            self.records.append(records.group_uses(group.group_id, group.uses))
        self.sealed_step = step
        self.pending[step] = sealed.group_ids
        return sealed

    def _ready(self) -> list[Group]:
        """Complete groups with uses left, oldest first; with `over_age = wait` only up to one that runs."""
        ready = []
        for group in self.groups.values():
            if group.state is GroupState.RUNNING:
                if self.rules.over_age == "wait":
                    break
            elif group.uses < self.rules.reuse:
                ready.append(group)
        return ready

    def step_done(self, step: int) -> None:
        """The learner applied `step`, and so all before it; groups with no use left are now trained.

        A learner that resumes from a checkpoint repeats steps; that changes nothing.

        Raises:
            RuntimeError: no batch was sealed for the step.
        """
        if step > self.sealed_step:
            raise RuntimeError(f"step {step} is done but batches are sealed only up to {self.sealed_step}")
        self.step = max(self.step, step)
        for done in [pending for pending in self.pending if pending <= step]:
            for group_id in self.pending.pop(done):
                group = self.groups[group_id]
                group.trained += 1
                if group.trained == self.rules.reuse:
                    self._close(group, "trained")

    def published(self, version: int) -> None:
        """Weights of `version` are out. A learner that resumes may publish older ones again: no change."""
        self.version = max(self.version, version)

    @property
    def done(self) -> bool:
        """Whether every step of the run is done."""
        return self.step >= self.rules.steps

    def finish(self, reason: str) -> list[Grant]:
        """Ends a run that has done its last step: every live episode gets its final state.

        Episodes that were trained at least once (`reuse` allowed more) are trained, all others are
        filtered(reason). Returns the leases that were still active, to revoke.

        Raises:
            RuntimeError: the run has steps left; its episodes must stay live so that it can resume.
        """
        if not self.done:
            raise RuntimeError(f"run finished after {self.step} of {self.rules.steps} steps")
        closed = self.leases.close()
        for group in list(self.groups.values()):
            if group.trained:
                self.cut_short += 1
                self._close(group, "trained")
            else:
                self._close(group, "filtered", reason)
        self.finished = True
        return closed

    # ---- what the hub reads ----

    def take_records(self) -> list[Record]:
        """The journal's rows for everything since the last call, in order. The caller must write them."""
        taken = self.records.copy()
        self.records.clear()
        return taken

    def counts(self) -> dict[str, int]:
        """Gauges (episodes and groups by state), totals (final states by reason, leases) and `traffic`."""
        states = Counter(episode.state for episode in self.episodes.values())
        groups = Counter(group.state for group in self.groups.values())
        return {
            "admitted": self.next_episode_id,
            "queued": states[EpisodeState.QUEUED],
            "leased": states[EpisodeState.LEASED],
            "done": states[EpisodeState.DONE],
            "groups running": groups[GroupState.RUNNING],
            "groups complete": groups[GroupState.COMPLETE],
            "leases lapsed": self.leases.lapsed,
            "trained": 0,
            **self.totals,
            **self.traffic,
        }

    def check(self) -> None:
        """Raises RuntimeError, with numbers, if an invariant is broken."""
        final = sum(self.totals.values())
        live = sum(episode.state is not EpisodeState.FAILED for episode in self.episodes.values())
        held = [len(generator.leases) for generator in self.leases.generators.values()]
        over = [g.name for g in self.leases.generators.values() if g.capacity and g.free < 0]
        n, leases, allowed = self.counts(), self.leases, self.rules.groups_wanted(self.version)
        wrong = {
            f"{n['admitted']} episodes admitted, {live} live, {final} final": n["admitted"] != live + final,
            f"{n['queued']} queued, {leases.queued} in the queue": n["queued"] != leases.queued,
            f"{n['leased']} leased, {len(leases.active)} leases, generators hold {held}": not (
                n["leased"] == len(leases.active) == sum(held)
            ),
            f"{over} hold more leases than their capacity": bool(over),
            f"{self._kept} groups kept, {allowed} allowed": not self.finished and self._kept > allowed,
            f"step {self.step} done, {self.sealed_step} sealed": self.step > self.sealed_step,
        }
        if any(wrong.values()):
            raise RuntimeError("; ".join(text for text, broken in wrong.items() if broken))
