"""The environment worker as a real process: what it serves is as if it were here, whoever dies, hangs or lies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from asyncrl import cli
from asyncrl.envs import worker_link, worker_messages
from asyncrl.envs.arithmetic import make as make_arithmetic
from asyncrl.envs.base import (
    Demonstrates,
    Environment,
    Interruptible,
    Replays,
    Snapshots,
    Step,
    ToolFault,
    Truncates,
)
from asyncrl.envs.registry import PluginError, load
from asyncrl.envs.rewards import RewardFault
from asyncrl.envs.worker import Worker
from asyncrl.envs.worker_client import WorkerEnvironment, make
from asyncrl.envs.worker_messages import WorkerError
from asyncrl.messages import EpisodeStatus, Task
from asyncrl.process import EXIT_USAGE
from asyncrl.transport import free_port_pair

SAMPLE = Path(__file__).with_name("worker_sample.py")


class Served:
    """`asyncrl env-worker` at one address, started as often as a test likes."""

    def __init__(self, *arguments: str, python: str = sys.executable) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
        self._command = [python, "-P", "-m", "asyncrl", "env-worker", "--endpoint", self.endpoint, *arguments]
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)

    def end(self, how: int = signal.SIGKILL) -> str:
        """Its exit status and what it printed."""
        assert self.process is not None
        self.process.send_signal(how)
        said = self.process.communicate(timeout=60)[0]
        return f"{self.process.returncode}: {said}"


@contextmanager
def served(*arguments: str, python: str = sys.executable) -> Iterator[Served]:
    worker = Served(*arguments, python=python)
    try:
        yield worker
    finally:
        worker.end()


@pytest.fixture(scope="module")
def arithmetic() -> Iterator[Environment]:
    with served("--env", "arithmetic", "--env.args.digits", "3") as worker:
        yield make(worker.endpoint)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    shutil.copy(SAMPLE, folder / "sample.py")
    return folder


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process find a loss out sooner than in earnest."""
    monkeypatch.setattr(worker_link, "BEAT_S", 0.2)
    monkeypatch.setattr(worker_link, "DISCONNECTED_S", 1.0)


def sample_arguments(folder: Path) -> list[str]:
    return ["--env", f"{folder}/sample.py:make", "--env.args", f'{{"folder": "{folder}"}}', "--silence", "1.2"]


@pytest.fixture(scope="module")
def sample_worker(folder: Path) -> Iterator[Served]:
    with served(*sample_arguments(folder)) as worker:
        yield worker


@pytest.fixture
def sample(sample_worker: Served, folder: Path) -> Environment:
    environment = make(sample_worker.endpoint)
    unmark(folder)
    return environment


def say(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def marks(folder: Path, name: str) -> int:
    """How many episodes of the sample have left a mark of this name."""
    return len(list(folder.glob(f"{name}-*")))


def unmark(folder: Path) -> None:
    for mark in folder.glob("*-*"):
        mark.unlink()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.02)


# ---- it is the environment that it serves ----------------------------------------------------------


async def test_arithmetic_through_a_worker_is_arithmetic(arithmetic: Environment) -> None:
    direct = make_arithmetic(digits=3)
    assert isinstance(arithmetic, Environment)
    assert isinstance(arithmetic, Demonstrates)
    for index in range(20):
        task = arithmetic.task("train", index)
        assert task == direct.task("train", index)
        assert arithmetic.demonstration(task) == direct.demonstration(task)
        for content in (task.answer, f"{task.answer}0", "", None, 7, "½"):
            steps = []
            for environment in (direct, arithmetic):
                env = environment.make()
                start = await env.reset(task)
                steps.append((start, await env.step({"role": "assistant", "content": content})))
                await env.close()
            assert steps[0] == steps[1]
    refused = (("test", 0), "no task 0 of split 'test'"), (("train", -1), "no task -1 of split 'train'")
    for wrong, said in refused:
        with pytest.raises(ValueError, match=said):
            arithmetic.task(*wrong)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="call reset"):
        await arithmetic.make().step(say("1"))
    env = arithmetic.make()
    assert not isinstance(env, Snapshots | Replays | Interruptible | Truncates)


