"""What the RL head allocates: inputs, gradients and its workspace, whatever the number of tokens."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.triton_kernels import rows_torch, rows_triton
from asyncrl.triton_kernels.plan import blocks, rows_that_fit
from asyncrl.triton_kernels.rl_head import rl_head

MIB = 1 << 20


class Peak(TorchDispatchMode):
    """Bytes of all tensors that are alive after any operation, at their highest."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return out


def peak(n, d, v, workspace, device="cpu", dtype=torch.float32, backend="auto"):
    """Highest number of bytes, and the bytes of the inputs and of the gradients."""
    hidden = torch.randn(n, d, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(v, d, device=device, dtype=dtype).requires_grad_()
    labels = torch.zeros(n, dtype=torch.int64, device=device)
    with Peak() as found:
        out = rl_head(
            hidden, weight, labels, token_loss=lambda logp, entropy, part: (logp - entropy, {}),
            workspace_bytes=workspace, backend=backend,
        )  # fmt: skip
        out.loss.backward()
    return found.bytes, hidden.nbytes + weight.nbytes, hidden.grad.nbytes + weight.numel() * 4


@pytest.mark.parametrize("n", [500, 4000, 16_000])
def test_beyond_inputs_and_gradients_only_the_workspace_is_allocated(n):
    most, inputs, gradients = peak(n, 32, 5000, 16 * MIB)
    assert most <= inputs + gradients + 16 * MIB + 100 * n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "size"), [(65_536, 1536), (8192, 5120)])
def test_a_batch_of_151936_labels_fits_inputs_gradients_and_workspace(dtype, n, size):
    """On tensors without memory: every shape is real, no number is computed."""
    most, inputs, gradients = peak(n, size, 151_936, 1024 * MIB, "meta", dtype)
    # At the end the weight's gradient is cast, and the workspace is free by then.
    cast = 151_936 * size * 2 if dtype == torch.bfloat16 else 0
    assert most <= inputs + gradients + max(1024 * MIB, cast) + 100 * n


@pytest.mark.parametrize("implementation", [rows_torch, rows_triton])
@pytest.mark.parametrize("vocabulary", [17, 5003, 151_936])
def test_the_planned_rows_and_what_is_fixed_fill_the_workspace(implementation, vocabulary):
    row, fixed = (
        implementation.row_bytes(vocabulary, False),
        implementation.fixed_bytes(vocabulary, torch.device("cpu")),
    )
    rows = rows_that_fit(512 * MIB, row, fixed)
    assert fixed + rows * row <= 512 * MIB < fixed + (rows + 16) * row
    assert implementation.buffer(3, vocabulary, torch.device("meta")).untyped_storage().nbytes() <= 3 * row


def test_triton_holds_nothing_beside_the_logits():
    buffer = 64 * rows_triton.row_bytes(5003, False)
    most, inputs, gradients = peak(300, 24, 5003, buffer + 64 * 8 * 24, backend="triton")
    assert buffer * 0.9 < most - inputs - gradients < buffer + 64 * 8 * 24 + 100 * 300


@pytest.mark.parametrize(
    ("lengths", "rows", "expected"),
    [
        ([3, 3, 3], 6, [(0, 6, 1), (6, 9, 1)]),
        ([2, 9, 1, 1], 4, [(0, 2, 1), (2, 11, 3), (11, 13, 1)]),
        ([0, 5, 0], 5, [(0, 5, 1)]),
        ([], 5, []),
    ],
)
def test_blocks_hold_whole_sequences_and_only_long_ones_are_cut(lengths, rows, expected):
    found = blocks(sum(lengths), rows, lengths)
    assert [(b.tokens.start, b.tokens.stop, len(b.chunks)) for b in found] == expected
    assert all(chunk.stop - chunk.start <= rows for block in found for chunk in block.chunks)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 100])
def test_chunks_are_even_and_cover_all_tokens(n):
    found = [block.chunks[0] for block in blocks(n, 16, None)]
    sizes = [chunk.stop - chunk.start for chunk in found]
    assert [i for chunk in found for i in range(chunk.start, chunk.stop)] == list(range(n))
    assert all(size == sizes[0] for size in sizes[:-1])
    assert len(sizes) == -(-n // 16)
