"""Which implementation of a kernel runs: Triton or plain torch.

Every kernel of this package exists twice, with one contract: a Triton version for GPUs, and a torch version for
CPUs, for machines without Triton, and as the reference of the tests. The device of the tensors decides; nothing
here asks what hardware the machine has. Called by every public function of the package.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch

Backend = Literal["auto", "torch", "triton"]
"""`auto`: Triton for CUDA tensors if it is installed, else torch."""

_INSTALLED = find_spec("triton") is not None


def use_triton(device: torch.device, backend: Backend) -> bool:
    """Whether the Triton version runs on tensors of this device.

    Raises:
        ValueError: Triton is asked for and not installed, or the name is unknown.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend = {backend!r} is unknown; allowed: auto, torch, triton")
    if backend == "triton" and not _INSTALLED:
        raise ValueError("backend = 'triton' is asked for, but triton is not installed; use 'auto' or 'torch'")
    return backend == "triton" or (backend == "auto" and device.type == "cuda" and _INSTALLED)
