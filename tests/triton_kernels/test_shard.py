"""A head whose vocabulary is divided over ranks, as real processes that talk over Gloo."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from head_problems import distance, losses, problem, reference
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("shard_worker.py")


@pytest.mark.parametrize("edges", [[0, 128, 257], [0, 10, 200, 257]])
def test_ranks_with_parts_of_the_vocabulary_equal_float64_autograd(edges, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), ",".join(map(str, edges)), str(tmp_path / "store"),
             str(tmp_path / str(rank))],
            env=environment,
        )
        for rank in range(len(edges) - 1)
    ]  # fmt: skip
    try:
        codes = [process.wait(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0] * len(running)
    p = replace(problem(v=257), temperature=0.7)
    expected = reference(p, losses(p)["reinforce"])
    ranks = [load_file(tmp_path / str(rank)) for rank in range(len(running))]
    for rank in ranks:
        for name in ("logp", "entropy", "squares", "d_hidden"):
            assert distance(rank[name], getattr(expected, name)) < 1e-5, name
        assert abs(rank["loss"].item() - expected.loss.item()) < 1e-5 * expected.magnitude.item()
        assert torch.equal(rank["logp"], rank["alone"])
        assert torch.equal(rank["logp"], ranks[0]["logp"])
    assert distance(torch.cat([rank["d_weight"] for rank in ranks]), expected.d_weight) < 1e-5
