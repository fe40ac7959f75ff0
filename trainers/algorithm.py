"""The contract of an algorithm: a frozen bundle of named plain functions, and the loss that they make.

    L = sum_t  a_t [ w_t m_t loss(log pi_t, log pi_prox_t, A_t)  +  kl_coef k(log pi_t, log ref_t)  -  bonus H_t ]

`a` comes from the aggregation, `w` from the off-policy correction (of log pi_prox - log mu), `m` from the
rejections (of log pi - log mu), both detached, A from the advantage estimator. The proximal policy is the
current one (its ratio is 1 in value, and `w` corrects the whole distance to the behaviour policy: decoupled PPO,
Hilton et al. 2021, arXiv:2110.00641, with one update for each batch), the one before the batch's first minibatch
(`recomputed`: decoupled PPO with several), the behaviour policy (the ratio itself corrects, and w = 1), or
`loglinear`: between the current and the behaviour policy, the nearer to the current one the older the token.

Called by the learner: `shape`, `estimate`, `factor` and `mark` once per batch, on the whole batch; `token_loss`
by the RL head for every chunk of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import Algo
from asyncrl.trainers.aggregation import Aggregation
from asyncrl.trainers.catalogue import Kind, Part, find, own, split
from asyncrl.trainers.covariance_losses import MARKERS
from asyncrl.trainers.outcomes import Outcomes
from asyncrl.trainers.presets import needs, parts, resolve
from asyncrl.trainers.token_advantages import TARGETS
from asyncrl.trainers.tokens import Tokens

TokenLoss = Callable[[Tensor, Tokens], tuple[Tensor, Tensor]]
"""`(logp [n], tokens) -> (loss [n], clipped [n])`; `tokens.old` is the proximal policy's log-prob, and `clipped`
marks tokens whose gradient or ratio was cut."""
Weighting = Callable[[Tensor, Tokens], Tensor]
"""`(log_weight [n], tokens) -> [n]`: a correction's weights, or a rejection's mask (1: keep)."""


@dataclass(frozen=True)
class Weightings:
    """Corrections and rejections that are applied at the same time."""

    corrections: tuple[Weighting, ...]
    rejections: tuple[Weighting, ...]

    def __bool__(self) -> bool:
        return bool(self.corrections or self.rejections)

    def weight(self, logp: Tensor, old: Tensor, tokens: Tokens) -> Tensor:
        """[n] their product. A correction looks at the proximal policy, a rejection at the current one."""
        weight = torch.ones_like(logp)
        for correction in self.corrections:
            weight = weight * correction(old - tokens.behaviour, tokens)
        for rejection in self.rejections:
            weight = weight * rejection(logp - tokens.behaviour, tokens)
        return weight


@dataclass(frozen=True)
class Algorithm:
    """An algorithm, ready to run. `settings` is the resolved configuration; all functions have their
    parameters."""

    settings: Algo
    advantage: Callable[[Outcomes], Tensor]
    loss: TokenLoss
    aggregation: Aggregation
    shapings: tuple[Callable[[Outcomes], Outcomes], ...]
    online: Weightings
    """Correction and rejections that the sweep applies, chunk by chunk."""
    ahead: Weightings
    """Those that must see the whole batch, before the baseline is taken: the sequences they empty leave it."""
    kl: Callable[[Tensor, Tensor], Tensor]
    """Divergence of each token from its log-prob under the reference."""
    targets: Callable[[Outcomes], Tensor] | None
    """[N] what a critic is fitted to; None: the estimator needs no critic."""
    marker: Callable[[Tensor, Tokens], Tensor] | None
    """The loss's own look at the whole batch."""
    needs: frozenset[str]
    """See `catalogue.Part`."""
    sequence_level: bool
    """Whether `token_loss` must be given whole sequences."""
    per_token: bool
    """Whether the advantage estimator returns a number for each token, and so needs the batch's tokens."""

    # ---- once per batch ----------------------------------------------------------------------------

    def shape(self, outcomes: Outcomes) -> Outcomes:
        """Rewards after shaping, and which episodes count."""
        for shaping in self.shapings:
            outcomes = shaping(outcomes)
        return outcomes

    def estimate(self, outcomes: Outcomes) -> Tensor:
        """[N] advantages of shaped outcomes. A KL penalty is part of the reward."""
        if self.per_token:
            return self.advantage(outcomes)
        return outcomes.spread(self.advantage(outcomes.after_penalty()))

    @torch.no_grad()
    def divergence(self, behaviour: Tensor, reference: Tensor) -> Tensor:
        """[n] divergence from the reference of the policy that sampled, where it is a part of the reward."""
        return self.kl(behaviour, reference)

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term of the tokens' log-probs."""
        return self.settings.kl_in == "loss" and self.settings.kl not in ("none", "full")

    def factor(self, logp: Tensor, tokens: Tokens) -> Tensor:
        """[n] weights of the corrections and rejections that see the whole batch; `logp` is before the update."""
        return self.ahead.weight(logp, self._old(logp, tokens), tokens)

    def mark(self, logp: Tensor, tokens: Tokens) -> Tensor:
        """[n] what the loss's look at the whole batch makes of each token; `logp` is before the update."""
        assert self.marker is not None
        return self.marker(logp, replace(tokens, old=self._old(logp, tokens)))

    # ---- for every chunk of tokens -----------------------------------------------------------------

    def token_loss(
        self, logp: Tensor, entropy: Tensor, tokens: Tokens, kl_coef: float = 0.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token; its sum over the batch is the batch's loss.

        Args:
            logp: [n] log-probs of the labels under the current policy, with gradient.
            entropy: [n] entropies of the distributions they were drawn from, with gradient.
            tokens: [n] their data.
            kl_coef: coefficient of the KL term in the loss, where there is one.

        Returns:
            The losses [n], and per-token metrics [n], detached: `clipped` (0 or 1) and `weight` (w m).
        """
        old = self._old(logp.detach(), tokens)
        weight = self.online.weight(logp.detach(), old, tokens)
        if tokens.factor is not None:
            weight = weight * tokens.factor
        loss, clipped = self.loss(logp, replace(tokens, old=old))
        loss = weight * loss
        if tokens.reference is not None:
            loss = loss + kl_coef * self.kl(logp, tokens.reference)
        if self.settings.entropy_bonus:
            loss = loss - self.settings.entropy_bonus * entropy
        return tokens.weight * loss, {"clipped": clipped.to(logp.dtype), "weight": weight}

    def _old(self, logp: Tensor, tokens: Tokens) -> Tensor:
        """Log-probs under the proximal policy, without gradient."""
        match self.settings.proximal:
            case "recomputed" if tokens.old is not None:
                return tokens.old
            case "behaviour":
                return tokens.behaviour
            case "loglinear":
                assert tokens.lag is not None
                return loglinear(logp.detach(), tokens.behaviour, tokens.lag)
            case _:
                return logp.detach()


def loglinear(logp: Tensor, behaviour: Tensor, lag: Tensor) -> Tensor:
    """Log-prob of a policy between both: behaviour + (1 - 1 / lag) (logp - behaviour); lag 0 gives behaviour.

    It stands for the policy one version before the current one, for which no forward pass is needed. A-3PO, 2025
    (arXiv:2512.06547), section 3.
    """
    share = 1 - 1 / lag.clamp(min=1).to(logp.dtype)
    return behaviour + share * (logp - behaviour)


def build(algo: Algo) -> Algorithm:
    """The algorithm that a configuration names.

    Raises:
        ValueError: see `asyncrl.trainers.presets.resolve`.
    """
    settings = resolve(algo)
    [(loss, _)], [(advantage, estimator)] = _bound(settings, "loss"), _bound(settings, "advantage")
    marker = MARKERS.get(settings.loss or "")
    targets = TARGETS.get(settings.advantage or "") or getattr(estimator.function(), "targets", None)
    return Algorithm(
        settings=settings,
        advantage=advantage,
        loss=loss,
        aggregation=_bound(settings, "aggregation")[0][0],
        shapings=tuple(function for function, _ in _bound(settings, "shaping")),
        online=_weightings(settings, ahead=False),
        ahead=_weightings(settings, ahead=True),
        kl=_bound(settings, "kl")[0][0],
        targets=None if targets is None else partial(targets, **_of(targets, settings.advantage_args)),
        marker=None if marker is None else partial(marker, **_of(marker, settings.loss_args)),
        needs=needs(settings) | ({"logp"} if settings.proximal == "recomputed" else set()),
        sequence_level=any(part.level == "sequence" for kind, _, part in parts(settings) if kind != "advantage"),
        per_token=estimator.level == "token",
    )


def _bound(settings: Algo, kind: Kind) -> list[tuple[Callable[..., Any], Part]]:
    """The functions of a kind with their parameters, and their entries in the catalogue."""
    found: list[tuple[Callable[..., Any], Part]] = []
    for name in split(kind, getattr(settings, kind) or "none"):
        part = find(kind, name)
        arguments = own(part, getattr(settings, f"{kind}_args", {}))
        found.append((partial(part.function(), **arguments), part))
    return found


def _weightings(settings: Algo, *, ahead: bool) -> Weightings:
    """The corrections and rejections that see the whole batch (`ahead`), or the others."""

    def chosen(kind: Kind) -> tuple[Weighting, ...]:
        return tuple(function for function, part in _bound(settings, kind) if (part.level == "batch") == ahead)

    return Weightings(chosen("correction"), chosen("rejection"))


def _of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes, if the part has others for another function."""
    return {name: value for name, value in arguments.items() if name in signature(function).parameters}
