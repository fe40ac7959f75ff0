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
    | a batch         | sealing; asked again every 10 s  | STALL_S, then the rank gives up  |
    | other ranks     | their collective                 | learner process-group time-out   |
    | publisher       | the previous version being sent  | weights.timeout_s                |

A rank that dies takes the others with it (the supervisor restarts all): they load the last checkpoint, and the
hub hands out the batches after it once more.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from pathlib import Path

import numpy as np

from asyncrl.learner import dist
from asyncrl.learner.checkpoint import CheckpointBroken, Checkpointer, Done
from asyncrl.learner.errors import NotFinite
from asyncrl.learner.export import export
from asyncrl.learner.selftest import PackingMismatch
from asyncrl.learner.update import Trainer
from asyncrl.messages import (
    Batch,
    Checkpointed,
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
from asyncrl.weights.publisher import Publisher

ASK_AGAIN_S = 10.0
"""A request without an answer is repeated after this long; the hub treats repetitions as one."""
STALL_S = 1800.0
"""A rank that gets no batch for this long gives up, so that a stuck run ends with a reason."""


class Stopped(Exception):
    """The hub asked for an orderly end."""


class HubRefused(Exception):
    """The hub does not accept this process."""


class HubLink:
    """A rank's conversation with the hub; survives the hub's restarts."""

    def __init__(self, endpoint: str, rank: int) -> None:
        self._name = f"learner-{rank}"
        self._incarnation = secrets.token_hex(4)
        self._client = Client(endpoint, f"{self._name}/{self._incarnation}")
        self._step = 0
        # Steps whose record may not have arrived: a restarted hub says in its Welcome what it has.
        self._reports: deque[StepDone] = deque(maxlen=256)

    def introduce(self, timeout_s: float) -> Welcome:
        """Says hello and waits for the run's configuration.

        Raises:
            TimeoutError: the hub does not answer.
            HubRefused: it does not want this process.
        """
        self._hello()
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = self._next(min(left, ASK_AGAIN_S))
            if isinstance(message, Welcome):
                return message
        raise TimeoutError(f"{self._name}: the hub did not answer within {timeout_s:g} s")

    def batch(self, step: int, rank: int, ranks: int) -> tuple[Batch, np.ndarray, np.ndarray]:
        """Waits for this rank's share of a step: the header, tokens (int32) and log-probs (float32).

        Raises:
            Stopped: the run ends before this step.
            TimeoutError: no batch for `STALL_S`.
        """
        self._step = step - 1
        deadline = time.monotonic() + STALL_S
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
                    break  # The hub was restarted and has forgotten the request.
        raise TimeoutError(f"{self._name}: no batch for step {step} within {STALL_S:g} s")

    def report(self, message: StepDone | StepFailed | Checkpointed) -> None:
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
            self._open(welcome)
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
        except (PackingMismatch, FileNotFoundError, ValueError) as error:
            print(f"learner: {type(error).__name__}: {error}", flush=True)
            return EXIT_USAGE
        except (CheckpointBroken, OSError) as error:
            # A full disk or a damaged checkpoint: a restart would only fail again.
            print(f"learner: {error}", flush=True)
            return EXIT_STOP_RUN
        finally:
            try:
                if self._publisher is not None:
                    self._publisher.close()
            finally:
                self._link.close()
                dist.shutdown()
        return 0

    def _open(self, welcome: Welcome) -> None:
        config, run_dir = from_json(welcome.config), Path(welcome.run_dir)
        self._config, self._run_dir = config, run_dir
        pin(config.learner.cores)
        dist.init(config.learner.device, config.learner.threads)
        assert config.model.path is not None
        self._trainer = Trainer(config, config.model.path)
        self._checkpointer = Checkpointer(run_dir / "checkpoints", config.checkpoint)
        self._step = self._checkpointer.load_latest(self._trainer, welcome.step)
        self._trainer.self_test()
        if self._rank == 0:
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
        batch, tokens, logprobs = self._link.batch(step, self._rank, self._ranks)
        got = time.perf_counter()
        metrics = self._trainer.train(batch, tokens, logprobs, step)
        trained = time.perf_counter()
        self._step = step
        self._publish()
        published = time.perf_counter()
        if self._rank == 0:
            metrics |= {"wait_s": got - started, "train_s": trained - got, "gather_s": published - trained}
            self._link.report(StepDone(step, batch.batch_id, metrics))
        self._report_checkpoint(self._checkpointer.poll())
        if step % self._config.checkpoint.every == 0:
            self._save()

    def _publish(self) -> None:
        """All ranks walk the weights, for the walk is collective; rank 0 copies them for its publisher."""
        if self._publisher is not None:
            self._publisher.offer(self._step, self._trainer.weights())
        else:
            for _ in self._trainer.weights():
                pass

    def _save(self) -> None:
        """Begins a checkpoint; the one before must be complete by then."""
        self._report_checkpoint(self._checkpointer.wait())
        self._checkpointer.save(self._trainer, self._step)

    def _report_checkpoint(self, done: Done | None) -> None:
        if done is not None and self._rank == 0:
            self._link.report(Checkpointed(done.step, str(done.path)))

    def _finish(self) -> None:
        """The last checkpoint, and the policy as a Hugging Face folder."""
        if self._checkpointer.last_step != self._step:
            self._save()
        self._report_checkpoint(self._checkpointer.wait())
        assert self._config.model.path is not None
        export(self._trainer, Path(self._config.model.path), self._run_dir / "model")
