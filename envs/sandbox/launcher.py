"""The script that every local sandbox starts: it prepares the place, watches over the code, and cleans up.

It is run as `python -I -S launcher.py NAME=VALUE...` with an empty environment, by `asyncrl.envs.sandbox.local`
only. It uses the standard library alone, because the interpreter need not be the trainer's. The code to run is the
first `code` bytes of stdin; what follows them is the code's own stdin.

    supervisor ──▶ (namespaces: process 1 of a new pid namespace | bwrap: bwrap and its process 1) ──▶ the code

The supervisor is outside of what the code can reach (in `process`: only if it runs as root). It ends when the code
does, when it is told to with SIGTERM, or when the trainer dies, and before that it kills and awaits every process
that is left. Sources: prctl(2), pid_namespaces(7), kill(2), proc(5).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from inside import (  # type: ignore[import-not-found]
    CPU_TIME,
    ERROR,
    FAULT,
    KILLED,
    OK,
    PR_SET_PDEATHSIG,
    Spec,
    run_code,
    system,
    take_user,
)
from jail import bwrap_arguments, private_root, unshare  # type: ignore[import-not-found]

del sys.path[0]

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def supervise(spec: Spec) -> int:
    """Starts the code, waits for its end or for SIGTERM, leaves nothing behind, and returns how to exit."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    system("prctl", PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(spec["parent"]):
        return FAULT
    system("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    place = working_directory(spec) if spec["kind"] == "process" else None
    if spec["kind"] == "namespaces":
        unshare()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        become(spec, writing)
    os.close(writing)
    while True:
        told = signal.sigwait({signal.SIGTERM, signal.SIGCHLD})
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or told == signal.SIGTERM:
            break
    kill_all(spec, 0 if ended else child)
    if place:
        os.waitpid(os.posix_spawn("/bin/rm", ["rm", "-rf", "--", place], {}), 0)
    if not ended:
        return KILLED
    return verdict(status, spec["kind"]) if os.read(reading, 1) else FAULT


def working_directory(spec: Spec) -> str:
    """Makes the call's own directory and goes there."""
    path = os.path.join(spec["temporary"], f"asyncrl-sandbox-{os.getpid()}-{os.urandom(6).hex()}")
    os.mkdir(path, 0o700)
    if int(spec["uid"]):
        os.chown(path, int(spec["uid"]), int(spec["uid"]))
    os.chdir(path)
    return path


def become(spec: Spec, ready: int) -> None:
    """In the supervisor's child: takes the steps that lead to the code. Does not return."""
    system("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    if spec["kind"] != "bwrap":
        os.setsid()
    if spec["kind"] == "namespaces":
        private_root(int(spec["file_mb"]))
        first_process(ready)
    if spec["kind"] == "bwrap":
        os.set_inheritable(ready, True)
        os.execv(spec["bwrap"], bwrap_arguments(spec, ready))
    run_code(spec, ready)


def kill_all(spec: Spec, child: int) -> None:
    """Kills what is left and awaits it: `child`, if it is not 0, and whoever lost its parent."""
    uid = int(spec["uid"])
    if child:
        os.kill(child, signal.SIGKILL)
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        if spec["kind"] == "process" and uid:
            kill_user(uid)
        elif spec["kind"] == "process":
            with open("/proc/thread-self/children") as children:
                for pid in children.read().split():
                    os.kill(int(pid), signal.SIGKILL)
        os.wait()


def kill_user(uid: int) -> None:
    """Kills all processes of a user that no other call has; at once, so that none of them forks on."""
    killer = os.fork()
    if killer:
        os.waitpid(killer, 0)
        return
    take_user(uid)
    with contextlib.suppress(ProcessLookupError):  # They have just ended.
        os.kill(-1, signal.SIGKILL)
    os._exit(0)


def verdict(status: int, kind: str) -> int:
    """How the code ended, from the status of the process that ran it, or that passes on how it ended."""
    if os.WIFSIGNALED(status):
        return CPU_TIME if os.WTERMSIG(status) == signal.SIGXCPU else KILLED
    code = os.WEXITSTATUS(status)
    if kind == "namespaces":
        return code
    if kind == "bwrap" and code > 128:  # Its word for a signal.
        return CPU_TIME if code - 128 == signal.SIGXCPU else KILLED
    return OK if code == 0 else ERROR


def first_process(ready: int) -> None:
    """Becomes the pid namespace's process 1, out of the code's reach; only its child returns, to run the code."""
    system("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    child = os.fork()
    if child == 0:
        return
    os.close(ready)
    while True:
        ended, status = os.wait()
        if ended == child:
            os._exit(verdict(status, "process"))  # With it, everything in the namespace is killed.


def main() -> int:
    """Watches over the code, or, in a child, runs it and does not return."""
    try:
        return supervise(dict(argument.split("=", 1) for argument in sys.argv[1:]))
    except Exception as error:  # Nothing of it is the code's, whose own errors are reported where it runs.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return FAULT


if __name__ == "__main__":
    sys.exit(main())
