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
    | no sign of life for hang_s          | has its stacks written, kills it, restarts it likewise      |
    | more than max_restarts in window_s  | stops the run as failed, and says why; if that is a stall,  |
    |                                     | all processes write their stacks first                      |
    | exit status 2 or 3                  | stops the run: a restart would not help                     |
    | a killed process does not end       | stops the run as failed after KILLED_S                      |
    | all ranks ended with status 0       | the run is over: tells the hub, waits for everybody         |
    | Ctrl-C or SIGTERM                   | orderly stop within grace_s; the second time kills at once  |

Children ask the kernel to die with their parent, so even `kill -9` of the supervisor leaves no orphans.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from asyncrl import keys
from asyncrl.config import Config
from asyncrl.lifesigns import LifeSigns
from asyncrl.messages import Hello, Message, ProcessEvent, Shutdown
from asyncrl.process import EXIT_STOP_RUN, EXIT_USAGE
from asyncrl.transport import AsyncSocket, free_port_pair
from asyncrl.watchdog import watchdog

MAX_BACKOFF_S = 10.0
FULL_BYTES = 1 << 20
"""A disk with less room than this is called full; a process that ends then may not have been able to say why."""
LISTEN_S = 0.5
"""Interval at which the children's signs of life are looked at."""
KILLED_S = 20.0
"""Longest wait for the end of a process that was killed: while it waits in the kernel it does not end."""


