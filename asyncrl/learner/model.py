"""The policy: a Hugging Face causal language model as FSDP2 units, with the RL head inside the root's forward.

Parameters are float32 shards; the forward computes in `model.dtype`. Work on the model is done by passing a
function to the root's forward, because there, and only there, the root's parameters (embedding, final norm, LM
head) are whole. Nothing here knows about batches, losses or optimisers.

The same loading serves the models beside the policy: a reference is another policy, a critic has a value head
instead of the LM head. A value head is no weight of the Hugging Face model: engine and export do not see it.

Called by `asyncrl.learner.update`, `selftest`, `reference`, `critic` and `process_reward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from asyncrl.config import Dtype
from asyncrl.learner import attention
from asyncrl.learner.dist import Ranks
from asyncrl.learner.rows import Row
from asyncrl.messages import TensorMeta
from asyncrl.triton_kernels.rl_head import HeadOutput, TokenLoss, rl_head

T = TypeVar("T")
LossTerm = Callable[[Tensor], Tensor]
"""[n, D] hidden states, within the policy's forward, to a term of the loss, [] float32."""
PREFIX = "hf."


class Policy(nn.Module):
    """The FSDP root around the Hugging Face model `hf` and, if there is one, the value head [1, D]."""

    def __init__(self, hf: nn.Module, value: nn.Linear | None = None) -> None:
        super().__init__()
        self.hf: Any = hf
        self.value = value

    def forward(self, work: Callable[..., T], *args: Any) -> T:
        """Runs `work(hf, *args)` while the root's parameters are whole, in the compute dtype."""
        return work(self.hf, *args)


def load(
    path: str | Path, dtype: Dtype, ranks: Ranks, *, lm_head: bool = True, value_head: bool = False
) -> Policy:
    """Loads a Hugging Face folder into shards. Collective: rank 0 reads, the others receive.

    Args:
        path: of the folder.
        dtype: of the forward.
        ranks: who shares the shards.
        lm_head: whether to keep the LM head. Without it an untied one takes no memory, and only `states` works.
        value_head: whether to add a value head, which is 0 at first.

    Raises:
        FileNotFoundError: the folder has no `config.json`.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path}: no Hugging Face folder there (config.json is missing); make one with `asyncrl init-model`, "
            "or download a model first"
        )
    config = AutoConfig.from_pretrained(path)
    with init_empty_weights(include_buffers=False):
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
        value = nn.Linear(config.get_text_config().hidden_size, 1, bias=False) if value_head else None
    hf.tie_weights()  # the meta-device context registers a tied head as a parameter of its own
    if not lm_head:
        hf.set_output_embeddings(None)
    policy = Policy(hf.eval(), value)  # no dropout: the learner's policy must be the one that the engine samples
    _shard(policy, _layers(hf), dtype, ranks)
    _materialise(policy, ranks.device)
    whole = _read(path, policy) if ranks.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(policy, whole, options=options)
    return policy


def head(hf: Any) -> dict[str, Any]:
    """The LM head as the RL head's arguments `weight`, `bias` and `softcap`; while the parameters are whole."""
    module = hf.get_output_embeddings()
    softcap = getattr(hf.config.get_text_config(), "final_logit_softcapping", None)
    return {"weight": module.weight, "bias": getattr(module, "bias", None), "softcap": softcap}


def states(hf: Any, row: Row) -> Tensor:
    """[n, D] hidden states that predict a packed row's labels; `work` for `Policy.forward`."""
    hidden = hf.model(
        input_ids=row.ids[None], position_ids=row.positions[None], use_cache=False, segments=row.segments
    ).last_hidden_state[0]
    found: Tensor = hidden.index_select(0, row.states)
    return found


def head_loss(
    hf: Any,
    row: Row,
    token_loss: TokenLoss,
    temperature: float,
    workspace_bytes: int | None,
    whole: bool,
    term: LossTerm | None = None,
) -> HeadOutput:
    """Forward of one packed row through the model and the RL head; `work` for `Policy.forward`.

    Args:
        hf: the model, whole.
        row: the row.
        token_loss: see `rl_head`.
        temperature: of the softmax.
        workspace_bytes: of the logits of one chunk.
        whole: the loss needs every sequence's tokens at once.
        term: added to the loss: a value head's (`critic`), or a divergence over the vocabulary (`full_kl`).
    """
    hidden = states(hf, row)
    out = rl_head(
        hidden,
        labels=row.labels,
        token_loss=token_loss,
        temperature=temperature,
        sequences=row.tokens.lengths if whole else None,
        workspace_bytes=workspace_bytes,
        **head(hf),
    )
    return out if term is None else out._replace(loss=out.loss + term(hidden))


