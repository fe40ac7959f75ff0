"""Who computes the RL head: ours, plain autograd, torch.compile, and heads of other projects. For `rl_head.py`.

Heads of others are imported from their installed packages when they are opened, and none of their code is here.
Opening raises whatever explains why a contender cannot run; the benchmark prints it.

A contender gets a problem and a task, and returns a loss that still has to be differentiated:

    ppo+entropy   PPO-clip with an entropy bonus: needs gradients of log-probs and entropies
    ppo           PPO-clip alone
    nll           mean negative log-likelihood: for heads that compute their loss themselves
    forward       log-probs and entropies, no gradients
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asyncrl.triton_kernels.backend import Backend
from asyncrl.triton_kernels.rl_head import logprob_and_entropy, rl_head

BONUS, FULL, PLAIN, NLL, FORWARD = 0.01, "ppo+entropy", "ppo", "nll", "forward"
TASKS = (FULL, PLAIN, NLL, FORWARD)
DRIFT = (-0.4, -0.1, 0.0, 0.1, 0.4)
"""Log-ratios of the problem's tokens. The clip edges lie at -0.22 and 0.18, beyond the reach of rounded logits."""
COMPILED_CHUNK = 1024
TRL_VOCABULARY = 32768
"""Columns of a tile, as its trainers call the function."""

Run = Callable[["Problem", str], Tensor]
Scores = Callable[[Tensor, Tensor, Tensor, float], "tuple[Tensor, Tensor | None]"]
"""`(hidden, weight, labels, temperature) -> (log-probs [N], entropies [N] or None)`."""


class Unavailable(Exception):
    """A contender cannot run here; says why."""


@dataclass(frozen=True)
class Problem:
    """The head of a model and N tokens in sequences of equal length."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    old: Tensor
    """[N] log-probs of the behaviour policy."""
    advantage: Tensor
    """[N], the same within a sequence."""
    length: int
    temperature: float = 0.9
    bonus: float = BONUS

    def cut(self, n: int) -> Problem:
        """The first n tokens; one sequence if they are fewer than a sequence has."""
        tokens = {name: getattr(self, name)[:n] for name in ("labels", "old", "advantage")}
        hidden = self.hidden.detach()[:n].clone().requires_grad_()
        return replace(self, hidden=hidden, length=min(n, self.length), **tokens)

    def loss(self, task: str, logp: Tensor, entropy: Tensor | None, part: slice) -> Tensor:
        """The tokens' losses, [n]; their sum over all N tokens is the loss."""
        if task == NLL:
            return -logp / len(self.labels)
        ratio, advantage = (logp - self.old[part]).exp(), self.advantage[part]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if task == FULL:
            assert entropy is not None
            loss = loss - self.bonus * entropy
        return loss / len(self.labels)


class Contender(NamedTuple):
    """One way to compute the head."""

    name: str
    computes: str
    tasks: tuple[str, ...]
    open: Callable[[torch.device], Run]