async def test_sixty_four_episodes_at_once_are_kept_apart(sample: Environment, folder: Path) -> None:
    async def play(number: int) -> None:
        env = sample.make()
        assert (await env.reset(Task(f"task {number}", []))).messages == [say(f"task {number}") | {"role": "user"}]
        for turn in range(1, 4):
            step = await env.step(say(str(number)))
            assert step.messages[0]["content"] == "|".join([str(number)] * turn)
        await env.close()

    async with asyncio.timeout(60):
        await asyncio.gather(*(play(number) for number in range(64)))
    assert marks(folder, "closed") == 64


async def test_optional_methods_are_there_and_do_what_they_do(sample: Environment) -> None:
    assert sample.task("eval", 1) == Task("eval-1", [], metadata={"deep": [1, {"x": None}]})
    assert isinstance(sample, Demonstrates)
    assert sample.demonstration(Task("t", [])) == [say("t")]
    with pytest.raises(IndexError, match="seven tasks"):
        sample.task("train", 7)
    env = sample.make()
    assert isinstance(env, Snapshots)
    assert isinstance(env, Replays)
    assert isinstance(env, Interruptible)
    assert isinstance(env, Truncates)
    assert (await env.reset(Task("t", []))).tools == [{"type": "function", "function": {"name": "f"}}]
    await env.step(say("a"))
    other = sample.make()
    assert isinstance(other, Snapshots)
    assert isinstance(other, Replays)
    await other.restore(Task("t", []), await env.snapshot())
    await other.replay(say("b"), Step(False, messages=[{"role": "tool", "content": "c"}]))
    assert (await other.step(say("d"))).messages[0]["content"] == "a|b=c|d"
    assert await env.interrupted(say("e")) == Step(True, {"once": 1.0})
    assert await env.truncated(EpisodeStatus.TRUNCATED_TURNS) == {"truncated_turns": 0.25}
    await env.close()
    await other.close()


async def test_what_an_environment_raises_keeps_its_class_or_says_it(sample: Environment) -> None:
    env = sample.make()
    await env.reset(Task("t", []))
    for content, kind, text in (
        ("fault", ToolFault, "the sandbox is gone"),
        ("custom", WorkerError, "ZeroDivisionError: by zero"),
        ("exit", WorkerError, "SystemExit: bye"),
        ("late", TimeoutError, "its own"),
        ("shape", TypeError, "has not the form"),
        ("object", TypeError, "a object cannot travel"),
        ("nothing", TypeError, "step returned NoneType, not Step"),
    ):
        with pytest.raises(kind, match=text):
            await env.step(say(content))
    with pytest.raises(RewardFault, match="nan") as caught:
        await env.step(say("reward"))
    assert caught.value.status is EpisodeStatus.FAILED_REWARD
    assert await env.step(say("scalar")) == Step(True, {"half": 0.5, "none": None}, [], {"n": 0.5})
    await env.close()


# ---- what hangs, dies, lies ------------------------------------------------------------------------


async def test_a_step_that_nobody_waits_for_is_stopped_and_the_episode_can_be_closed(
    sample: Environment, folder: Path
) -> None:
    env, other = sample.make(), sample.make()
    await env.reset(Task("t", []))
    await other.reset(Task("t", []))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await env.step(say("hang"))
    await until(lambda: marks(folder, "cancelled") == 1)
    assert (await other.step(say("x"))).rewards == {"turn": 1.0}
    await env.close()
    await other.close()
    assert marks(folder, "closed") == 2


async def test_a_step_that_blocks_holds_up_neither_tasks_nor_episodes_of_other_threads(folder: Path) -> None:
    with served(*sample_arguments(folder), "--threads", "2") as worker:
        environment = make(worker.endpoint)
        first, second = environment.make(), environment.make()
        await first.reset(Task("t", []))
        await second.reset(Task("t", []))
        blocked = asyncio.create_task(first.step(say("block")))
        await asyncio.sleep(0.2)
        await second.step(say("x"))
        assert (await asyncio.to_thread(environment.task, "train", 0)).id == "train-0"
        assert not blocked.done()
        assert (await blocked).rewards == {"turn": 1.0}


