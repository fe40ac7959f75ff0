"""What every process of a run does at its start: its death is tied to its parent, its cores are pinned.

Also the lock that makes a hub the only one of its run, and the exit codes that the supervisor reads. No torch, no
sockets. Called by `asyncrl.cli`, the hub, the generators and the learner ranks.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

EXIT_USAGE = 2
"""Bad input or a refused peer: restarting would not help."""
EXIT_STOP_RUN = 3
"""The run must stop (a step that is not finite, an unwritable journal): restarting would not help."""
EXIT_STALLED = 4
"""What the process waited for did not come within its limit (`asyncrl.watchdog`): it is started again."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Asks Linux to kill this process when its parent dies, so that no orphan stays behind.

    Elsewhere it does nothing: there a killed supervisor leaves its children to be ended by hand.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call above; then nothing would ever be delivered.
    if os.getppid() != parent:
        raise SystemExit(f"parent process {parent} is gone")


def pin(cores: list[int]) -> None:
    """Restricts this process to the given CPU cores; an empty list leaves it alone.

    Raises:
        ValueError: a core does not exist here.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    available = os.sched_getaffinity(0)
    missing = set(cores) - available
    if missing:
        raise ValueError(f"cores {sorted(missing)} do not exist here; available are {sorted(available)}")
    os.sched_setaffinity(0, cores)


def hold_run(run_dir: Path) -> TextIO:
    """Makes sure that this is the run's only hub; the kernel lets go of the lock when the process ends.

    Raises:
        UsageError: another hub has it, or the folder cannot be written.
    """
    from asyncrl.settings import UsageError  # Imports pydantic, which `asyncrl --help` must not wait for.

    try:
        lock = (run_dir / "hub.lock").open("w")
    except OSError as error:
        raise UsageError(f"{run_dir} cannot be written: {error}; check its owner, permissions and disk") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UsageError(f"{run_dir} is being run by another hub; stop that one first") from None
    return lock
