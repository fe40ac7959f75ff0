"""One rank of a head whose vocabulary is divided; run by `test_shard.py`, not a test itself.

Every rank computes the same problem on its part of the weight and writes what it has.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from head_problems import losses, problem
from safetensors.torch import save_file

from asyncrl.triton_kernels.rl_head import logprob_and_entropy, rl_head
from asyncrl.triton_kernels.sweep import Shard


def main(rank: int, edges: list[int], store: str, out: str) -> None:
    torch.set_num_threads(1)
    size = len(edges) - 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    p = problem(v=edges[-1])
    mine = slice(edges[rank], edges[rank + 1])
    hidden, weight = p.hidden.clone().requires_grad_(), p.weight[mine].clone().requires_grad_()
    shard = Shard(group, mine.start)
    output = rl_head(
        hidden, weight, p.labels, token_loss=losses(p)["reinforce"], shard=shard, squares=True, temperature=0.7,
        workspace_bytes=(4 << 20) + 4 * 16 * 100,
    )  # fmt: skip
    output.loss.backward()
    logp, _ = logprob_and_entropy(p.hidden, p.weight[mine], p.labels, shard=shard, temperature=0.7)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert output.squares is not None
    found = {
        "loss": output.loss.detach(), "logp": output.logp, "entropy": output.entropy, "squares": output.squares,
        "d_hidden": hidden.grad, "d_weight": weight.grad, "alone": logp,
    }  # fmt: skip
    save_file(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(edge) for edge in sys.argv[2].split(",")], sys.argv[3], sys.argv[4])