async def test_a_killed_worker_fails_its_episodes_and_the_next_one_serves_new_ones(folder: Path) -> None:
    with served(*sample_arguments(folder)) as worker:
        environment = make(worker.endpoint)
        waiting, idle = environment.make(), environment.make()
        await waiting.reset(Task("t", []))
        await idle.reset(Task("t", []))
        hanging = asyncio.create_task(waiting.step(say("hang")))
        await asyncio.sleep(0.2)
        worker.end()
        with pytest.raises(ToolFault, match=f"worker at {worker.endpoint} is gone"):
            async with asyncio.timeout(30):
                await hanging
        worker.start()
        later = environment.make()
        async with asyncio.timeout(60):
            assert (await later.reset(Task("new", []))).messages[0]["content"] == "new"
        with pytest.raises(ToolFault, match="does not know this episode"):
            await idle.step(say("x"))
        await asyncio.gather(waiting.close(), idle.close(), later.close())


async def test_a_worker_that_is_started_anew_at_once_fails_what_it_never_heard_of(folder: Path) -> None:
    with served(*sample_arguments(folder)) as worker:
        environment = make(worker.endpoint)
        env = environment.make()
        await env.reset(Task("t", []))
        hanging = asyncio.create_task(env.step(say("hang")))
        await asyncio.sleep(0.2)
        worker.end()
        worker.start()
        with pytest.raises(ToolFault, match=r"does not know this request|is gone"):
            async with asyncio.timeout(60):
                await hanging


