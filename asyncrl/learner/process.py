"""One learner rank: sealed batches in, optimiser steps, weights and checkpoints out.

It owns the socket to the hub and the order of things; the mathematics is `asyncrl.learner.update`'s, and which
episodes make a batch is the hub's. Started by the supervisor, or by torchrun, Slurm or by hand with the
torchrun variables set: `RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… asyncrl learner --hub tcp://host:port`.

    every rank:   wait for my share ─▶ forward, backward, step ─▶ gather weights ─▶ (checkpoint) ─▶ next
                        ▲                     │ collectives            │ rank 0: copy to the snapshot
    hub ──Batch─────────┘                     ▼                        ▼
    hub ◀─StepDone── rank 0             other ranks            publisher thread ─▶ generators

    | waits for       | unblocked by                     | limit                            |
    |-----------------|----------------------------------|----------------------------------|
    | the hub         | its answer                       | supervise.start_timeout_s        |
    | a batch         | sealing; asked again every 10 s  | learner.batch_s; then stacks of  |
    |                 |                                  | all are written, the run fails   |
    | its own start   | model, other ranks, checkpoint   | watchdog.OPEN_S                  |
    | other ranks     | their collective                 | learner.stall_s for a step, and  |
    |                 |                                  | for the walk over the weights    |
    | publisher's end | the last offer's answer          | Publisher.close: 10 s            |

A rank that dies takes the others with it (the supervisor restarts all): they load the last checkpoint, and the
hub hands out the batches after it once more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import deque
from pathlib import Path
from typing import Literal

import numpy as np

from asyncrl import keys
from asyncrl.learner import dist
from asyncrl.learner.checkpoint import CheckpointBroken, Checkpointer, Written
from asyncrl.learner.digest import digest
from asyncrl.learner.errors import NotFinite
from asyncrl.learner.export import export
from asyncrl.learner.selftest import PackingMismatch
from asyncrl.learner.update import Trainer
from asyncrl.messages import (
    Batch,
    Checkpointed,
    CheckpointFault,
    Hello,
    Message,
    NextBatch,
    Refused,
    Rehello,
    StepDone,
    StepFailed,
    Stop,
    Welcome,
)
from asyncrl.process import EXIT_STOP_RUN, EXIT_USAGE, pin
from asyncrl.settings import from_json
from asyncrl.transport import Client
from asyncrl.watchdog import OPEN_S, watchdog
from asyncrl.weights.publisher import Publisher

ASK_AGAIN_S = 10.0
"""A request without an answer is repeated after this long; the hub treats repetitions as one."""
END_S = 60.0
"""Longest wait for the publisher's and the other ranks' end."""


class Stopped(Exception):
    """The hub asked for an orderly end."""


class Starved(Exception):
    """There is no batch, and another start of the learner would not bring one."""


class HubRefused(Exception):
    """The hub does not accept this process."""


class HubLink:
    """A rank's conversation with the hub; survives the hub's restarts."""

    def __init__(self, endpoint: str, rank: int) -> None:
        self._name, self._endpoint = f"learner-{rank}", endpoint
        self._incarnation = secrets.token_hex(4)
        # Whatever is lost with a connection, the Welcome that answers each new one's Hello brings it to light.
        self._client = Client(endpoint, f"{self._name}/{self._incarnation}", self._hello, keys.for_hub(endpoint))
        self._step = 0
        # Steps whose record may not have arrived: the hub says in its Welcome what it has.
        self._reports: deque[StepDone] = deque(maxlen=256)

    def introduce(self, timeout_s: float) -> Welcome:
        """Says hello and waits for the run's configuration.

        Raises:
            TimeoutError: the hub does not answer.
            HubRefused: it does not want this process.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = self._next(min(left, ASK_AGAIN_S))
            if isinstance(message, Welcome):
                return message
        raise TimeoutError(
            f"{self._name} waited {timeout_s:g} s for the first answer of the hub at {self._endpoint}; is it "
            f"running, and does --hub name its control port? --wait S raises the limit{keys.HINT}"
        )

    def batch(self, step: int, rank: int, ranks: int, limit_s: float) -> tuple[Batch, np.ndarray, np.ndarray]:
        """Waits for this rank's share of a step: the header, tokens (int32) and log-probs (float32).

        Raises:
            Stopped: the run ends before this step.
            Starved: no batch within `limit_s`.
        """
        self._step = step - 1
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self._client.send(NextBatch(step, rank, ranks))
            again = time.monotonic() + ASK_AGAIN_S
            while (left := again - time.monotonic()) > 0:
                received = self._receive(left)
                if received is None:
                    break
                message, frames = received
                if isinstance(message, Batch) and message.step == step:
                    return message, np.frombuffer(frames[0], np.int32), np.frombuffer(frames[1], np.float32)
                if isinstance(message, Stop):
                    raise Stopped(message.reason)
                if isinstance(message, Welcome):
                    break  # The hub was restarted, or the link was away: the request or its answer is lost.
        raise Starved(
            f"{self._name} waited {limit_s:g} s for the batch of step {step} from the hub at {self._endpoint} "
            "(limit learner.batch_s); is anything sampled? See the run's events and the generators' logs"
        )

    def report(self, message: StepDone | StepFailed | Checkpointed | CheckpointFault) -> None:
        """Tells the hub; a finished step is told again after a hub restart that lost it."""
        if isinstance(message, StepDone):
            self._reports.append(message)
            self._step = message.step
        self._client.send(message)

    def close(self) -> None:
        """Closes the socket, giving the last messages time to leave."""
        self._client.close()

    def _hello(self) -> None:
        self._client.send(Hello("learner", self._name, self._incarnation, os.getpid(), version=self._step))

    def _next(self, timeout_s: float) -> Message | None:
        received = self._receive(timeout_s)
        return received[0] if received else None

    def _receive(self, timeout_s: float) -> tuple[Message, list[memoryview]] | None:
        received = self._client.receive(timeout_s)
        if received is None:
            return None
        message = received[0]
        if isinstance(message, Rehello):
            self._hello()
        elif isinstance(message, Refused):
            raise HubRefused(message.reason)
        elif isinstance(message, Welcome):
            for report in self._reports:
                if report.step > message.step:
                    self._client.send(report)
        return received


