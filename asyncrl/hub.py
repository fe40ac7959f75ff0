"""The hub process: it wires scheduler, roster and journal to two sockets, and decides nothing itself.

    generators ──Chunks──▶ data ROUTER ─┐                      ┌─▶ committer (run.db, its own thread)
    generators ──Hello, Heartbeat, … ──▶│                      │        │ durable
    learner ranks ──NextBatch, StepDone▶├─▶ scheduler, roster ─┤        ▼
    publisher ──Offer, Sent ───────────▶│   (pure, in memory)  └── actions: Ack, Lease, Batch, Go, …
    supervisor ──ProcessEvent, Shutdown▶┘

Write-ahead: an event changes the scheduler in memory, which yields journal records; whatever the hub sends
because of the event is an *action* that runs only after those records are durable (`asyncrl.commit`).

    | waits for            | who                 | unblocked by                       | limit              |
    |----------------------|---------------------|------------------------------------|--------------------|
    | a batch              | learner rank        | enough complete groups             | learner asks again |
    | a lease              | free generator slot | admission (version), another's end | -                  |
    | Ready, Applied, Sent | roster              | generators, publisher              | weights.timeout_s  |
    | an ack               | generator's outbox  | the commit                         | re-sent            |
    | a training task      | the hub's loop      | the environment                    | tasks.TASK_S       |

Everything it knows is in run.db: `kill -9` and a new start lose nothing. It never imports torch, and of an
algorithm's parts only the group filter, which may be a plug-in: one that imports torch brings it here. Started by
the supervisor, or by hand with `asyncrl hub --run runs/<name> --port 5555`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from asyncrl import keys, records
from asyncrl.batches import BatchDesk
from asyncrl.commit import Committer
from asyncrl.config import Config
from asyncrl.envs.registry import load
from asyncrl.harvest import Harvest
from asyncrl.intake import Intake, frames_fit
from asyncrl.journal import Journal, JournalError
from asyncrl.messages import (
    PROTOCOL,
    Applied,
    Checkpointed,
    CheckpointFault,
    Chunks,
    Heartbeat,
    Hello,
    Lease,
    Message,
    NextBatch,
    Offer,
    Prefix,
    ProcessEvent,
    Ready,
    Refused,
    Rehello,
    Revoke,
    Sent,
    Shutdown,
    StepDone,
    StepFailed,
    Stop,
    TransferFailed,
    Welcome,
)
from asyncrl.overdue import StepWatch
from asyncrl.peers import Control, Peers, introduces, may_say, name_of
from asyncrl.process import EXIT_STOP_RUN, hold_run
from asyncrl.reclaim import Reclaimer
from asyncrl.recovery import restore
from asyncrl.roster import Roster
from asyncrl.rounds import Note, Published, Restart, Send, Skipped, Unusable
from asyncrl.scheduler import Grant, Rules, Scheduler
from asyncrl.tasks import Tasks
from asyncrl.trainers.filters import group_filter
from asyncrl.transport import MAX_CONTROL_BYTES, AsyncSocket
from asyncrl.watchdog import watchdog

REPORT_S = 1.0
"""Interval of the hub's own metrics."""


