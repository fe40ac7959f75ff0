"""The supervisor: parent of all processes of a run on this machine; starts, watches, restarts, stops them.

It holds no state of the run (that is run.db's) and moves no data. Called by `asyncrl train`.

    asyncrl train ── supervisor ─┬─ hub
                                 ├─ scorer                    (with reward.model)
                                 ├─ learner-0 … learner-N     (restarted together, from the last checkpoint)
                                 ├─ generator-0 … generator-M (restarted one by one)
                                 └─ a thread: live view and trackers, which read run.db

    | it sees                             | it does                                                     |
    |-------------------------------------|-------------------------------------------------------------|
    | a process died                      | tells the hub, restarts it after a bounded back-off         |
    | more than max_restarts in window_s  | stops the run as failed, and says why                       |
    | exit status 2 or 3                  | stops the run: a restart would not help                     |
    | all ranks ended with status 0       | the run is over: tells the hub, waits for everybody         |
    | Ctrl-C or SIGTERM                   | orderly stop within grace_s; the second time kills at once  |

Children ask the kernel to die with their parent, so even `kill -9` of the supervisor leaves no orphans.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from asyncrl.config import Config
from asyncrl.messages import Hello, Message, ProcessEvent, Shutdown
from asyncrl.process import EXIT_STOP_RUN, EXIT_USAGE
from asyncrl.transport import AsyncSocket, free_port_pair

MAX_BACKOFF_S = 10.0


@dataclass(slots=True)
class Child:
    """One process that is kept alive."""

    name: str
    arguments: list[str]
    env: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    restarts: deque[float] = field(default_factory=deque)
    """Times of the restarts within the window."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended."""

    status: str
    """`finished`, `stopped` or `failed`."""
    reason: str


def gpus_each(config: Config) -> int:
    """GPUs that one generator needs."""
    if config.generator.engine == "vllm":
        return config.vllm.tensor_parallel * config.vllm.data_parallel
    return config.sglang.tensor_parallel if config.generator.engine == "sglang" else 1


def gpu_share(gpus: Sequence[int], index: int, each: int, visible: str | None) -> dict[str, str]:
    """The environment that shows process `index` its own `each` of `gpus`, and no others.

    Args:
        gpus: numbers among the GPUs that this process sees; empty: the child sees what this process sees.
        index: number of the child among its kind.
        each: GPUs of one child.
        visible: this process's CUDA_VISIBLE_DEVICES, whose names (numbers or UUIDs) the children get; None: unset.
    """
    if not gpus:
        return {}
    names = visible.split(",") if visible else None
    share = gpus[index * each : (index + 1) * each]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] if names else str(gpu) for gpu in share)}


def scorer_child(config: Config) -> Child | None:
    """The scorer that the run needs on this machine, at the address that its configuration gives."""
    reward = config.reward
    if reward.model is None or reward.endpoint is None:
        return None
    model = ["--model", reward.model, "--endpoint", reward.endpoint, "--device", reward.model_device]
    limits = ["--batch", str(reward.model_batch), "--timeout", str(reward.timeout_s)]
    return Child("scorer", ["scorer", *model, *limits])


