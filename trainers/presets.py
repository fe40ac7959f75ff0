"""The algorithms by name, and how a preset becomes a complete `config.Algo`.

A preset is a few lines that a reader can hold in the head: the parts that differ from `BASE`, and their numbers.
`resolve` fills what the user left open and refuses what no part takes or what contradicts itself. It imports no
torch: `asyncrl.trainers.algorithm` turns the result into functions. Called by the command line (`--dry-run`,
validation, `asyncrl algos`), the hub (group filter, greedy episodes) and the learner.
"""

from __future__ import annotations

import difflib
from typing import Any, get_args

from asyncrl.config import Algo
from asyncrl.envs.registry import load_plugin, names
from asyncrl.trainers.catalogue import Kind, Part, complete, find, split

GROUP = "asyncrl.algorithms"
"""Entry points of whole algorithms: each a `config.Algo`, like those below."""
KINDS: tuple[Kind, ...] = get_args(Kind)

BASE = Algo(
    advantage="grpo",
    loss="ppo_clip",
    aggregation="token_mean",
    rejection="none",
    filter="none",
    shaping="none",
    kl="none",
    kl_in="loss",
    kl_coef=0.001,
    kl_target=0.0,
    kl_horizon=10000.0,
    reference_every=0,
    entropy_bonus=0.0,
)
"""What a preset does not name. The proximal policy and the correction follow from the loss: see `_off_policy`."""


def _preset(**parts: Any) -> Algo:
    return BASE.model_copy(update=parts)


