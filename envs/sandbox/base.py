"""Sandboxes: what all backends have in common, what each of them stops, and how one is opened.

A sandbox runs one piece of Python code at a time per call, in a fresh interpreter, within limits; nothing of it
survives the call. `STOPS` says honestly what each backend keeps the code from, and `tests/envs/test_sandbox.py`
tries every cell of it. Called by `asyncrl.envs.python_tool`; the backends are `asyncrl.envs.sandbox.local` (three
kinds) and `asyncrl.envs.sandbox.monty`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol

Kind = Literal["process", "namespaces", "bwrap", "monty"]
KINDS: tuple[Kind, ...] = ("namespaces", "bwrap", "process", "monty")
"""All kinds. `auto` takes the first of `AUTO` that works here."""
AUTO: tuple[Kind, ...] = ("namespaces", "bwrap", "process")
"""From the strongest to the weakest. `namespaces` also refuses the code user namespaces of its own, which `bwrap`
does not as root, and is faster; `monty` is not among them, for it runs only a part of Python."""

How = Literal["ok", "error", "timeout", "memory", "output", "killed"]

STOPS: dict[str, dict[Kind, str]] = {
    "reading files outside": {"process": "no", "namespaces": "yes", "bwrap": "yes", "monty": "yes"},
    "writing files outside": {"process": "no", "namespaces": "yes", "bwrap": "yes", "monty": "yes"},
    "network": {"process": "no", "namespaces": "yes", "bwrap": "yes", "monty": "yes"},
    "fork bomb": {"process": "yes", "namespaces": "yes", "bwrap": "yes", "monty": "yes"},
    "memory bomb": {"process": "yes", "namespaces": "yes", "bwrap": "yes", "monty": "yes"},
    "endless loop": {"process": "yes", "namespaces": "yes", "bwrap": "yes", "monty": "yes"},
    "loop in threads, deaf to SIGTERM": {"process": "yes", "namespaces": "yes", "bwrap": "yes", "monty": "yes"},
    "output flood": {"process": "yes", "namespaces": "yes", "bwrap": "yes", "monty": "yes"},
    "killing the trainer": {"process": "as root", "namespaces": "yes", "bwrap": "yes", "monty": "yes"},
    "environment of the trainer": {"process": "as root", "namespaces": "yes", "bwrap": "yes", "monty": "yes"},
    "leaving a process behind": {"process": "as root", "namespaces": "yes", "bwrap": "yes", "monty": "yes"},
}  # fmt: skip
"""What a backend keeps code from that tries: `yes`, `no`, or `as root`: only where the trainer runs as root, for
then each call has a user of its own. `process` does keep code from files that not everybody may read or write."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may use. All are enforced by the kernel or from outside, never by the code's good will."""

    seconds: float = 5.0
    """Of wall time, the start included."""
    memory_mb: int = 512
    """Of address space, for each of the call's processes (`monty`: of the interpreter's heap)."""
    output_bytes: int = 100_000
    """Of stdout and of stderr, each; what comes within them is kept."""
    processes: int = 8
    """Processes and threads at a time."""
    file_mb: int = 16
    """Of each file, and, but for `process`, of all files together, which are kept in memory."""

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "output_bytes", "processes", "file_mb"):
            value = getattr(self, name)
            whole = name != "seconds"
            if (
                isinstance(value, bool)
                or not isinstance(value, int if whole else int | float)
                or not 0 < value < inf
            ):
                kind = "whole number" if whole else "number"
                raise ValueError(f"limit {name} = {value!r} of a sandbox: must be a {kind} above 0")


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one call."""

    stdout: str
    stderr: str
    how: How
    """`ok`; `error`: the code raised, or exited with a status other than 0; `timeout`, `memory` and `output`: it
    ran into that limit; `killed`: a signal ended it, for example a crash."""
    seconds: float
    """Wall time of the call."""


class Sandbox(Protocol):
    """Runs code. Calls may overlap, and each is separate from all others."""

    async def run(self, code: str, stdin: str = "") -> Result:
        """Runs the code in a fresh interpreter; a last line that is an expression is printed, unless it is None.

        Raises:
            ToolFault: the sandbox itself cannot run; whatever the code does is a `Result`.
        """

    async def close(self) -> None:
        """Ends what still runs."""


def open_sandbox(kind: Kind | Literal["auto"] = "auto", limits: Limits | None = None) -> Sandbox:
    """A sandbox of that kind, tried out (once per process): an unavailable one is refused here, not at a call.

    Raises:
        ToolFault: it does not run here; the text says why, and what to install or allow.
        ValueError: there is no such kind.
    """
    from asyncrl.envs.sandbox.local import open_local, strongest
    from asyncrl.envs.sandbox.monty import open_monty

    limits = limits or Limits()
    if kind == "monty":
        return open_monty(limits)
    if kind == "auto":
        return open_local(strongest(AUTO), limits)
    if kind not in KINDS:
        raise ValueError(f"there is no sandbox {kind!r}; there are 'auto', {', '.join(map(repr, KINDS))}")
    return open_local(kind, limits)