@dataclass(slots=True)
class Child:
    """One process that is kept alive."""

    name: str
    arguments: list[str]
    env: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    restarts: list[float] = field(default_factory=list)
    """Times of the restarts within the window."""
    signs: LifeSigns | None = None
    """Of the process that runs, or ran last."""
    silence: str = ""
    """Why the process that ran last was killed, if it was for its silence."""

    @property
    def alive(self) -> asyncio.subprocess.Process | None:
        """The process, if it runs."""
        return self.process if self.process is not None and self.process.returncode is None else None

    @property
    def stalled(self) -> bool:
        """Whether the process that ran last ended because it hung: by its own watchdog, or by ours."""
        return bool(self.silence) or (self.signs is not None and self.signs.dumped)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended."""

    status: str
    """`finished`, `stopped` or `failed`."""
    reason: str
    stalled: bool = False
    """Whether a process that hung is the reason."""


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


def still_counted(restarts: Sequence[float], now: float, window_s: float, hung_s: float) -> list[float]:
    """The restarts that count when a process has died.

    Args:
        restarts: times of those that counted before; they are returned as if they were `hung_s` later.
        now: the time.
        window_s: `supervise.window_s`.
        hung_s: how long the process hung before its end. That is no time that it lived: without this, stalls that
            take longer than the window would be forgotten one by one, and a run that always stalls go on for ever.
    """
    return [restart + hung_s for restart in restarts if now - restart - hung_s <= window_s]


def rank_environment(rank: int, ranks: int, port: int, gpus: Sequence[int], visible: str | None) -> dict[str, str]:
    """What makes a process learner rank `rank` of `ranks` on this machine; `gpus`, `visible`: see `gpu_share`."""
    return {
        "RANK": str(rank),
        # The learner takes it for the index of the rank's GPU among those that it sees.
        "LOCAL_RANK": "0" if gpus else str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **gpu_share(gpus, rank, 1, visible),
    }


def scorer_child(config: Config) -> Child | None:
    """The scorer that the run needs on this machine, at the address that its configuration gives."""
    reward = config.reward
    if reward.model is None or reward.endpoint is None:
        return None
    model = ["--model", reward.model, "--endpoint", reward.endpoint, "--device", reward.model_device]
    limits = ["--batch", str(reward.model_batch), "--timeout", str(reward.timeout_s)]
    limits += ["--hang", str(config.supervise.hang_s)]
    return Child("scorer", ["scorer", *model, *limits])


class Supervisor:
    """Runs one run's processes to their end. `await run()` once."""

    def __init__(self, config: Config, run_dir: Path, port: int) -> None:
        self._config = config
        self._run_dir = run_dir
        self._logs = run_dir / "logs"
        self._stacks = run_dir / "stacks"
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
        held = keys.of_run(run_dir, config.hub)
        # A path, not what is in it; empty: whatever key this process was given is not this run's.
        self._key = {keys.ENVIRONMENT: str(run_dir / keys.NAME) if held is not None else ""}
        self._link = _HubLink(self._hub_address, held)

    async def run(self) -> Outcome:
        """Starts everything and returns when nothing of it runs any more."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted, number)
        self._logs.mkdir(exist_ok=True)
        watchdog.start("supervisor", folder=self._stacks)
        listener = asyncio.create_task(self._listen(), name="listen")
        self._keep(listener)
        try:
            with watchdog.serving(self._config.supervise.hang_s, loop=loop):
                await self._start_all()
                outcome = await self._outcome
                listener.cancel()
                if outcome.stalled:
                    await self._dump_all(outcome.reason)
                await self._stop(outcome)
            return outcome
        finally:
            await self._kill_all()
            self._link.close()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    # ---- starting --------------------------------------------------------------------------------

    async def _start_all(self) -> None:
        await self._start(self._hub)
        if self._scorer is not None:
            await self._start(self._scorer)
        await self._start_learners()
        for generator in self._generators:
            await self._start(generator)

    async def _start(self, child: Child) -> None:
        path = self._logs / f"{child.name}.log"
        log = path.open("ab")
        child.signs, child.silence = LifeSigns(child.name, path, self._stacks), ""
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
                "--watched",
                str(child.signs.fd),
                str(self._stacks),
                pass_fds=[child.signs.fd],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | _QUIET | self._key | child.env,
                # In a session of its own a child does not get the terminal's Ctrl-C: stopping is ordered.
                start_new_session=True,
            )
        finally:
            log.close()
            child.signs.handed_over()
        self._link.tell(ProcessEvent(child.name, "started", f"pid {child.process.pid}"))
        task = asyncio.create_task(self._watch(child, child.process, child.signs), name=f"watch-{child.name}")
        self._keep(task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._watchers.add(task)
        task.add_done_callback(self._watcher_over)

    def _watcher_over(self, task: asyncio.Task[None]) -> None:
        """One that failed looks after nobody any more: it could not start a process again, or has a bug."""
        self._watchers.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end("failed", f"the supervisor's task {task.get_name()} failed: {type(error).__name__}: {error}")

    async def _start_learners(self) -> None:
        self._ranks_done.clear()
        port, gpus = free_port_pair("127.0.0.1"), self._config.learner.gpus
        for rank, learner in enumerate(self._learners):
            learner.env = rank_environment(rank, len(self._learners), port, gpus, self._visible)
            await self._start(learner)

    # ---- watching --------------------------------------------------------------------------------

    async def _watch(self, child: Child, process: asyncio.subprocess.Process, signs: LifeSigns) -> None:
        status = await process.wait()
        signs.close()
        if child.process is not process or self._stopping or self._outcome.done():
            return  # Replaced or stopped on purpose.
        child.process = None
        if child in self._learners:
            await self._learner_ended(child, status)
        elif status in (EXIT_USAGE, EXIT_STOP_RUN) or (child is self._hub and status == 0):
            self._end("failed", self._last_words(child, status), child.stalled)
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
            self._end("failed", self._last_words(child, status), child.stalled)
        else:
            await self._restart_learners(child, status)

    async def _restart_learners(self, dead: Child, status: int) -> None:
        """The ranks' collectives cannot outlive one of them: all start again, from the checkpoint."""
        # All are given up before the first wait: a rank that dies meanwhile must not start this once more.
        old = [(other, other.process) for other in self._learners if other.process is not None]
        for other in self._learners:
            other.process = None
        if dead.stalled:
            # What a rank hangs in is often another rank: their stacks belong together.
            await self._dump(old, self._last_words(dead, status))
        await asyncio.gather(*(self._kill(other, process) for other, process in old))
        await self._restart(dead, status)

    async def _kill(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """Kills a process if it runs; if it does not end, for a disk or a device does not answer, the run does."""
        if process.returncode is None:
            process.kill()
        try:
            async with asyncio.timeout(KILLED_S):
                await process.wait()
        except TimeoutError:
            told = f"{child.name} (pid {process.pid}) was killed and did not end within {KILLED_S:g} s"
            self._end("failed", f"{told}: it waits in the kernel, for a disk or a device")

    async def _listen(self) -> None:
        """Finds the children that give no sign of life, and kills them; their watchers do the rest."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(LISTEN_S)  # Signs that do not come cannot be waited for in another way.
            now = time.monotonic()
            # A supervisor that was stopped itself has not listened meanwhile.
            elapsed, last = min(now - last, 2 * LISTEN_S), now
            for child in self._children():
                process = child.alive
                if process is not None and child.signs is not None:
                    limit_s, setting = self._patience(child.signs)
                    if child.signs.silent(elapsed) > limit_s:
                        child.silence = f"no sign of life for {limit_s:g} s ({setting}); killed"
                        await self._dump([(child, process)], f"{child.name}: {child.silence}")
                        await self._kill(child, process)

    def _patience(self, signs: LifeSigns) -> tuple[float, str]:
        """Longest silence of a process, and its setting; imports at the start may hold the GIL for long."""
        settings = self._config.supervise
        if signs.serving or settings.hang_s > settings.start_timeout_s:
            return settings.hang_s, "supervise.hang_s"
        return settings.start_timeout_s, "supervise.start_timeout_s"

    async def _dump(self, processes: list[tuple[Child, asyncio.subprocess.Process]], line: str) -> None:
        """Has processes write their stacks, all at once, those that do not answer by other means."""
        living = [(child, process) for child, process in processes if process.returncode is None and child.signs]
        await asyncio.gather(*(child.signs.dump(line, process.pid) for child, process in living if child.signs))

    async def _restart(self, child: Child, status: int) -> None:
        now = time.monotonic()
        settings = self._config.supervise
        hung_s = max(settings.hang_s, self._config.learner.stall_s) if child.stalled else 0.0
        child.restarts = still_counted(child.restarts, now, settings.window_s, hung_s)
        words = self._last_words(child, status)
        self._link.tell(ProcessEvent(child.name, "died", words))
        if len(child.restarts) >= settings.max_restarts:
            self._link.tell(ProcessEvent(child.name, "gave_up", words))
            lived = ", besides the time in which it hung" if child.stalled else ""
            many = f"{child.name} died {len(child.restarts) + 1} times within {settings.window_s:g} s{lived}"
            self._end("failed", f"{many}; the last time: {words}", child.stalled)
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
        how = child.silence or how
        log = self._logs / f"{child.name}.log"
        try:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        last = lines[-1].strip()[:500] if lines and status >= 0 else ""
        if (free := shutil.disk_usage(self._run_dir).free) < FULL_BYTES:
            # A full disk does not take the child's last line either.
            last = f"the disk of {self._run_dir} is full ({free >> 10} KiB are free); {last}"
        return f"{child.name}: {how}" + (f": {last}" if last else "") + f" (log: {log})"

    # ---- stopping --------------------------------------------------------------------------------

    def _interrupted(self, number: int) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._end("stopped", f"stopped by {signal.Signals(number).name}")
        else:
            for child in self._children():
                if process := child.alive:
                    process.kill()

    def _end(self, status: str, reason: str, stalled: bool = False) -> None:
        if stalled:
            reason += f"; what all processes did then is in {self._stacks}"
        if not self._outcome.done():
            self._outcome.set_result(Outcome(status, reason, stalled))

    async def _dump_all(self, reason: str) -> None:
        """All processes write their stacks: who waited for whom can only be seen in all of them."""
        line = f"the run is stopped: {reason}"
        await self._dump([(child, child.process) for child in self._children() if child.process], line)
        print(watchdog.last_words(line), flush=True)

    async def _stop(self, outcome: Outcome) -> None:
        """Learner and generators first, so that what they still send is journalled; then the hub."""
        self._stopping = True
        if self._hub.alive is None:
            # Nobody is left to stop them in order; what they hold unacknowledged comes again from its prefix.
            for child in (*self._learners, *self._generators):
                if process := child.alive:
                    process.kill()
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
            if process := child.alive:
                await self._kill(child, process)
        for task in self._watchers:
            task.cancel()

    def _children(self) -> list[Child]:
        scorer = [] if self._scorer is None else [self._scorer]
        return [*self._learners, *self._generators, *scorer, self._hub]


class _HubLink:
    """Tells the hub what happens to processes; what it cannot take now waits in the socket."""

    def __init__(self, address: str, held: keys.Keys | None) -> None:
        self._hello = Hello("supervisor", "supervisor", secrets.token_hex(4), os.getpid())
        identity = f"supervisor/{self._hello.incarnation}"
        self._socket = AsyncSocket(zmq.DEALER, self._on_message, identity, keys=held)
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