def make_problem(n: int, d: int, v: int, dtype: torch.dtype, device: torch.device, length: int = 512) -> Problem:
    """Logits as a trained policy's: standard deviation about 2.5, and in each row one peak of 12 to 30."""
    g = torch.Generator(device).manual_seed(0)
    weight = torch.randn(v, d, generator=g, device=device).mul_(2.5 / d**0.5)
    labels = torch.randint(0, v, (n,), generator=g, device=device)
    peak = 12 + 18 * torch.rand(n, 1, generator=g, device=device)
    hidden = torch.randn(n, d, generator=g, device=device) + peak / 2.5**2 * weight[labels]
    hidden, weight = (t.to(dtype).requires_grad_() for t in (hidden, weight))
    advantage = torch.randn(-(-n // length), generator=g, device=device).repeat_interleave(length)[:n]
    drift = torch.tensor(DRIFT, device=device)[torch.randint(0, len(DRIFT), (n,), generator=g, device=device)]
    problem = Problem(hidden, weight, labels, drift, advantage, length)
    logp, _ = logprob_and_entropy(hidden, weight, labels, temperature=problem.temperature)
    return replace(problem, old=logp - drift)


def scored(scores: Scores) -> Run:
    """A contender that computes log-probs and entropies; the loss is plain autograd on them."""

    def run(p: Problem, task: str) -> Tensor:
        with torch.set_grad_enabled(task != FORWARD):
            logp, entropy = scores(p.hidden, p.weight, p.labels, p.temperature)
        return logp if task == FORWARD else p.loss(task, logp, entropy, slice(None)).sum()

    return run


def ours(workspace_bytes: int | None, backend: Backend) -> Run:
    """`rl_head`, and `logprob_and_entropy` for the task without gradients."""

    def run(p: Problem, task: str) -> Tensor:
        settings: dict[str, Any] = {
            "temperature": p.temperature, "workspace_bytes": workspace_bytes, "backend": backend,
        }  # fmt: skip
        if task == FORWARD:
            return logprob_and_entropy(p.hidden, p.weight, p.labels, **settings)[0]
        return rl_head(
            p.hidden, p.weight, p.labels, token_loss=lambda *x: (p.loss(task, *x), {}), **settings
        ).loss  # fmt: skip

    return run


# ---- plain torch -------------------------------------------------------------------------------------


def frugal(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One log-softmax for both."""
    log_q = ((hidden @ weight.t()).float() / temperature).log_softmax(-1)
    return log_q.gather(1, labels[:, None])[:, 0], -(log_q.exp() * log_q).sum(-1)


def usual(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """As the unfused paths of the large frameworks: log-probs and entropies each from the logits."""
    logits = (hidden @ weight.t()).float() / temperature
    logp = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return logp, logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def compiled(device: torch.device) -> Run:
    """Chunks of 1024 tokens of `frugal`, compiled; backward computes their logits again."""
    torch.compiler.reset()  # After eight shapes it would give up compiling.
    chunk = torch.compile(frugal, dynamic=False)

    def scores(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        pairs = zip(hidden.split(COMPILED_CHUNK), labels.split(COMPILED_CHUNK), strict=True)
        found = [checkpoint(chunk, h, weight, y, temperature, use_reentrant=False) for h, y in pairs]
        logp, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        return logp, entropy

    return scored(scores)


def torch_cross_entropy(device: torch.device) -> Run:
    """`torch.nn.functional.linear_cross_entropy` in chunks. It knows no temperature, so the states are divided."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy; it came with 2.13")
    options = torch.nn.LinearCrossEntropyOptions()

    def run(p: Problem, task: str) -> Tensor:
        reduction = "mean" if task == NLL else "none"
        nll = F.linear_cross_entropy(
            p.hidden / p.temperature, p.weight, p.labels, reduction=reduction, options=options
        )
        return nll if task == NLL else p.loss(task, -nll, None, slice(None)).sum()

    return run


# ---- other projects ----------------------------------------------------------------------------------


def trl(device: torch.device) -> Run:
    """TRL's `ChunkedLogProbFunction`: tiles of tokens and vocabulary; Triton on GPUs, torch elsewhere."""
    chunked = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    importlib.import_module("trl.trainer.utils")  # Its backward needs it.

    def scores(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        asked = (None, 1.0, ("entropy",))  # No soft cap, no scale.
        return chunked.apply(hidden, weight, None, labels, temperature, TRL_VOCABULARY, *asked)[:2]

    return scored(scores)


def verl_torch(device: torch.device) -> Run:
    """verl's `FusedLinearForPPO`: chunks of 512 tokens in torch."""
    module = without_init("verl.utils.experimental.torch_functional", "verl", "verl.utils")
    return scored(module.FusedLinearForPPO())


def verl_triton(device: torch.device) -> Run:
    """verl's Triton head, `linear_cross_entropy`."""
    needs_gpu(device)
    module = without_init("verl.utils.kernel.linear_cross_entropy", "verl", "verl.utils")
    return scored(lambda h, w, y, t: module.linear_cross_entropy(h, w, y, t, "none"))


def liger_scaled(device: torch.device) -> Run:
    """Liger's fused scaled cross entropy: CuTe on Hopper, elsewhere torch in chunks of 512 tokens."""
    function = importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction

    def scores(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        nll, entropy = function.apply(hidden, weight, labels, temperature, -100, 1, True)
        return -nll, entropy

    return scored(scores)


def liger_grpo(device: torch.device) -> Run:
    """Liger's chunked GRPO loss, set to PPO-clip: it computes the loss itself, a sequence at a time."""
    head = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss

    def run(p: Problem, task: str) -> Tensor:
        # `compiled` is about the loss of a few vectors, and fails at a second sequence length.
        settings = {"beta": 0.0, "use_ref_model": False, "loss_type": "dapo", "compiled": False}
        loss = head(**settings, temperature=p.temperature)
        labels, old = (x.view(-1, p.length) for x in (p.labels, p.old))
        states = p.hidden.view(*labels.shape, -1)
        mask, advantage = torch.ones_like(old), p.advantage[:: p.length]
        return loss(states, p.weight, labels, mask, advantage, old_per_token_logps=old)[0]

    return run


def liger_cross_entropy(device: torch.device) -> Run:
    """Liger's fused linear cross entropy: three products, gradients in forward. No temperature."""
    needs_gpu(device)
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda p, task: loss(p.weight, p.hidden / p.temperature, p.labels)


def cut_cross_entropy(device: torch.device) -> Run:
    """Apple's cut cross entropy with its default filter, which skips small gradients. No temperature."""
    needs_gpu(device)
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return scored(lambda h, w, y, t: (-function(h / t, w, y, reduction="none"), None))


def needs_gpu(device: torch.device) -> None:
    """Raises Unavailable on a CPU."""
    if device.type != "cuda":
        raise Unavailable("needs a GPU")


def without_init(name: str, *parents: str) -> ModuleType:
    """Imports a module without running the parents' `__init__`, which may need what the module does not."""
    for parent in parents:
        if parent in sys.modules:
            continue
        spec = importlib.util.find_spec(parent)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {parent!r}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[parent] = module
    return importlib.import_module(name)


BOTH = (FULL, FORWARD)
CONTENDERS = [
    Contender("frugal autograd", "log-prob, entropy", BOTH, lambda device: scored(frugal)),
    Contender("usual autograd", "log-prob, entropy", BOTH, lambda device: scored(usual)),
    Contender("torch.compile, chunks", "log-prob, entropy", BOTH, compiled),
    Contender("verl Triton", "log-prob, entropy", BOTH, verl_triton),
    Contender("verl torch", "log-prob, entropy", BOTH, verl_torch),
    Contender("Liger scaled CE", "log-prob, entropy", BOTH, liger_scaled),
    Contender("TRL chunked", "log-prob, entropy", BOTH, trl),
    Contender("Liger GRPO", "PPO loss, no entropy", (PLAIN,), liger_grpo),
    Contender("Apple CCE", "log-prob, filtered", (PLAIN,), cut_cross_entropy),
    Contender("torch linear CE", "log-prob or mean NLL", (PLAIN, NLL), torch_cross_entropy),
    Contender("Liger linear CE", "mean NLL", (NLL,), liger_cross_entropy),
]
PACKAGES = ("liger-kernel", "cut-cross-entropy", "verl", "trl")
