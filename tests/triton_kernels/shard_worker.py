"""One rank of a head whose vocabulary is divided; run by `test_shard.py`, not a test itself.

Every rank computes the same problem on its part of the weight and writes what it has.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from head_problems import SHARD_VARIANTS as VARIANTS
from head_problems import losses
from safetensors.torch import save_file

from asyncrl.triton_kernels.rl_head import logprob_and_entropy, rl_head
from asyncrl.triton_kernels.sweep import Shard


def main(rank: int, edges: list[int], variant: str, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(edges) - 1)
    group = dist.group.WORLD
    assert group is not None
    p, settings = VARIANTS[variant]
    loss = losses(p)["gspo" if "sequences" in settings else "reinforce"]
    mine = slice(edges[rank], edges[rank + 1])
    hidden, weight = p.hidden.clone().requires_grad_(), p.weight[mine].clone().requires_grad_()
    bias = None if p.bias is None else p.bias[mine].clone().requires_grad_()
    # Ranks with more labels fit fewer rows; they must agree.
    head = {
        "temperature": p.temperature, "bias": bias, "softcap": p.softcap, "shard": Shard(group, mine.start),
        "workspace_bytes": (4 << 20) + 4 * 1500, "backend": settings.get("backend", "auto"),
        "ignore_index": settings.get("ignore_index"),
    }  # fmt: skip
    output = rl_head(
        hidden, weight, p.labels, token_loss=loss, squares=True, sequences=settings.get("sequences"), **head
    )
    output.loss.backward()
    logp, _ = logprob_and_entropy(p.hidden, p.weight[mine], p.labels, **head)
    found = {
        "loss": output.loss.detach(), "logp": output.logp, "entropy": output.entropy, "squares": output.squares,
        "d_hidden": hidden.grad, "d_weight": weight.grad, "alone": logp,
    }  # fmt: skip
    if bias is not None:
        found["d_bias"] = bias.grad
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(edge) for edge in sys.argv[2].split(",")], *sys.argv[3:])
