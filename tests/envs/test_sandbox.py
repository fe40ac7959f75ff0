"""Sandboxes: every escape is tried against every kind that works here, and `STOPS` says what comes of it."""

import asyncio
import glob
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.envs.base import ToolFault
from asyncrl.envs.sandbox.base import KINDS, STOPS, Kind, Limits, Result, Sandbox, open_sandbox

LOCAL = [kind for kind in KINDS if kind != "monty"]
ROOT = os.geteuid() == 0


def _open(kind: Kind, **limits: float) -> Sandbox:
    try:
        return open_sandbox(kind, Limits(**{"seconds": 20.0, "memory_mb": 256, **limits}))
    except ToolFault as fault:
        pytest.skip(str(fault))


async def _run(kind: Kind, code: str, stdin: str = "", **limits: float) -> Result:
    sandbox = _open(kind, **limits)
    try:
        return await sandbox.run(code, stdin)
    finally:
        await sandbox.close()


def _named(name: str) -> list[int]:
    """Processes, zombies too, that gave themselves this name."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == name:
                found.append(int(comm.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def _name_it(name: str) -> str:
    return f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n"


# ---- the table -----------------------------------------------------------------------------------


@dataclass
class Outside:
    """What code must not reach: a folder open to all, a server, and a process that stands for the trainer."""

    folder: Path
    port: int
    pid: int
    alive: Callable[[], bool]
    connections: Callable[[], int]


@pytest.fixture
def outside() -> Iterator[Outside]:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o777)
        Path(folder, "secret").write_text("the secret of the folder")
        server.setblocking(False)

        def connections() -> int:
            try:
                server.accept()[0].close()
            except BlockingIOError:
                return 0
            return 1

        trainer = subprocess.Popen(["sleep", "100"], env={"KEY": "the secret of the trainer"})
        try:
            yield Outside(
                Path(folder), server.getsockname()[1], trainer.pid, lambda: trainer.poll() is None, connections
            )
        finally:
            trainer.kill()
            trainer.wait()


async def reading_files_outside(kind: Kind, outside: Outside) -> bool:
    secret = await _run(kind, f"print(open({str(outside.folder / 'secret')!r}).read())")
    users = await _run(kind, "print(open('/etc/passwd').read())")
    return "the secret" not in secret.stdout and "root:" not in users.stdout


async def writing_files_outside(kind: Kind, outside: Outside) -> bool:
    await _run(kind, f"open({str(outside.folder / 'new')!r}, 'w').write('here')")
    return not (outside.folder / "new").exists()


async def network(kind: Kind, outside: Outside) -> bool:
    address = ("127.0.0.1", outside.port)
    await _run(kind, f"import socket\nsocket.create_connection({address}, timeout=5)")
    return outside.connections() == 0


async def fork_bomb(kind: Kind, outside: Outside) -> bool:
    name = f"fork{secrets.token_hex(4)}"
    bomb = "made = 0\ntry:\n while os.fork():\n  made += 1\n time.sleep(100)\nexcept OSError:\n print(made)"
    counted = await _run(kind, _name_it(name) + bomb, processes=6)
    real = await _run(kind, _name_it(name) + "while True:\n try: os.fork()\n except OSError: pass", seconds=1)
    return (counted.how == "error" or int(counted.stdout) <= 6) and real.how != "ok" and not _named(name)


async def memory_bomb(kind: Kind, outside: Outside) -> bool:
    return (await _run(kind, "kept = []\nwhile True:\n kept.append('x' * 10000000)")).how == "memory"


async def endless_loop(kind: Kind, outside: Outside) -> bool:
    started = time.monotonic()
    return (await _run(kind, "while True: pass", seconds=0.5)).how == "timeout" and time.monotonic() - started < 30


async def loop_in_threads_deaf_to_sigterm(kind: Kind, outside: Outside) -> bool:
    name = f"loop{secrets.token_hex(4)}"
    loops = (
        "import signal, threading\nfor number in range(1, 32):\n"
        " try: signal.signal(number, signal.SIG_IGN)\n except OSError: pass\n"
        "def loop():\n while True: pass\nthreading.Thread(target=loop).start()\nloop()"
    )
    result = await _run(kind, _name_it(name) + loops, seconds=1)
    return result.how != "ok" and not _named(name)


async def output_flood(kind: Kind, outside: Outside) -> bool:
    seconds = (
        1 if kind == "monty" else 20
    )  # What Monty's code prints beyond the limit is not heard, but it runs on.
    result = await _run(kind, "while True: print('x' * 1000)", output_bytes=5000, seconds=seconds)
    return result.how == "output" and result.stdout.startswith("xxx") and len(result.stdout) == 5000


async def killing_the_trainer(kind: Kind, outside: Outside) -> bool:
    attack = f"""
