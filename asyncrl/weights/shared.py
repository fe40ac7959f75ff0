"""Memory that several processes of one user on one machine can map, without a name that could be left behind.

A Linux *memfd*: it is in no folder, is not limited by the size of /dev/shm, and the kernel frees it with its last
descriptor or mapping, however its users end. Other processes reach it through the descriptor of the process that
made it, `/proc/<pid>/fd/<n>`, which the kernel opens for processes of the same user only.

It knows neither tensors' names nor versions. Called by `asyncrl.weights.buckets` (which allocates), by the
receiver's `Inbox` (which keeps mappings) and by engines' worker processes (which attach).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "asyncrl-weights"
_ADDRESS = re.compile(r"/proc/([0-9]+)/fd/[0-9]+")


class SharedBuffer:
    """`nbytes` of shared memory, zeroed, as the uint8 tensor `tensor`.

    `address` works for `attach` as long as this object lives; views of `tensor` keep the memory itself alive.
    Where there is no memfd (other systems than Linux) the memory is private and the address empty.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.address = ""
        length = max(1, nbytes)  # A mapping cannot be empty.
        if not hasattr(os, "memfd_create"):
            memory = mmap.mmap(-1, length)
        else:
            fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, fd)
            # Taking all pages now makes lack of memory an error here, not a killed process at the first write.
            os.posix_fallocate(fd, 0, length)
            # Who maps it can rely on its size.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = mmap.mmap(fd, length)
            self.address = f"/proc/{os.getpid()}/fd/{fd}"
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
        if torch.cuda.is_initialized():
            self._pin(length)

    def _pin(self, length: int) -> None:
        """Page-locks the memory for copies from and to a GPU. Has not been run: no GPU was at hand."""
        cudart: Any = torch.cuda.cudart()
        pointer = self.tensor.data_ptr()
        torch.cuda.check_error(cudart.cudaHostRegister(pointer, length, 0))
        weakref.finalize(self, cudart.cudaHostUnregister, pointer)


def attach(address: str, nbytes: int) -> torch.Tensor:
    """Maps the first `nbytes` of another process's buffer as a uint8 tensor.

    What its owner writes shows; what is written here stays here. The memory lives as long as the tensor.

    Raises:
        ValueError: this is no address of a buffer, or the buffer is smaller.
        FileNotFoundError: its owner has freed it, has ended, or runs on another machine or in another container.
        PermissionError: its owner runs as another user.
    """
    with _opened(address, nbytes) as fd:
        return _map(fd, nbytes)


class Mappings:
    """Buffers of one other process, mapped once: page faults of a new mapping take nearly as long as the copying.

    They hold the memory of a process that has ended until `clear`, or until a buffer of another process is mapped.
    """

    def __init__(self) -> None:
        self._owner = ""
        self._kept: dict[str, tuple[int, torch.Tensor]] = {}

    def attach(self, address: str, nbytes: int) -> torch.Tensor:
        """As the function `attach`, but maps only what is not mapped yet. What it returns is to be read only.

        Raises:
            OSError, ValueError: as `attach`; also when a buffer that is mapped here was freed by its owner.
        """
        with _opened(address, nbytes) as fd:
            if (owner := address.split("/")[2]) != self._owner:
                self.clear()
                self._owner = owner
            # A descriptor's number is used again; an inode's is not.
            inode = os.fstat(fd).st_ino
            kept = self._kept.get(address)
            if kept is None or kept[0] != inode or kept[1].numel() != nbytes:
                kept = self._kept[address] = (inode, _map(fd, nbytes))
        return kept[1]

    def clear(self) -> None:
        """Forgets all; memory that nobody else holds is freed."""
        self._kept.clear()


def _map(fd: int, nbytes: int) -> torch.Tensor:
    # A private mapping: a stray write here cannot damage the owner's weights.
    memory = mmap.mmap(fd, max(1, nbytes), access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


@contextmanager
def _opened(address: str, nbytes: int) -> Iterator[int]:
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"{address!r} is no address of shared weights; they look like /proc/<pid>/fd/<number>")
    try:
        fd = os.open(address, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, ProcessLookupError):
        raise FileNotFoundError(
            f"shared weights {address} are gone: process {match[1]} has ended or freed them, or it is on another "
            "machine or in another container; with weights.backend = 'gloo' that does not matter"
        ) from None
    except PermissionError:
        raise PermissionError(
            f"shared weights {address} belong to process {match[1]} of another user; run both as one user"
        ) from None
    try:
        _check(fd, address, nbytes)
        yield fd
    finally:
        os.close(fd)


def _check(fd: int, address: str, nbytes: int) -> None:
    """Process ids are used again, so what was opened may be anything."""
    target = os.readlink(f"/proc/self/fd/{fd}")
    if not target.startswith(f"/memfd:{NAME}") or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError(f"{address} is {target!r}, which are no shared weights")
    if (size := os.fstat(fd).st_size) < nbytes:
        raise ValueError(f"shared weights {address} have {size} bytes, expected {nbytes}")
