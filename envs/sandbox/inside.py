"""The last step into a sandbox: gives privileges up, sets the limits, and runs the code, all in its own process.

A script that uses the standard library alone, because the interpreter need not be the trainer's: `launcher.py`
takes this step in a process that it forked, and bubblewrap starts this file itself. Sources: prctl(2),
capabilities(7), getrlimit(2).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

OK, ERROR, KILLED, CPU_TIME, FAULT = 0, 1, 2, 3, 70
"""How the launcher exits; `local.py` reads it."""

Spec = dict[str, str]
"""The launcher's arguments, `NAME=VALUE`."""

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
LINUX_CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def system(what: str, *arguments: object) -> None:
    """Calls a function of the C library; OSError if it fails."""
    given = [
        a.encode() if isinstance(a, str) else ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments
    ]
    if getattr(libc, what)(*given) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}{arguments}: {os.strerror(code)}")


def run_code(spec: Spec, ready: int) -> None:
    """Gives everything up that can be given up, says so, and runs the code. Does not return."""
    source = read_exactly(int(spec["code"]))
    confine(spec)
    os.write(ready, b"1")
    os.close(ready)
    execute(source)
    sys.exit(OK)


def read_exactly(size: int) -> bytes:
    """That much of stdin, and not a byte more."""
    parts = []
    while size and (part := os.read(0, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def take_user(uid: int) -> None:
    """Becomes that user, with the group of the same number, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def confine(spec: Spec) -> None:
    """No privileges, none to be had, and the limits."""
    uid = int(spec["uid"])
    if uid:
        take_user(uid)
    system("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # A change of user forgets it.
    system("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    system("capset", header, (ctypes.c_uint32 * 6)())
    mebibyte = 1 << 20
    # In a user namespace the sandbox's own two processes count as well.
    processes = int(spec["processes"]) + (0 if uid else 2)
    cpu = int(float(spec["seconds"])) + 2
    for what, most in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, int(spec["memory_mb"]) * mebibyte),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, int(spec["file_mb"]) * mebibyte),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def execute(source: bytes) -> None:
    """Runs the code as `main.py`; a last line that is an expression is shown as an interactive Python shows it."""
    import _ast
    import types

    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # What was printed before a kill is kept.
    sys.path.insert(0, os.getcwd())
    try:
        with open("main.py", "wb") as file:  # Where tracebacks look for the lines that they show.
            file.write(source)
        parse_only: int = _ast.PyCF_ONLY_AST
        tree = compile(source, "main.py", "exec", parse_only)
        last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], _ast.Expr) else []
        exec(compile(tree, "main.py", "exec"), module.__dict__)
        exec(compile(_ast.Interactive(last), "main.py", "single"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        # This function's own frame comes first, and is none of the reader's business.
        shown = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        sys.excepthook(type(shown), shown, shown.__traceback__)
        sys.exit(ERROR)


if __name__ == "__main__":
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    run_code(arguments, int(arguments["ready"]))
