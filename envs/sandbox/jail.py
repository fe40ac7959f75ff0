"""A root and namespaces of its own for the code: no network, no other processes, no files but Python's own.

Used by `launcher.py` only, with the standard library alone. As root the namespaces need no user namespace, and the
code becomes a user of its own in them; another user needs one, which some systems forbid. Sources: namespaces(7),
user_namespaces(7), mount_namespaces(7), pivot_root(2), and bwrap(1) for the options of bubblewrap.
"""

from __future__ import annotations

import os
import sys
from pathlib import PurePath

from inside import Spec, system  # type: ignore[import-not-found]  # Its folder is on the path while `launcher.py` imports.

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

INSIDE_USER = 1000
"""The user id that the code sees where it runs in a user namespace."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


def unshare() -> None:
    """New namespaces for the children to come; without root, in a user namespace, where that is allowed."""
    flags = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    system("unshare", flags if user == 0 else flags | CLONE_NEWUSER)
    if user == 0:
        return
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE_USER} {user} 1"),
        ("gid_map", f"{INSIDE_USER} {group} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as mapping:
            mapping.write(text)


def private_root(file_mb: int) -> None:
    """A root of its own: read-only Python and system libraries, three devices, and a small /tmp in memory."""
    top, jail = "/proc", "/proc/jail"  # What is bound is never below /proc, so covering it hides nothing needed.
    system("unshare", CLONE_NEWNS)
    system("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    system("mount", "tmpfs", top, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.makedirs(jail + "/tmp")
    system(
        "mount", "tmpfs", jail + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={file_mb}m,nr_inodes=4k,mode=1777"
    )
    for path in system_paths():
        bind(path, jail + path)
    for path, target in system_links():
        os.symlink(target, jail + path)
    system("mount", None, top, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None)
    os.chdir(top)
    system("syscall", SYS_PIVOT_ROOT[os.uname().machine], ".", ".")
    system("umount2", ".", MNT_DETACH)  # The old root lies over the new one at this place.
    # A process whose root is not that of its mount namespace is refused new user namespaces, and with them
    # the capabilities that it would have in those.
    os.chroot("/jail")
    os.chdir("/tmp")


def system_paths() -> list[str]:
    """What the interpreter needs in a private root: its library, itself, the system's libraries, devices."""
    executable = os.path.realpath(sys.executable)
    prefix = os.path.realpath(sys.base_prefix)
    wanted = [
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        "/etc/ld.so.cache",
        prefix + "/lib",
        executable,
        *DEVICES,
    ]
    return [path for path in dict.fromkeys(wanted) if os.path.exists(path) and not os.path.islink(path)]


def system_links() -> list[tuple[str, str]]:
    """Links to system libraries, with where they lead."""
    return [(path, os.readlink(path)) for path in ("/lib", "/lib64", "/usr/lib64") if os.path.islink(path)]


def bind(source: str, target: str) -> None:
    """Shows `source` at `target`, read-only unless it is a device."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT))
    system("mount", source, target, None, MS_BIND | MS_REC, None)
    if source not in DEVICES:
        system("mount", None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None)


def bwrap_arguments(spec: Spec, ready: int) -> list[str]:
    """The command line that runs `inside.py` in bubblewrap's root and namespaces."""
    command = [spec["bwrap"], "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    # Root gives its capabilities up inside, with its user id; another user has them in a user namespace only.
    command += ["--cap-add", "ALL"] if int(spec["uid"]) else ["--unshare-user", "--disable-userns"]
    command += ["--die-with-parent", "--new-session"]
    command += ["--perms", "1777", "--size", str(int(spec["file_mb"]) << 20), "--tmpfs", "/tmp"]
    parents = [str(parent) for path in system_paths() for parent in reversed(PurePath(path).parents)]
    for parent in dict.fromkeys(parents):
        command += ["--perms", "0755", "--dir", parent]  # Else only root may pass through it.
    for path in system_paths():
        command += ["--dev-bind" if path in DEVICES else "--ro-bind", path, path]
    for path, target in system_links():
        command += ["--symlink", target, path]
    command += ["--ro-bind", os.path.join(os.path.dirname(os.path.abspath(__file__)), "inside.py"), "/inside.py"]
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    command += [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", "/inside.py"]
    return command + [f"{name}={value}" for name, value in {**spec, "ready": ready}.items()]