class Hub:
    """One run's hub. `await run()` returns the exit status."""

    def __init__(self, run_dir: Path, port: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._started = time.time() - self._loop.time()
        self._lock = hold_run(run_dir)
        self._journal = journal = Journal.open(run_dir / "run.db")
        self._run_dir = run_dir
        self._config_json = journal.get("config_json")
        self._config = config = Config.model_validate_json(self._config_json)
        self._keys = keys.of_run(run_dir, config.hub)
        self._tasks_ahead = Tasks(config.env, load(config.env.name, config.env.args), journal)
        rules = Rules.from_config(config, greedy=bool(config.algo.greedy_baseline))
        self._scheduler: Scheduler = restore(rules, group_filter(config.algo), journal, self._now())
        self._roster = Roster(config, self._scheduler.version)
        self._host, self._port = config.hub.host, port
        self._peers = Peers()
        reclaimer = Reclaimer(journal, config.hub.journal_mb)
        self._committer = Committer(journal, self._scheduler.take_records, reclaimer)
        self._record, self._after = self._committer.record, self._committer.after
        self._desk = BatchDesk(journal, config)
        self._wanted: dict[int, tuple[bytes, NextBatch]] = {}
        self._advance_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = ""
        self._served_step = self._scheduler.sealed_step
        self._step_watch = StepWatch(config.learner.stall_s)
        self._harvest = Harvest(config, self._scheduler.filtered_groups)
        self._intake = Intake(self._scheduler, self._harvest, self._tasks_ahead, self._record, self._now)
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failed = False

    async def run(self) -> int:
        """Serves until a shutdown; returns the exit status."""
        self._loop.set_exception_handler(self._broken)
        listen = partial(AsyncSocket, zmq.ROUTER, keys=self._keys)
        self._control = listen(self._on_control, max_bytes=MAX_CONTROL_BYTES, takes=Control)
        self._data = listen(self._on_data, takes=Chunks)
        self._control.bind(f"tcp://{self._host}:{self._port}")
        self._data.bind(f"tcp://{self._host}:{self._port + 1}")
        self._record(records.event(self._now(), "hub", "started", f"port {self._port}"))
        self._record(records.run_key("status", "running"), records.run_key("reason", ""))
        self._spawn(self._committer.run_forever(), "commit")
        self._spawn(self._reports_forever(), "report")
        self._changed()
        with watchdog.serving(self._config.supervise.hang_s, self._run_dir, self._loop):
            status = await self._exit
        self._control.close()
        self._data.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with watchdog.waiting("its last commit", self._config.supervise.grace_s, "supervise.grace_s"):
            self._committer.close()
        return status

    # ---- messages --------------------------------------------------------------------------------

    def _on_control(self, peer: bytes, message: Message, frames: list[memoryview]) -> None:
        if isinstance(message, Hello):
            self._on_hello(peer, message)
            return
        role, name = self._peers.role(peer), name_of(peer)
        if role is None:
            self._control.send(Rehello(), to=peer)
        elif frames or not may_say(role, name, message):
            self._control.malformed += 1
        else:
            self._dispatch(peer, name, message)
            self._changed()

    def _dispatch(self, peer: bytes, name: str, message: Message) -> None:
        now = self._now()
        match message:
            case Heartbeat(leases, stats):
                self._revoke(peer, self._scheduler.heartbeat(name, leases, now))
                self._roster.heard(name, now)
                self._record(records.metric(now, self._scheduler.step, name, stats))
            case Ready(epoch, _):
                self._roster.ready(name, epoch, now)
            case Applied():
                cost = {"version": message.version, "pause_s": message.pause_s, "transfer_s": message.transfer_s}
                self._record(records.event(now, name, "weights_applied", json.dumps(cost)))
                self._scheduler.generator_version(name, message.version)
                self._roster.applied(name, message, now)
            case TransferFailed():
                self._roster.failed(name, message, now)
            case Offer():
                self._roster.offer(message, now)
            case Sent():
                self._roster.sent(message, now)
            case NextBatch():
                self._on_next_batch(peer, message)
            case StepDone():
                self._on_step_done(message, now)
            case StepFailed(step, batch_id, reason):
                self._fail(f"step {step} was not applied: {reason}; batch {batch_id} is kept in run.db")
            case Checkpointed() | CheckpointFault():
                self._record(*records.checkpoints(now, message))
            case ProcessEvent():
                self._on_process_event(message, now)
            case Shutdown(reason, status):
                self._shutdown(reason, status)

    def _on_hello(self, peer: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            reason = f"{hello.name} speaks protocol {hello.protocol}, this hub {PROTOCOL}; install one version"
            self._control.send(Refused(reason), to=peer)
            return
        if not introduces(peer, hello):
            self._control.malformed += 1
            self._control.send(Refused(f"{hello.name!r} cannot be the name of a {hello.role!r}"), to=peer)
            return
        now = self._now()
        if (forgotten := self._peers.add(peer, hello)) is not None:
            self._left(forgotten, now)
        config, data = self._config_json.encode(), f"tcp://{self._host}:{self._port + 1}"
        welcome = Welcome(config, str(self._run_dir), data, self._scheduler.version, self._scheduler.step)
        self._after(partial(self._control.send, welcome, to=peer))
        if hello.role == "generator" and (self._stopping or self._scheduler.finished):
            self._after(partial(self._control.send, Stop(self._stopping or "all steps are done"), to=peer))
            return
        if hello.role == "generator" and hello.capacity > 0:
            stray = self._scheduler.generator_joined(
                hello.name, hello.incarnation, hello.capacity, hello.version, hello.leases, now
            )
            self._revoke(peer, stray)
            self._roster.generator_joined(hello.name, hello.incarnation, hello.version, now)
        elif hello.role == "publisher":
            self._roster.publisher_joined(hello.incarnation, now)
        self._changed()

    def _on_data(self, peer: bytes, message: Message, frames: list[memoryview]) -> None:
        if not isinstance(message, Chunks) or not frames_fit(message, frames):
            self._data.malformed += 1
            return
        ack = self._intake.take(message, frames)
        if ack is not None:
            self._after(partial(self._data.send, ack, to=peer))
        if message.ends:
            self._changed()

    def _on_next_batch(self, peer: bytes, wanted: NextBatch) -> None:
        if wanted.step > self._scheduler.step + 1 and wanted.rank == 0:
            # Rank 0 has done a step that is not recorded: its StepDone was lost on the way.
            self._control.send(Rehello(), to=peer)
            return
        self._wanted[wanted.rank] = (peer, wanted)

    def _on_step_done(self, done: StepDone, now: float) -> None:
        if done.step <= self._scheduler.step:
            # A learner that resumed from its checkpoint repeats steps; their rows stand.
            self._spawn(self._check_repeated(done), "digest")
            return
        if done.step > self._scheduler.sealed_step:
            return  # There is no such batch.
        self._scheduler.step_done(done.step)
        metrics = done.metrics | {"reward_batch": done.metrics.get("reward", 0.0)} | self._harvest.take_metrics()
        self._record(records.step(done.step, done.batch_id, now, metrics, done.digest))
        if self._scheduler.done:
            self._scheduler.finish("run ended")
            self._record(records.run_key("status", "finished"))
            self._stop_generators("all steps are done")

    async def _check_repeated(self, done: StepDone) -> None:
        recorded = await self._committer.read(self._journal.digest, done.step)
        if recorded and done.digest:
            self._record(records.repeated(self._now(), done.step, recorded, done.digest))

    def _on_process_event(self, event: ProcessEvent, now: float) -> None:
        self._record(records.event(now, event.name, event.what, event.detail))
        if event.what in ("died", "left"):
            self._left(event.name, now)

    def _left(self, name: str, now: float) -> None:
        self._peers.forget(name)
        if name.startswith("learner"):
            self._peers.forget("publisher")
            self._wanted.clear()
            self._served_step = 0
            self._roster.publisher_left(now)
        else:
            self._scheduler.generator_left(name)
            self._roster.generator_left(name, now)

    # ---- moving on -------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Something happened; look once, after all messages at hand, at what has become possible."""
        if not self._advance_scheduled:
            self._advance_scheduled = True
            self._loop.call_soon(self._advance)

    def _advance(self) -> None:
        self._advance_scheduled = False
        now = self._now()
        self._scheduler.lapse(now)
        self._roster.expire(now)
        if not self._stopping:
            self._admit(now)
            self._grant(now)
        self._serve_batches(now)
        self._give_up_if_futile()
        self._roster_effects(now)
        self._record(*self._scheduler.take_records())
        self._set_timer(now)

    def _admit(self, now: float) -> None:
        """Admits no more than generators can take at once: a task is drawn when there is room for it."""
        room = self._scheduler.leases.free - self._scheduler.leases.queued
        while room > 0 and self._scheduler.may_admit():
            room -= self._scheduler.rules.episodes_per_group
            try:
                index, task = self._tasks_ahead.draw(self._scheduler.next_draw)
            except IndexError:
                self._fail(f"the environment has no more training tasks from {self._scheduler.next_draw} on")
                return
            except Exception as error:  # The fault boundary of the environment's tasks.
                what = f"the environment cannot give training task {self._scheduler.next_draw}"
                self._fail(f"{what}: {type(error).__name__}: {error}")
                return
            self._scheduler.admit(task, now, index)

    def _grant(self, now: float) -> None:
        for grant in self._scheduler.grant(now):
            if grant.next_seq > 0:
                self._after(partial(self._spawn_lease, grant))
            else:
                self._after(partial(self._send_lease, grant, Prefix(), b"", b""))

    def _send_lease(self, grant: Grant, prefix: Prefix, tokens: bytes, logprobs: bytes) -> None:
        lease = Lease(grant.lease_id, grant.episode_id, grant.task, grant.seed, prefix, grant.greedy)
        self._send_to(grant.generator, lease, (tokens, logprobs))

    def _spawn_lease(self, grant: Grant) -> None:
        async def send() -> None:
            self._send_lease(grant, *await self._committer.read(self._journal.prefix, grant.episode_id))

        self._spawn(send(), "lease")

    def _serve_batches(self, now: float) -> None:
        for rank, (peer, wanted) in list(self._wanted.items()):
            step = wanted.step
            if self._stopping and step > self._served_step:
                reply: Message | None = Stop(self._stopping)
            elif step > self._scheduler.step + 1:
                continue  # This rank is ahead of rank 0's report.
            elif step > self._config.train.steps:
                reply = Stop("all steps are done")
            elif step <= self._scheduler.sealed_step or self._scheduler.seal(now) is not None:
                reply = None
                self._served_step = max(self._served_step, step)
                self._harvest.batch_served(self._scheduler.filtered_groups)
                self._step_watch.served(step, now)
            else:
                continue
            del self._wanted[rank]
            if reply is not None:
                self._after(partial(self._control.send, reply, to=peer))
            else:
                self._after(partial(self._spawn_batch, peer, wanted))

    def _give_up_if_futile(self) -> None:
        reason = self._harvest.hopeless(self._scheduler.filtered_groups, self._scheduler.sealed_step + 1)
        if reason is not None and not self._exit.done():
            self._fail(reason)

    def _spawn_batch(self, peer: bytes, wanted: NextBatch) -> None:
        async def send() -> None:
            batch, frames = await self._committer.read(self._desk.share, wanted)
            self._control.send(batch, frames, to=peer)

        self._spawn(send(), "batch")

    def _roster_effects(self, now: float) -> None:
        for effect in self._roster.take_effects():
            match effect:
                case Send(to, message):
                    self._after(partial(self._send_to, to, message))
                case Note(what, detail):
                    self._record(records.event(now, "weights", what, detail))
                case Published(version, seconds, nbytes):
                    self._scheduler.published(version)
                    self._record(records.version(version, now, seconds, nbytes))
                    self._changed()
                case Skipped(version, names):
                    for name in names:
                        self._scheduler.generator_version(name, version)
                    self._scheduler.published(version)
                    self._changed()
                case Unusable(reason):
                    self._fail(reason)
                case Restart(name, reason):
                    self._after(partial(self._send_to, name, Stop(reason, restart=True)))

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadlines = [self._scheduler.next_deadline(), self._roster.next_deadline()]
        due = min((deadline for deadline in deadlines if deadline is not None), default=None)
        if due is not None:
            self._timer = self._loop.call_later(max(0.0, due - now) + 0.001, self._changed)

    # ---- stopping --------------------------------------------------------------------------------

    def _shutdown(self, reason: str, status: str) -> None:
        """First call: no new leases, the learner stops after its step. `status` ends the hub itself."""
        if not self._stopping:
            self._stopping = reason
            self._stop_generators(reason)
        if status:
            if not (status == "stopped" and self._scheduler.done):
                self._record(records.run_key("status", status))
                self._record(records.run_key("reason", reason))
            self._report()
            self._after(partial(self._leave, 0))

    def _stop_generators(self, reason: str) -> None:
        """They leave the roster too: nobody waits for a weight transfer to a process that is ending."""
        for name, peer in self._peers.generators():
            self._roster.generator_left(name, self._now())
            self._after(partial(self._control.send, Stop(reason), to=peer))

    def _fail(self, reason: str) -> None:
        """The run cannot go on: the reason is journalled and every process is told to stop."""
        if self._failed:
            return
        self._failed = True
        _say(reason)
        self._record(records.event(self._now(), "hub", "failed", reason))
        self._record(records.run_key("status", "failed"))
        self._record(records.run_key("reason", reason))
        self._stopping = self._stopping or reason
        self._stop_generators(reason)
        self._after(partial(self._leave, EXIT_STOP_RUN))

    def _leave(self, status: int) -> None:
        if not self._exit.done():
            self._exit.set_result(status)

    # ---- small things ----------------------------------------------------------------------------

    async def _reports_forever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._report()

    def _report(self) -> None:
        """Gauges and totals of the run; traffic and commits since the report before."""
        counts: dict[str, float] = dict(self._scheduler.counts())
        committer = self._committer
        counts |= {"chunks": self._intake.chunks, "tokens": self._intake.tokens, "commits": committer.commits}
        counts["commit_ms"] = 1e3 * committer.seconds / max(1, committer.commits)
        counts["malformed"] = self._control.malformed + self._data.malformed
        self._intake.chunks = self._intake.tokens = committer.commits = 0
        committer.seconds = 0.0
        self._scheduler.traffic.clear()
        self._record(records.metric(self._now(), self._scheduler.step, "hub", counts))
        self._record(*self._step_watch.overdue(self._scheduler.step, self._now()))

    def _send_to(self, name: str, message: Message, frames: Sequence[bytes] = ()) -> None:
        peer = self._peers.find(name)
        if peer is not None:
            self._control.send(message, frames, to=peer)

    def _revoke(self, peer: bytes, leases: Sequence[int]) -> None:
        if leases:
            message = Revoke(list(leases), "the lease lapsed or belongs to another generator")
            self._after(partial(self._control.send, message, to=peer))

    def _now(self) -> float:
        """Seconds since the epoch that never run backwards."""
        return self._started + self._loop.time()

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_over)

    def _broken(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A bug in a handler: what is in memory can no longer be trusted, what is in run.db can."""
        self._loop.default_exception_handler(context)
        self._leave(1)

    def _spawned_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, JournalError) and task.get_name() == "commit":
            self._leave(EXIT_STOP_RUN)  # The status cannot be written, and on a full disk no log either.
            _say(str(error))
        elif isinstance(error, JournalError):
            self._fail(str(error))
        elif error is not None:
            print(f"hub: {task.get_name()} failed: {error!r}", flush=True)
            self._leave(1)


def _say(reason: str) -> None:
    """The supervisor takes the last line of the log for the reason; a full disk does not take the line."""
    with contextlib.suppress(OSError):
        print(f"hub: {reason}", flush=True)
