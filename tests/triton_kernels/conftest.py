"""Triton's interpreter for the kernel tests, so that they run on a CPU.

Triton reads TRITON_INTERPRET when a kernel is decorated. It is set only while the kernel modules are imported:
later it would reach every process that other tests start. A first launch imports gluon, which would find its
library compiled and the interpreter gone; so that comes before.

ASYNCRL_TEST_COMPILED=1 leaves the kernels compiled, for `test_gpu.py`. The other tests of this folder then fail.
"""

import importlib
import os
import sys
from pathlib import Path

import torch
import triton.experimental.gluon  # noqa: F401

KERNELS = sorted(path.stem for path in (Path(__file__).parents[2] / "triton_kernels").glob("*_triton.py"))

sys.path.insert(0, str(Path(__file__).parent))  # For `head_problems`.
torch.set_num_threads(1)
if os.environ.get("ASYNCRL_TEST_COMPILED") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in KERNELS:
            importlib.import_module(f"asyncrl.triton_kernels.{name}")
    finally:
        del os.environ["TRITON_INTERPRET"]