@torch.no_grad()
def logp_of(
    policy: Policy, row: Row, temperature: float, workspace_bytes: int | None, squares: bool = False
) -> HeadOutput:
    """Log-probs, entropies and, if asked for, sums of squared probabilities of a row's labels. Collective.

    There is no loss and no gradient. `rl_head.logprob_and_entropy` is the same sweep without the squares.
    """

    def work(hf: Any) -> HeadOutput:
        return rl_head(
            states(hf, row),
            labels=row.labels,
            token_loss=lambda logp, entropy, part: (torch.zeros_like(logp), {}),
            temperature=temperature,
            squares=squares,
            workspace_bytes=workspace_bytes,
            **head(hf),
        )

    out = policy(work)
    release(policy)
    return out


@torch.no_grad()
def values_of(policy: Policy, row: Row) -> Tensor:
    """[n] float32: what the value head says of the state before each of a row's labels. Collective."""
    found: Tensor = policy(lambda hf: value(policy, states(hf, row)))
    release(policy)
    return found


def value(policy: Policy, hidden: Tensor) -> Tensor:
    """[n, D] hidden states to [n] float32 values, with gradient; within the policy's forward.

    Raises:
        ValueError: the policy was loaded without a value head.
    """
    if policy.value is None:
        raise ValueError("this model has no value head; load it with `model.load(..., value_head=True)`")
    return hidden.float() @ policy.value.weight[0].float()


def release(policy: Policy) -> None:
    """Gives up the root's whole parameters. FSDP keeps them after a forward until its backward, which a forward
    without gradient does not have; the next optimiser step would leave them behind."""
    units(policy)[0].reshard()


def units(policy: Policy) -> list[FSDPModule]:
    """The FSDP units: the root (embedding, final norm, LM head) first, then the layers in order."""
    found = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    return sorted(found, key=lambda module: module is not policy)


def weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole, as the forward uses it (compute dtype), with its Hugging Face name; tied ones once.

    Collective: every rank iterates to the end. One gather per unit. A tensor is valid until the next one is asked
    for; the engine side and the export see the same order as in `manifest`.
    """
    owned = _owned(policy)
    for unit in units(policy):
        unit.unshard()
        try:
            for local, name in owned[unit]:
                yield name, _parameter(unit, local).detach()
        finally:
            unit.reshard()


def manifest(policy: Policy, dtype: Dtype) -> list[TensorMeta]:
    """What `weights` will yield, in its order, without any communication."""
    owned = _owned(policy)
    return [
        TensorMeta(name, dtype, list(_parameter(unit, local).shape))
        for unit in units(policy)
        for local, name in owned[unit]
    ]


def _read(path: Path, policy: Policy) -> dict[str, Any]:
    """The folder's weights under the policy's names, and the value head's zeros."""
    logging.disable_progress_bar()  # It would end up in a log file.
    source = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    wanted = policy.state_dict()
    whole: dict[str, Any] = {PREFIX + name: tensor for name, tensor in source.items() if PREFIX + name in wanted}
    if policy.value is not None:
        whole["value.weight"] = torch.zeros(policy.value.weight.shape)
    return whole


def _layers(hf: Any) -> list[nn.Module]:
    """The decoder layers: the modules that transformers says must not be split."""
    kinds = set(hf._no_split_modules or ())
    layers = [module for module in hf.model.modules() if type(module).__name__ in kinds]
    return layers or list(hf.model.layers)


def _shard(policy: Policy, layers: list[nn.Module], dtype: Dtype, ranks: Ranks) -> None:
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("dp_shard",))
    compute = getattr(torch, dtype)
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute, reduce_dtype=torch.float32
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)


def _materialise(policy: Policy, device: torch.device) -> None:
    """Allocates the shards on the device; buffers, which are real already (rotary tables), keep their values."""
    held = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    policy.to_empty(device=device)
    for name, buffer in policy.named_buffers():
        buffer.copy_(held[name])


def _owned(policy: Policy) -> dict[FSDPModule, list[tuple[str, str]]]:
    """Of each unit: its own parameters' names, within the unit and in the Hugging Face model (no value head)."""
    path = {module: name for name, module in policy.named_modules()}
    owned: dict[FSDPModule, list[tuple[str, str]]] = {}
    taken: set[str] = set()
    for unit in reversed(units(policy)):  # children before the root, which takes what is left
        assert isinstance(unit, nn.Module)
        start = f"{path[unit]}." if path[unit] else ""
        every = (name for name, _ in unit.named_parameters() if (start + name).startswith(PREFIX))
        names = [name for name in every if start + name not in taken]
        taken.update(start + name for name in names)
        owned[unit] = [(name, (start + name).removeprefix(PREFIX)) for name in names]
    return owned


def _parameter(unit: FSDPModule, name: str) -> Tensor:
    assert isinstance(unit, nn.Module)
    return unit.get_parameter(name)
