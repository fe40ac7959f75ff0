"""A head whose vocabulary is divided over ranks, as real processes that talk over Gloo."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from head_problems import SHARD_VARIANTS, distance, losses, reference
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("shard_worker.py")


def run_ranks(edges, variant, folder):
    """What each rank had. Triton, where the variant asks for it, is interpreted."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TRITON_INTERPRET": "1"}
    parts = ",".join(map(str, edges))
    running = [
        subprocess.Popen(
            [
                sys.executable,
                str(WORKER),
                str(rank),
                parts,
                variant,
                str(folder / "store"),
                str(folder / str(rank)),
            ],
            env=environment,
        )
        for rank in range(len(edges) - 1)
    ]
    try:
        codes = [process.wait(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0] * len(running)
    return [load_file(folder / str(rank)) for rank in range(len(running))]


@pytest.mark.parametrize(
    ("edges", "variant"),
    [([0, 128, 257], "plain"), ([0, 10, 200, 257], "everything"), ([0, 50, 257], "whole sequences")],
)
def test_ranks_with_parts_of_the_vocabulary_equal_float64_autograd(edges, variant, tmp_path):
    ranks = run_ranks(edges, variant, tmp_path)
    p, settings = SHARD_VARIANTS[variant]
    keep = p.labels != -100
    p = replace(p, labels=torch.where(keep, p.labels, 0), scale=torch.where(keep, p.scale, 0.0))
    expected = reference(p, losses(p)["gspo" if "sequences" in settings else "reinforce"])
    for rank in ranks:
        assert distance(rank["logp"], expected.logp * keep) < 1e-5
        assert distance(rank["entropy"], expected.entropy * keep) < 1e-5
        assert distance(rank["squares"], expected.squares * keep) < 1e-5
        assert distance(rank["d_hidden"], expected.d_hidden) < 1e-5
        assert abs(rank["loss"].item() - expected.loss.item()) < 1e-5 * expected.magnitude.item()
        assert torch.equal(rank["logp"], ranks[0]["logp"])
        # A loss of whole sequences cuts other chunks than none.
        assert torch.equal(rank["logp"], rank["alone"]) or "sequences" in settings
    assert distance(torch.cat([rank["d_weight"] for rank in ranks]), expected.d_weight) < 1e-5
    if p.bias is not None:
        assert distance(torch.cat([rank["d_bias"] for rank in ranks]), expected.d_bias) < 1e-5