class Supervisor:
    """Runs one run's processes to their end. `await run()` once."""

    def __init__(self, config: Config, run_dir: Path, port: int) -> None:
        self._config = config
        self._run_dir = run_dir
        self._logs = run_dir / "logs"
        self._hub_address = f"tcp://{config.hub.host}:{port}"
        wait = ["--wait", str(config.supervise.start_timeout_s)]
        self._hub = Child("hub", ["hub", "--run", str(run_dir), "--port", str(port)])
        self._scorer = scorer_child(config)
        self._learners = [
            Child(f"learner-{rank}", ["learner", "--hub", self._hub_address, *wait])
            for rank in range(config.learner.ranks)
        ]
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._generators = [
            Child(
                f"generator-{i}",
                ["generator", "--hub", self._hub_address, "--name", f"generator-{i}", *wait],
                gpu_share(config.generator.gpus, i, gpus_each(config), self._visible),
            )
            for i in range(config.generator.count)
        ]
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._interrupts = 0
        self._watchers: set[asyncio.Task[None]] = set()
        self._ranks_done: set[str] = set()
        self._link = _HubLink(self._hub_address)

    async def run(self) -> Outcome:
        """Starts everything and returns when nothing of it runs any more."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted, number)
        self._logs.mkdir(exist_ok=True)
        try:
            await self._start(self._hub)
            if self._scorer is not None:
                await self._start(self._scorer)
            await self._start_learners()
            for generator in self._generators:
                await self._start(generator)
            outcome = await self._outcome
            await self._stop(outcome)
            return outcome
        finally:
            await self._kill_all()
            self._link.close()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    # ---- starting --------------------------------------------------------------------------------

    async def _start(self, child: Child) -> None:
        log = (self._logs / f"{child.name}.log").open("ab")
        try:
            child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                # Safe path: a folder named triton_kernels in the working directory must not be importable.
                "-P",
                "-m",
                "asyncrl",
                *child.arguments,
                "--parent",
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | _QUIET | child.env,
                # In a session of its own a child does not get the terminal's Ctrl-C: stopping is ordered.
                start_new_session=True,
            )
        finally:
            log.close()
        self._link.tell(ProcessEvent(child.name, "started", f"pid {child.process.pid}"))
        task = asyncio.create_task(self._watch(child, child.process), name=f"watch-{child.name}")
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _start_learners(self) -> None:
        self._ranks_done.clear()
        port = str(free_port_pair("127.0.0.1"))
        gpus = self._config.learner.gpus
        for rank, learner in enumerate(self._learners):
            learner.env = {
                "RANK": str(rank),
                # The learner takes it for the index of the rank's GPU among those that it sees.
                "LOCAL_RANK": "0" if gpus else str(rank),
                "WORLD_SIZE": str(len(self._learners)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **gpu_share(gpus, rank, 1, self._visible),
            }
            await self._start(learner)

    # ---- watching --------------------------------------------------------------------------------

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        if child.process is not process or self._stopping or self._outcome.done():
            return  # Replaced or stopped on purpose.
        child.process = None
        if child in self._learners:
            await self._learner_ended(child, status)
        elif status in (EXIT_USAGE, EXIT_STOP_RUN) or (child is self._hub and status == 0):
            self._end("failed", self._last_words(child, status))
        elif status == 0:
            self._link.tell(ProcessEvent(child.name, "ended"))  # The hub told it that all steps are done.
        else:
            await self._restart(child, status)

    async def _learner_ended(self, child: Child, status: int) -> None:
        if status == 0:
            self._ranks_done.add(child.name)
            if len(self._ranks_done) == len(self._learners):
                self._end("finished", "all steps are done")
        elif status in (EXIT_USAGE, EXIT_STOP_RUN):
            self._end("failed", self._last_words(child, status))
        else:
            await self._restart_learners(child, status)

    async def _restart_learners(self, dead: Child, status: int) -> None:
        """The ranks' collectives cannot outlive one of them: all start again, from the checkpoint."""
        # All are given up before the first wait: a rank that dies meanwhile must not start this once more.
        old = [other.process for other in self._learners if other.process is not None]
        for other in self._learners:
            other.process = None
        for process in old:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await self._restart(dead, status)

    async def _restart(self, child: Child, status: int) -> None:
        now = time.monotonic()
        settings = self._config.supervise
        while child.restarts and now - child.restarts[0] > settings.window_s:
            child.restarts.popleft()
        words = self._last_words(child, status)
        self._link.tell(ProcessEvent(child.name, "died", words))
        if len(child.restarts) >= settings.max_restarts:
            self._link.tell(ProcessEvent(child.name, "gave_up", words))
            many = f"{child.name} died {len(child.restarts) + 1} times within {settings.window_s:g} s"
            self._end("failed", f"{many}; the last time: {words}")
            return
        # The first restart is immediate; a process that keeps dying is given ever more time.
        delay = min(MAX_BACKOFF_S, settings.backoff_s * 2 ** (len(child.restarts) - 1)) if child.restarts else 0
        child.restarts.append(now)
        await asyncio.sleep(delay)
        if self._stopping or self._outcome.done():
            return
        if child in self._learners:
            await self._start_learners()
        else:
            await self._start(child)

    def _last_words(self, child: Child, status: int) -> str:
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        log = self._logs / f"{child.name}.log"
        try:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        last = lines[-1].strip()[:500] if lines and status >= 0 else ""
        return f"{child.name}: {how}" + (f": {last}" if last else "") + f" (log: {log})"

    # ---- stopping --------------------------------------------------------------------------------

    def _interrupted(self, number: int) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._end("stopped", f"stopped by {signal.Signals(number).name}")
        else:
            for child in self._children():
                if child.process is not None and child.process.returncode is None:
                    child.process.kill()

    def _end(self, status: str, reason: str) -> None:
        if not self._outcome.done():
            self._outcome.set_result(Outcome(status, reason))

    async def _stop(self, outcome: Outcome) -> None:
        """Learner and generators first, so that what they still send is journalled; then the hub."""
        self._stopping = True
        if self._hub.process is None or self._hub.process.returncode is not None:
            # Nobody is left to stop them in order; what they hold unacknowledged comes again from its prefix.
            for child in (*self._learners, *self._generators):
                if child.process is not None and child.process.returncode is None:
                    child.process.terminate()
        self._link.tell(Shutdown(outcome.reason))
        deadline = time.monotonic() + self._config.supervise.grace_s
        for child in [*self._learners, *self._generators]:
            await self._wait_until(child, deadline)
        self._link.tell(Shutdown(outcome.reason, outcome.status))
        await self._wait_until(self._hub, max(deadline, time.monotonic() + 5.0))

    async def _wait_until(self, child: Child, deadline: float) -> None:
        if child.process is None:
            return
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await child.process.wait()
        except TimeoutError:
            print(f"{child.name} did not stop within supervise.grace_s and was killed", flush=True)
            child.process.kill()

    async def _kill_all(self) -> None:
        for child in self._children():
            if child.process is not None and child.process.returncode is None:
                child.process.kill()
                await child.process.wait()
        for task in self._watchers:
            task.cancel()

    def _children(self) -> list[Child]:
        scorer = [] if self._scorer is None else [self._scorer]
        return [*self._learners, *self._generators, *scorer, self._hub]


class _HubLink:
    """Tells the hub what happens to processes; what it cannot take now waits in the socket."""

    def __init__(self, address: str) -> None:
        self._hello = Hello("supervisor", "supervisor", secrets.token_hex(4), os.getpid())
        self._socket = AsyncSocket(zmq.DEALER, self._on_message, f"supervisor/{self._hello.incarnation}")
        self._socket.connect(address)

    def tell(self, message: Message) -> None:
        """Sends an event. The hello goes first each time, for the hub may be a new one by now."""
        self._socket.send(self._hello)
        self._socket.send(message)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _on_message(self, _peer: bytes, _message: Message, _frames: list[memoryview]) -> None:
        """The hub's welcome tells the supervisor nothing that it does not know."""


_QUIET = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