import os
for pid in (os.getppid(), {os.getpid()}, {outside.pid}, -1):
    try: os.kill(pid, 9)
    except OSError as error: print(error)
"""
    await _run(kind, attack)
    return outside.alive()


async def environment_of_the_trainer(kind: Kind, outside: Outside) -> bool:
    attack = f"""
import os
for pid in (os.getppid(), {outside.pid}):
    try: print(open(f'/proc/{{pid}}/environ').read())
    except OSError as error: print(error)
"""
    return "the secret" not in (await _run(kind, attack)).stdout


async def leaving_a_process_behind(kind: Kind, outside: Outside) -> bool:
    name = f"left{secrets.token_hex(4)}"
    # Away from its parent, its session and its standard streams, and deaf to the death of its parent.
    daemon = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        for number in range(3): os.close(number)
        while True: time.sleep(1)
    os._exit(0)
time.sleep(0.2)
print('started')
"""
    result = await _run(kind, _name_it(name) + daemon)
    return (kind == "monty" or "started" in result.stdout) and not _named(name)


ATTACKS: dict[str, Callable] = {
    attack.__name__: attack
    for attack in (
        reading_files_outside, writing_files_outside, network, fork_bomb, memory_bomb, endless_loop,
        loop_in_threads_deaf_to_sigterm, output_flood, killing_the_trainer, environment_of_the_trainer,
        leaving_a_process_behind,
    )
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", STOPS)
async def test_a_sandbox_stops_exactly_what_the_table_says(what: str, kind: Kind, outside: Outside) -> None:
    says = STOPS[what][kind]
    if says == "as root" and not ROOT:
        pytest.skip("without root this would be an attack on the user who runs the tests")
    attack = ATTACKS[what.lower().replace(" ", "_").replace(",", "")]
    assert await attack(kind, outside) is (says != "no")


def test_the_table_has_every_kind_and_every_attack() -> None:
    assert all(set(row) == set(KINDS) for row in STOPS.values())
    assert len(STOPS) == len(ATTACKS)


# ---- what code sees ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_printed_comes_first_and_the_last_expression_after_it(kind: Kind) -> None:
    result = await _run(kind, "x = 20\nprint('é')\nx + 1")
    assert (result.stdout, result.stderr, result.how) == ("é\n21\n", "", "ok")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["1 / 0", "def f(:", "\0"])
async def test_an_error_of_the_code_is_text_that_speaks_of_the_code_alone(kind: Kind, code: str) -> None:
    result = await _run(kind, code)
    assert result.how == "error"
    assert "Error: " in result.stderr
    assert "inside.py" not in result.stderr


@pytest.mark.parametrize("kind", LOCAL)
async def test_the_code_has_its_stdin_its_own_folder_and_an_empty_environment(kind: Kind) -> None:
    code = "import os, sys; print([sys.stdin.read(), os.listdir(), sorted(set(os.environ) - {'LC_CTYPE', 'PWD'})])"
    assert (await _run(kind, code, "given")).stdout == "['given', ['main.py'], []]\n"


@pytest.mark.parametrize("kind", LOCAL)
async def test_a_crash_is_no_fault_of_the_sandbox(kind: Kind) -> None:
    assert (await _run(kind, "import os; os.abort()")).how == "killed"
    assert (await _run(kind, "import os; os._exit(70)")).how == "error"


@pytest.mark.parametrize("kind", LOCAL)
async def test_a_file_is_limited_and_the_working_directory_is_removed(kind: Kind) -> None:
    result = await _run(kind, "import os\nprint(os.getcwd())\nopen('big', 'wb').write(b'x' * 3000000)", file_mb=1)
    assert "OSError" in result.stderr
    assert result.stdout.strip() == "/tmp" or result.stdout.strip() not in glob.glob(f"{tempfile.gettempdir()}/*")


