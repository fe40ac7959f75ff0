"""What it takes to compile a Triton kernel ahead of time: how the wrappers of this package launch it.

Each `*_triton` module lists its kernels' variants, so that a test can compile all of them for GPUs that are not
there, and read registers, stack and the width of loads. Nothing here runs a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Variant(NamedTuple):
    """One kernel as it is launched."""

    name: str
    kernel: Any
    types: dict[str, str]
    """Triton types of the arguments that are not constants, by name: "*fp32", "i64", ..."""
    constants: dict[str, Any]
    """The `tl.constexpr` arguments."""
    aligned: frozenset[str]
    """Arguments that are divisible by 16: pointers in bytes, integers as they are."""
    num_warps: int
