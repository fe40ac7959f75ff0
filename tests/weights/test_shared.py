"""Shared buffers between real processes: seen by both, refused when they are something else, gone at the end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from asyncrl.weights.shared import NAME, Mappings, SharedBuffer, attach

CHILD = """
import sys
from asyncrl.weights.shared import attach
tensor = attach(sys.argv[1], int(sys.argv[2]))
print(int(tensor.sum()))
tensor.zero_()
"""

OWNER = """
import sys
from asyncrl.weights.shared import SharedBuffer
buffer = SharedBuffer(int(sys.argv[1]))
buffer.tensor.fill_(1)
print(buffer.address, flush=True)
sys.stdin.read()
"""


def _held() -> int:
    """Descriptors and mappings of shared buffers that this process holds."""
    descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _alive(fd)]
    with open("/proc/self/maps") as maps:
        return sum(NAME in text for text in [*descriptors, *maps])


def _alive(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_another_process_reads_the_bytes_and_cannot_change_them() -> None:
    buffer = SharedBuffer(1000)
    buffer.tensor.copy_(torch.arange(1000) % 251)
    total = int(buffer.tensor.sum())
    command = [sys.executable, "-P", "-W", "error", "-c", CHILD, buffer.address, "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{total}\n", "")
    assert int(buffer.tensor.sum()) == total


def test_a_mapping_is_kept_while_its_address_is_the_same_buffer() -> None:
    mappings, before = Mappings(), _held()
    buffer = SharedBuffer(5000)
    buffer.tensor.copy_(torch.arange(5000) % 253)
    mapped = mappings.attach(buffer.address, 4000)
    assert torch.equal(mapped, buffer.tensor[:4000])
    buffer.tensor[7] = 99
    assert mappings.attach(buffer.address, 4000) is mapped
    assert mapped[7] == 99
    with pytest.raises(ValueError, match="have 5000 bytes, expected 5001"):
        mappings.attach(buffer.address, 5001)
    address = buffer.address
    del buffer
    with pytest.raises(FileNotFoundError, match="has ended or freed them"):
        mappings.attach(address, 4000)
    other = SharedBuffer(5000)
    assert other.address == address, "the number of the descriptor was to be used again"
    other.tensor.fill_(3)
    assert int(mappings.attach(address, 4000).sum()) == 12000
    mappings.clear()
    del mapped, other
    assert _held() == before


def test_mappings_of_another_process_replace_those_of_one_that_has_ended() -> None:
    mappings, held = Mappings(), []
    for size in (1000, 2000):
        owner = subprocess.Popen([sys.executable, "-P", "-c", OWNER, str(size)], stdin=-1, stdout=-1, text=True)
        assert owner.stdout is not None
        assert int(mappings.attach(owner.stdout.readline().strip(), size).sum()) == size
        owner.communicate("")
        held.append(_held())
    assert held[0] == held[1], "more than the newest process's buffer is held"


def test_what_the_owner_writes_later_shows() -> None:
    buffer = SharedBuffer(64)
    mapped = attach(buffer.address, 32)
    assert mapped.shape == (32,)
    buffer.tensor[5] = 77
    assert mapped[5] == 77


def test_memory_lives_as_long_as_a_view_of_it_and_leaves_nothing() -> None:
    before, names = _held(), os.listdir("/dev/shm")
    buffer = SharedBuffer(4096)
    view = buffer.tensor[10:20].view(torch.int16)
    mapped = attach(buffer.address, 4096)
    assert os.listdir("/dev/shm") == names
    address = buffer.address
    del buffer
    with pytest.raises(FileNotFoundError, match=f"process {os.getpid()} has ended or freed them"):
        attach(address, 4096)
    view.fill_(3)
    assert int(mapped[10:20].view(torch.int16).sum()) == 15
    del view, mapped
    assert _held() == before


def test_a_buffer_may_be_empty() -> None:
    buffer = SharedBuffer(0)
    assert buffer.tensor.shape == attach(buffer.address, 0).shape == (0,)


@pytest.mark.parametrize("address", ["", "/etc/passwd", "/proc/self/fd/1", "/proc/1/fd/1/../../../../etc/passwd"])
def test_only_descriptors_of_processes_are_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="is no address of shared weights"):
        attach(address, 1)


def test_other_files_and_smaller_buffers_are_refused(tmp_path) -> None:
    refused = pytest.raises(ValueError, match="which are no shared weights")
    with (tmp_path / "file").open("w+") as file, refused:
        attach(f"/proc/{os.getpid()}/fd/{file.fileno()}", 1)
    resizable = os.memfd_create(NAME)
    with pytest.raises(ValueError, match="which are no shared weights"):
        attach(f"/proc/{os.getpid()}/fd/{resizable}", 1)
    os.close(resizable)
    small = SharedBuffer(8)
    with pytest.raises(ValueError, match="have 8 bytes, expected 9"):
        attach(small.address, 9)


def test_a_buffer_cannot_shrink_under_who_has_mapped_it() -> None:
    buffer = SharedBuffer(4096)
    with pytest.raises(PermissionError):
        os.truncate(buffer.address, 0)