async def test_code_in_namespaces_gets_no_user_namespace_of_its_own() -> None:
    code = "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))"
    assert (await _run("namespaces", code)).stdout == "-1\n"


@pytest.mark.parametrize("kind", LOCAL)
async def test_calls_that_overlap_are_separate(kind: Kind) -> None:
    sandbox = _open(kind)
    code = "import os, sys\nprint(os.listdir())\nopen('mine', 'w').close()\nprint(sys.stdin.read())"
    results = await asyncio.gather(*(sandbox.run(code, str(number)) for number in range(4)))
    assert [result.stdout for result in results] == [f"['main.py']\n{number}\n" for number in range(4)]


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOCAL)
async def test_a_cancelled_call_leaves_no_process_and_the_sandbox_goes_on(kind: Kind) -> None:
    name = f"stop{secrets.token_hex(4)}"
    sandbox = _open(kind, processes=100_000)  # Without root, all processes of the user count in `process`.
    call = asyncio.create_task(sandbox.run(_name_it(name) + "os.fork()\ntime.sleep(100)"))
    while len(_named(name)) < 2:
        assert not call.done(), call.result()
        await asyncio.sleep(0.02)
    (running,) = sandbox._calls  # type: ignore[attr-defined]
    while not call.done():
        call.cancel()  # Also while it is being ended: its time limit may be followed by a revoked lease.
        await asyncio.sleep(0.001)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert running._process.returncode is not None
    assert not sandbox._calls  # type: ignore[attr-defined]
    assert not _named(name)
    assert (await sandbox.run("1")).stdout == "1\n"


TRAINER = """
import asyncio, sys
from asyncrl.envs.sandbox.base import open_sandbox
asyncio.run(open_sandbox(sys.argv[1]).run(sys.argv[2]))
"""


@pytest.mark.parametrize("kind", LOCAL)
def test_a_call_dies_with_the_trainer(kind: Kind) -> None:
    _open(kind)
    name = f"dies{secrets.token_hex(4)}"
    trainer = subprocess.Popen([sys.executable, "-P", "-c", TRAINER, kind, _name_it(name) + "time.sleep(100)"])
    try:
        _wait_until(lambda: bool(_named(name)))
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    _wait_until(lambda: not _named(name))


def _wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


async def test_monty_goes_on_after_a_cancelled_call() -> None:
    sandbox = _open("monty", seconds=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sandbox.run("while True: pass"), 0.3)
    assert (await sandbox.run("6 * 7")).stdout == "42\n"
    await sandbox.close()


# ---- what cannot be had --------------------------------------------------------------------------


def test_an_unknown_kind_and_a_senseless_limit_are_refused() -> None:
    with pytest.raises(ValueError, match="no sandbox 'docker'; there are 'auto', 'namespaces', 'bwrap'"):
        open_sandbox("docker")
    with pytest.raises(ValueError, match="memory_mb = 0 of a sandbox"):
        Limits(memory_mb=0)
    with pytest.raises(ValueError, match="seconds = inf of a sandbox"):
        Limits(seconds=float("inf"))


def test_a_kind_that_is_not_installed_is_refused_with_what_to_install() -> None:
    code = """
import json, sys
from asyncrl.envs.base import ToolFault
from asyncrl.envs.sandbox.base import open_sandbox
sys.modules["pydantic_monty"] = None
told = []
for kind in ("bwrap", "monty"):
    try: open_sandbox(kind)
    except ToolFault as fault: told.append(str(fault))
print(json.dumps(told))
"""
    command, environment = [sys.executable, "-P", "-c", code], {**os.environ, "PATH": ""}
    answer = subprocess.run(command, env=environment, capture_output=True)
    bwrap, monty = json.loads(answer.stdout)
    assert "apt-get install bubblewrap" in bwrap
    assert "pip install 'asyncrl[monty]'" in monty


async def test_auto_takes_one_that_works() -> None:
    assert (await open_sandbox().run("print(1)")).stdout == "1\n"