async def test_the_episodes_of_a_client_that_is_gone_are_closed(sample_worker: Served, folder: Path) -> None:
    code = (
        "import asyncio, os, signal\n"
        "from asyncrl.envs.worker_client import make\nfrom asyncrl.messages import Task\n"
        "async def main():\n"
        f"    environment = make({sample_worker.endpoint!r})\n"
        "    envs = [environment.make() for _ in range(3)]\n"
        "    await asyncio.gather(*(env.reset(Task('t', [])) for env in envs))\n"
        "    asyncio.create_task(envs[0].step({'role': 'assistant', 'content': 'hang'}))\n"
        "    await asyncio.sleep(0.2)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    unmark(folder)
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-P", "-c", code], timeout=60)
    assert done.returncode == -signal.SIGKILL
    await until(lambda: marks(folder, "closed") == 3)


async def test_the_episodes_of_a_client_that_only_thinks_for_long_stay_open(sample: Environment) -> None:
    env = sample.make()
    await env.reset(Task("t", []))
    await asyncio.sleep(1.8)  # The worker's limit of silence is 1.2 s.
    assert (await env.step(say("x"))).rewards == {"turn": 1.0}
    await env.close()


async def test_junk_is_dropped_and_the_worker_works_on(sample: Environment, sample_worker: Served) -> None:
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.connect(sample_worker.endpoint)
    for junk in (b"", b"\x80\x04\x95cos\nsystem\n", os.urandom(5000), b"\x91" * 5000):
        raw.send(junk)
        raw.send_multipart([junk, junk])
    raw.send(worker_messages.encode(worker_messages.Call(1, 1, "__class__", opens=True)))
    assert raw.poll(10_000)
    answer = worker_messages.answer_of(raw.recv())
    assert isinstance(answer, worker_messages.Failed)
    assert "no method '__class__'" in answer.text
    assert sample.task("train", 0).id == "train-0"
    raw.close(linger=0)


async def test_a_worker_that_is_asked_to_end_closes_its_episodes_first(folder: Path) -> None:
    with served(*sample_arguments(folder)) as worker:
        env = make(worker.endpoint).make()
        await env.reset(Task("t", []))
        unmark(folder)
        said = await asyncio.to_thread(worker.end, signal.SIGTERM)
        assert said.startswith("0: env-worker: ")
        assert marks(folder, "closed") == 1
        await env.close()


async def test_a_worker_ends_although_a_task_is_never_drawn(folder: Path) -> None:
    with served(*sample_arguments(folder)) as worker:
        make(worker.endpoint)
        with pytest.raises(ConnectionError):
            WorkerEnvironment(worker.endpoint, timeout_s=0.3).task("train", 30_000)
        assert worker.end(signal.SIGTERM).startswith("0: env-worker: ")


async def test_a_worker_that_does_not_answer_heartbeats_fails_its_episodes(sample_worker: Served) -> None:
    env = WorkerEnvironment(sample_worker.endpoint, timeout_s=1.0).make()
    await env.reset(Task("t", []))
    hanging = asyncio.create_task(env.step(say("hang")))
    await asyncio.sleep(0.2)
    assert sample_worker.process is not None
    sample_worker.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(ToolFault, match="did not answer heartbeats for 1 s"):
            async with asyncio.timeout(30):
                await hanging
    finally:
        sample_worker.process.send_signal(signal.SIGCONT)
    await env.close()


# ---- starting it, and asking for it ----------------------------------------------------------------


def test_without_a_worker_the_endpoint_is_named_and_how_to_start_one() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    with pytest.raises(PluginError, match=f"no environment worker answered at {endpoint}.*asyncrl env-worker"):
        load("worker", {"endpoint": endpoint, "timeout_s": 0.3})


async def test_a_task_that_takes_too_long_is_an_error_that_names_the_endpoint(sample_worker: Served) -> None:
    environment = WorkerEnvironment(sample_worker.endpoint, timeout_s=0.3)
    with pytest.raises(ConnectionError, match=sample_worker.endpoint):
        environment.task("train", 6)
    began = time.monotonic()
    while time.monotonic() < began + 10:
        try:
            assert environment.task("train", 0).id == "train-0"
            return
        except ConnectionError:  # The slow one is still in its turn.
            continue
    raise AssertionError("the worker never answered again")


@pytest.mark.parametrize(
    "arguments", [{"endpoint": "127.0.0.1:7000"}, {"endpoint": 7}, {"endpoint": "tcp://a:1", "timeout_s": 0}]
)
def test_arguments_that_do_not_fit_are_refused_by_name(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"env\.args\."):
        make(**arguments)  # type: ignore[arg-type]


def test_what_cannot_be_served_ends_the_command_with_the_reason(
    arithmetic: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-P", "-m", "asyncrl", "env-worker", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout

    assert isinstance(arithmetic, WorkerEnvironment)
    status, said = run("--env", "arithmetic", "--endpoint", arithmetic._endpoint)
    assert (status, "Address already in use" in said) == (1, True)
    status, said = run("--env", "aritmetic", "--endpoint", "tcp://127.0.0.1:9")
    assert (status, "Did you mean 'arithmetic'?" in said) == (EXIT_USAGE, True)
    bad = ["env-worker", "--env", "arithmetic", "--endpoint", "tcp://127.0.0.1:9", "--env.args", "{"]
    assert cli.main(bad) == EXIT_USAGE
    assert "--env.args {: not valid JSON" in capsys.readouterr().err


def test_worker_and_client_load_neither_torch_nor_transformers_nor_numpy() -> None:
    code = (
        "import sys, asyncrl.envs.worker, asyncrl.envs.worker_client, asyncrl.cli\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0


BARE = (
    "msgspec",
    "zmq",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_inspection",
    "typing_extensions.py",
)
"""What `pip install msgspec pyzmq pydantic` installs."""


def test_it_runs_in_a_python_that_has_nothing_but_asyncrl_and_three_packages(tmp_path: Path) -> None:
    import asyncrl

    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    [site] = (tmp_path / "bare").glob("lib/python*/site-packages")
    here = Path(zmq.__file__).parents[1]
    for name in (*BARE, *(path.name for path in here.glob("pyzmq.libs"))):
        (site / name).symlink_to(here / name)
    package = site / "asyncrl"
    package.mkdir()
    root = Path(asyncrl.__file__).parent
    for path in root.iterdir():
        (package / path.name).symlink_to(path)
    if not (package / "envs").exists():  # Installed from the repository, where the folder lies beside.
        (package / "envs").symlink_to(root.parent / "envs")
    arguments = ["--env", "asyncrl.envs.arithmetic:make"]
    with served(*arguments, python=str(tmp_path / "bare" / "bin" / "python")) as worker:
        assert make(worker.endpoint).task("train", 0) == make_arithmetic().task("train", 0)


async def test_a_silent_client_is_forgotten_with_its_episodes(folder: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    worker = Worker(make_arithmetic(), "arithmetic", endpoint, threads=1, silence_s=0.5)
    serving = asyncio.create_task(worker.run())
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.connect(endpoint)
    raw.send(worker_messages.encode(worker_messages.Call(1, 1, "reset", opens=True, task=Task("t", []))))
    await until(lambda: worker.open_episodes == 1)
    await until(lambda: not (worker.open_episodes or worker._seen or worker._running))
    raw.close(linger=0)
    worker.stop()
    await serving