class LearnerProcess:
    """One rank. `run()` returns the exit status."""

    def __init__(self, hub: str, start_timeout_s: float) -> None:
        self._hub = hub
        self._start_timeout_s = start_timeout_s
        self._rank = int(os.environ.get("RANK", "0"))
        self._ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._link = HubLink(hub, self._rank)
        self._publisher: Publisher | None = None

    def run(self) -> int:
        """Trains until the hub says stop; returns the exit status."""
        try:
            welcome = self._link.introduce(self._start_timeout_s)
            with watchdog.waiting("its own start: model, ranks, checkpoint", OPEN_S, "watchdog.OPEN_S"):
                self._open(welcome)
            with watchdog.serving(self._config.supervise.hang_s, self._run_dir):
                self._train()
        except HubRefused as error:
            print(f"learner: refused by the hub: {error}", flush=True)
            return EXIT_USAGE
        except NotFinite as error:
            if self._rank == 0:
                told = f"{error} The batch is kept in run.db."
                self._link.report(StepFailed(error.step, error.batch_id, told))
            print(f"learner: {error}", flush=True)
            return EXIT_STOP_RUN
        except Starved as error:
            print(watchdog.last_words(str(error)), flush=True)
            return EXIT_STOP_RUN
        except (PackingMismatch, FileNotFoundError, ValueError) as error:
            print(f"learner: {type(error).__name__}: {error}", flush=True)
            return EXIT_USAGE
        except (CheckpointBroken, OSError) as error:
            # A full or hanging disk, or a checkpoint of another model: a restart would only fail again.
            print(f"learner: {error}", flush=True)
            return EXIT_STOP_RUN
        finally:
            with watchdog.waiting("the end of its publisher and its ranks", END_S, "learner.process.END_S"):
                self._close()
        return 0

    def _close(self) -> None:
        try:
            if self._publisher is not None:
                self._publisher.close()
        finally:
            self._link.close()
            dist.shutdown()

    def _open(self, welcome: Welcome) -> None:
        config, run_dir = from_json(welcome.config), Path(welcome.run_dir)
        self._config, self._run_dir = config, run_dir
        pin(config.learner.cores)
        # A collective may take as long as the step that it is part of.
        limit_s = max(dist.TIMEOUT_S, config.learner.stall_s)
        dist.init(config.learner.device, config.learner.threads, limit_s, config.run.deterministic)
        assert config.model.path is not None
        self._trainer = Trainer(config, config.model.path)
        self._checkpointer = Checkpointer(run_dir / "checkpoints", config.checkpoint)
        self._step = self._checkpointer.load_latest(self._trainer, welcome.step)
        self._held_s = 0.0
        self._trainer.self_test()
        if self._rank == 0:
            self._checkpointer.tidy()
            for why in self._checkpointer.passed_over.values():
                self._fault("checkpoint_passed_over", f"{why}; going on from step {self._step}")
            self._publisher = Publisher(config, self._hub)
        print(f"learner-{self._rank}: ready at step {self._step}", flush=True)

    def _train(self) -> None:
        self._publish()
        try:
            while True:
                self._one_step(self._step + 1)
        except Stopped as stop:
            print(f"learner-{self._rank}: stopping after step {self._step}: {stop}", flush=True)
        self._finish()

    def _one_step(self, step: int) -> None:
        started = time.perf_counter()
        limits = self._config.learner
        batch, tokens, logprobs = self._link.batch(step, self._rank, self._ranks, limits.batch_s)
        got = time.perf_counter()
        with watchdog.waiting(f"its step {step}, collectives included", limits.stall_s, "learner.stall_s"):
            metrics = self._trainer.train(batch, tokens, logprobs, step)
            fingerprint = digest(self._trainer.state())
        trained = time.perf_counter()
        self._step = step
        self._checkpointer.observe(step, metrics["reward"])
        self._publish()
        published = time.perf_counter()
        if self._rank == 0:
            metrics |= {"wait_s": got - started, "train_s": trained - got, "gather_s": published - trained}
            metrics["checkpoint_wait_s"] = self._held_s  # By the checkpoint of the step before.
            self._link.report(StepDone(step, batch.batch_id, metrics, fingerprint))
        self._tell_of(self._checkpointer.poll())
        self._held_s = self._save() if step % self._config.checkpoint.every == 0 else 0.0

    def _publish(self) -> None:
        """All ranks walk the weights, for the walk is collective; rank 0 copies them for its publisher."""
        what = f"the ranks' walk over the weights of version {self._step}"
        with watchdog.waiting(what, self._config.learner.stall_s, "learner.stall_s"):
            if self._publisher is not None:
                self._publisher.offer(self._step, self._trainer.weights())
            else:
                for _ in self._trainer.weights():
                    pass

    def _save(self) -> float:
        """Begins a checkpoint; the one before must be decided by then. Returns the seconds that this took."""
        began = time.perf_counter()
        # What is written still has that limit of its own; then comes the copy, with its collectives.
        limit_s = 2 * self._config.checkpoint.timeout_s
        with watchdog.waiting(f"the copy for checkpoint {self._step}", limit_s, "twice checkpoint.timeout_s"):
            self._tell_of(self._checkpointer.save(self._trainer, self._step))
        return time.perf_counter() - began

    def _tell_of(self, written: Written | None) -> None:
        if written is None or self._rank:
            return
        if written.error:
            self._fault("checkpoint_failed", f"checkpoint {written.path} could not be written: {written.error}")
        else:
            self._link.report(Checkpointed(written.step, str(written.path), written.kept))

    def _fault(self, what: Literal["checkpoint_passed_over", "checkpoint_failed"], detail: str) -> None:
        self._link.report(CheckpointFault(what, detail, self._checkpointer.complete()))
        with contextlib.suppress(OSError):  # The log may be on the disk that is full.
            print(f"learner-{self._rank}: {detail}", flush=True)

    def _finish(self) -> None:
        """The last checkpoint, and the policy as a Hugging Face folder."""
        if self._checkpointer.last_step != self._step:
            self._save()
        last = self._checkpointer.wait()
        self._tell_of(last)
        if last is not None and last.error and self._rank == 0:
            raise CheckpointBroken(f"the last checkpoint, of step {last.step}, could not be written: {last.error}")
        assert self._config.model.path is not None
        with watchdog.waiting("the export", self._config.checkpoint.timeout_s, "checkpoint.timeout_s"):
            export(self._trainer, Path(self._config.model.path), self._run_dir / "model")
