"""A checkpoint's manifest: which files it has, of what size and checksum, and how well its batches were rewarded.

    step_000020/manifest.json   {"manifest": {"step", "reward", "files": {name: {"size", "sha256"}}}, "sha256"}

It is written after all other files of the folder. A file that is missing, cut short or changed in a single bit is
found before anything of it is loaded, and so is damage of the manifest itself. SHA-256 is the fastest checksum of
the standard library where the processor knows it; files are read side by side. Nothing here knows what the files
hold. Called by `asyncrl.learner.checkpoint`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

NAME = "manifest.json"
READERS = 4
"""Files that are read at once; hashing lets go of the interpreter's lock."""


class Damaged(Exception):
    """A checkpoint's folder is not what was written; the text says where."""


class Part(msgspec.Struct, frozen=True):
    """One file."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a complete checkpoint holds."""

    step: int
    reward: float | None
    """Mean reward of the batches since the checkpoint before; None: there was none."""
    files: dict[str, Part]


class _Signed(msgspec.Struct):
    manifest: msgspec.Raw
    sha256: str


def write(folder: Path, step: int, reward: float | None) -> None:
    """Describes all files of `folder`, durably, its list of names included.

    Raises:
        OSError: a file cannot be read, or the manifest not be written.
    """
    paths = sorted(path for path in folder.iterdir() if path.name != NAME)
    sums = _sums(paths)
    files = {path.name: Part(path.stat().st_size, sums[path]) for path in paths}
    held = msgspec.json.encode(Manifest(step, reward, files))
    with (folder / NAME).open("wb") as file:
        file.write(msgspec.json.encode(_Signed(msgspec.Raw(held), hashlib.sha256(held).hexdigest())))
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def read(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint, whose other files are not looked at.

    Raises:
        Damaged: it is not there, or not what was written.
    """
    try:
        signed = msgspec.json.decode((folder / NAME).read_bytes(), type=_Signed)
        if hashlib.sha256(signed.manifest).hexdigest() != signed.sha256:
            raise Damaged(f"{NAME} is damaged (its own checksum does not fit)")
        return msgspec.json.decode(signed.manifest, type=Manifest)
    except FileNotFoundError:
        raise Damaged(f"{NAME} is missing") from None
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise Damaged(f"{NAME} cannot be read: {error}") from error


def verify(folder: Path, step: int) -> None:
    """Reads all files of a checkpoint of `step` and compares them with its manifest.

    Raises:
        Damaged: the first difference.
    """
    manifest = read(folder)
    if manifest.step != step:
        raise Damaged(f"it holds step {manifest.step}; was the folder renamed?")
    for name, part in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{name} is missing")
        if (size := path.stat().st_size) != part.size:
            raise Damaged(f"{name} has {size} bytes, {part.size} were written")
    try:
        sums = _sums(folder / name for name in manifest.files)
    except OSError as error:
        raise Damaged(f"it cannot be read: {error}") from error
    for path, found in sums.items():
        if found != manifest.files[path.name].sha256:
            raise Damaged(f"{path.name} is damaged (its checksum does not fit)")


def sync(folder: Path) -> None:
    """Makes the names in a folder durable: what was created, renamed and deleted there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sums(paths: Iterable[Path]) -> dict[Path, str]:
    listed = list(paths)
    with ThreadPoolExecutor(READERS, thread_name_prefix="checksum") as readers:
        return dict(zip(listed, readers.map(_sum, listed), strict=True))


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