PRESETS: dict[str, Algo] = {
    # Its overlong penalty is `shaping = "overlong"`: no length fits every task.
    "dapo": _preset(loss_args={"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 10.0}, filter="equal_rewards"),
    # Its KL term is `kl = "k3"`; it is usually left out where rewards are verified.
    "grpo": _preset(aggregation="sequence_mean"),
    "drgrpo": _preset(advantage="dr_grpo", aggregation="constant"),
    "rloo": _preset(advantage="rloo", loss="reinforce", aggregation="sequence_sum"),
    "reinforce++": _preset(advantage="reinforce_pp", kl="k1", kl_in="reward"),
    "reinforce++-baseline": _preset(advantage="reinforce_pp_baseline", kl="k2"),
    "remax": _preset(advantage="remax", loss="reinforce"),
    "opo": _preset(advantage="opo", loss="reinforce"),
    "gpg": _preset(advantage="gpg", loss="reinforce"),
    "pass-k": _preset(advantage="pass_k"),
    "gdpo": _preset(advantage="gdpo"),
    "otb": _preset(advantage="otb", loss="reinforce"),
    "ppo": _preset(advantage="gae"),
    # The weights are in the advantages, so there is no other correction.
    "vtrace": _preset(advantage="vtrace", loss="reinforce", correction="none"),
    "gspo": _preset(loss="gspo", aggregation="sequence_mean"),
    "cispo": _preset(loss="cispo"),
    "aipo": _preset(loss="aipo"),
    "gmpo": _preset(loss="gmpo", aggregation="sequence_mean"),
    "sapo": _preset(loss="sapo", aggregation="sequence_mean"),
    "dppo": _preset(loss="dppo_tv", advantage="dr_grpo"),
    "clip-cov": _preset(loss="clip_cov"),
    # Its ratio has no bound, so it stays at 1, and a capped weight corrects.
    "kl-cov": _preset(loss="kl_cov", proximal="current"),
    "prime": _preset(advantage="prime", filter="mean_band"),
    "sppo": _preset(advantage="rloo", loss="sppo", aggregation="sequence_mean"),
    "dro": _preset(advantage="rloo", loss="dro"),
    # Its mask takes the place of the clip, and the rest keep their weights.
    "m2po": _preset(loss="reinforce", rejection="m2po", correction="token_tis", correction_args={"cap": 10.0}),
    "online-dpo": _preset(
        advantage="dpo", loss="reinforce", aggregation="sequence_sum", filter="equal_rewards", correction="none"
    ),
}
"""Their papers: `asyncrl.trainers.about`."""


def resolve(algo: Algo) -> Algo:
    """Fills every key that is None from the preset `algo.name`, and all parameters of all parts.

    A part that the user names brings its own defaults: the preset's parameters were meant for the preset's part.
    Resolving twice changes nothing.

    Raises:
        ValueError: the preset, a part or a parameter is unknown (the nearest name is given), a value is out of its
            range, or the parts contradict each other.
    """
    base = preset(algo.name)
    chosen = {key: value for key, value in algo if value is not None and not key.endswith("_args")}
    resolved = _off_policy(base.model_copy(update=chosen))
    arguments: dict[str, Any] = {}
    for kind in KINDS:
        if kind == "kl":  # Its parameters are keys of their own.
            find(kind, resolved.kl or "")
            continue
        value = getattr(resolved, kind)
        inherited = getattr(base, f"{kind}_args") if value == getattr(base, kind) else {}
        arguments[f"{kind}_args"] = complete(kind, value, inherited | getattr(algo, f"{kind}_args"))
    resolved = _greedy_baseline(resolved.model_copy(update=arguments))
    _consistent(resolved)
    return resolved


def preset(name: str) -> Algo:
    """A preset of this package or a plug-in.

    Raises:
        ValueError: there is none, or the plug-in is no complete `Algo`.
    """
    if name in PRESETS:
        return PRESETS[name]
    if ":" in name or name in names(GROUP):
        found = load_plugin(GROUP, name, "algorithm")
        if not isinstance(found, Algo):
            raise ValueError(f"algo.name = {name!r} is a {type(found).__name__}, not an asyncrl.config.Algo")
        return BASE.model_copy(update={key: value for key, value in found if value not in (None, {})})
    allowed = (*PRESETS, *names(GROUP))
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"algo.name = {name!r} is unknown; {hint}allowed: {', '.join(allowed)}")


def parts(algo: Algo) -> list[tuple[Kind, str, Part]]:
    """Every part of a resolved algorithm."""
    named = ((kind, getattr(algo, kind) or "none") for kind in KINDS)
    return [(kind, name, find(kind, name)) for kind, value in named for name in split(kind, value)]


def needs(algo: Algo) -> frozenset[str]:
    """What a resolved algorithm needs besides the policy's own forward pass; see `catalogue.Part`."""
    return frozenset(need for _, _, part in parts(algo) for need in part.needs)


def _greedy_baseline(algo: Algo) -> Algo:
    """Fills in whether each group has a greedy episode: the hub, which samples it, loads no estimator to ask."""
    wanted = "greedy" in find("advantage", algo.advantage or "").needs
    if algo.greedy_baseline not in (None, wanted):
        does = "needs a greedy episode of each group" if wanted else "has no use for greedy episodes"
        raise ValueError(
            f"algo.greedy_baseline = {algo.greedy_baseline}, but algo.advantage = {algo.advantage!r} {does}; "
            "leave algo.greedy_baseline out, or choose another estimator"
        )
    return algo.model_copy(update={"greedy_baseline": wanted})


def _off_policy(algo: Algo) -> Algo:
    """Fills in how stale tokens are corrected, where neither the user nor the preset says it.

    A loss with a ratio takes it to the policy that sampled: then its clip is a trust region around the data, which
    bears more staleness than any weight without one (README, "Stale data"). A loss without a ratio, or with one to
    another policy, needs the weight of a correction; who names a correction wants it to be that weight.
    """
    weighted = algo.loss == "reinforce" or algo.correction not in (None, "none")
    proximal = algo.proximal or ("current" if weighted else "behaviour")
    correction = algo.correction or ("none" if proximal == "behaviour" else "token_tis")
    return algo.model_copy(update={"proximal": proximal, "correction": correction})


def _consistent(algo: Algo) -> None:
    """Refuses parts that contradict each other, and those that would do nothing."""
    if algo.loss == "reinforce" and algo.proximal != "current":
        raise ValueError(
            f"algo.loss = 'reinforce' with algo.proximal = {algo.proximal!r} would leave stale tokens "
            "uncorrected, because that loss has no ratio; use algo.proximal = 'current' with "
            "algo.correction = 'token_tis'"
        )
    if find("loss", algo.loss or "").level == "sequence" and algo.proximal == "current":
        raise ValueError(
            f"algo.loss = {algo.loss!r} with algo.proximal = 'current' would clip nothing, because every ratio to "
            "the current policy is 1; use algo.proximal = 'behaviour' and algo.correction = 'none'"
        )
    if algo.proximal == "behaviour" and algo.correction != "none":
        raise ValueError(
            f"algo.correction = {algo.correction!r} with algo.proximal = 'behaviour' has nothing to correct: the "
            "loss's own ratio does; use algo.correction = 'none', or algo.proximal = 'current'"
        )
    dual = algo.loss_args.get("clip_dual", 0)
    if 0 < dual <= 1:
        raise ValueError(f"algo.loss_args: clip_dual = {dual}: must be above 1 (usual: 3 to 10), or 0 for off")
    if algo.advantage == "dpo" and algo.rejection != "none":
        raise ValueError(
            f"algo.advantage = 'dpo' with algo.rejection = {algo.rejection!r}: a pair of which one half is "
            "rejected has no DPO loss; use algo.rejection = 'none'"
        )
    _consistent_rewards(algo)


def _consistent_rewards(algo: Algo) -> None:
    """The same for the KL term, the reference and shaping."""
    in_reward = algo.kl != "none" and algo.kl_in == "reward"
    if in_reward and algo.kl == "full":
        raise ValueError("algo.kl = 'full' is a loss; with algo.kl_in = 'reward' use 'k1'")
    if algo.kl == "k1" and algo.kl_in == "loss":
        raise ValueError(
            "algo.kl = 'k1' with algo.kl_in = 'loss' would do nothing: its expected gradient is 0; use 'k2', "
            "'k3' or 'k1+', or algo.kl_in = 'reward'"
        )
    if algo.kl == "none" and (algo.kl_target or algo.kl_coef != BASE.kl_coef):
        raise ValueError(
            "algo.kl_coef and algo.kl_target are for a KL term, and algo.kl = 'none'; use algo.kl = 'k3'"
        )
    if algo.reference_every and not needs(algo) & {"reference", "reference_model"}:
        raise ValueError(
            f"algo.reference_every = {algo.reference_every}, but no part needs a reference model; set algo.kl, or "
            "leave it at 0"
        )
    shapes = set(split("shaping", algo.shaping or "none")) - {"drop_truncated"}
    if algo.advantage == "gdpo" and (shapes or in_reward):
        raise ValueError(
            "algo.advantage = 'gdpo' compares the environment's rewards by name, so a KL term in the reward or "
            f"algo.shaping = {algo.shaping!r} would do nothing; use algo.kl_in = 'loss', and algo.shaping = 'none'"
        )
