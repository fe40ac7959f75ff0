"""The algorithms by name, and how a preset becomes a complete `config.Algo`.

A preset is a few lines that a reader can hold in the head: names of parts, and their numbers. `resolve` fills
what the user left open and refuses names that no part has. It builds nothing and imports no torch:
`asyncrl.trainers.algorithm` turns the result into functions. Called by the command line (`--dry-run`,
validation), the hub (group filter) and the learner.
"""

from __future__ import annotations

import difflib

from asyncrl.config import Algo

PARTS: dict[str, tuple[str, ...]] = {
    "advantage": ("grpo", "dr_grpo", "rloo", "reinforce"),
    "loss": ("ppo_clip", "reinforce", "cispo"),
    "aggregation": ("token_mean", "sequence_mean"),
    "correction": ("none", "token_tis", "icepop"),
    "filter": ("none", "equal_rewards"),
}
"""What each key of `[algo]` may name; the registries in this package hold the functions."""

PRESETS: dict[str, Algo] = {
    # Yu et al. 2025, arXiv:2503.14476. The paper's overlong penalty is off until `overlong_buffer` is set
    # (the paper takes a fifth of the longest answer), because no length fits every task.
    "dapo": Algo(
        name="dapo",
        advantage="grpo",
        loss="ppo_clip",
        ratio="token",
        aggregation="token_mean",
        clip_low=0.2,
        clip_high=0.28,
        clip_dual=10.0,
        proximal="current",
        correction="token_tis",
        correction_cap=2.0,
        correction_floor=0.0,
        filter="equal_rewards",
        overlong_buffer=0,
        entropy_bonus=0.0,
    ),
    # Shao et al. 2024, arXiv:2402.03300, without the KL term.
    "grpo": Algo(
        name="grpo",
        advantage="grpo",
        loss="ppo_clip",
        ratio="token",
        aggregation="sequence_mean",
        clip_low=0.2,
        clip_high=0.2,
        clip_dual=0.0,
        proximal="current",
        correction="token_tis",
        correction_cap=2.0,
        correction_floor=0.0,
        filter="none",
        overlong_buffer=0,
        entropy_bonus=0.0,
    ),
}


def resolve(algo: Algo) -> Algo:
    """Fills every key that is None from the preset `algo.name`. Resolving twice changes nothing.

    Raises:
        ValueError: the preset or a part is unknown (the nearest name is given), or the parts contradict
            each other.
    """
    _known("name", algo.name, tuple(PRESETS))
    chosen = {key: value for key, value in algo if value is not None}
    resolved = PRESETS[algo.name].model_copy(update=chosen)
    for key, names in PARTS.items():
        _known(key, getattr(resolved, key), names)
    if resolved.loss == "reinforce" and resolved.proximal == "behaviour":
        raise ValueError(
            "algo.loss = 'reinforce' with algo.proximal = 'behaviour' would leave stale tokens uncorrected, "
            "because that loss has no ratio; use algo.proximal = 'current' with algo.correction = 'token_tis'"
        )
    if resolved.loss == "reinforce" and resolved.ratio == "sequence":
        raise ValueError(
            "algo.loss = 'reinforce' has no ratio, so algo.ratio = 'sequence' cannot apply; use 'token'"
        )
    if resolved.ratio == "sequence" and resolved.proximal == "current":
        raise ValueError(
            "algo.ratio = 'sequence' with algo.proximal = 'current' would clip nothing, because every ratio to "
            "the current policy is 1; use algo.proximal = 'behaviour'"
        )
    if resolved.clip_dual and resolved.clip_dual <= 1:
        raise ValueError(f"algo.clip_dual = {resolved.clip_dual}: must be above 1 (usual: 3 to 10), or 0 for off")
    return resolved


def _known(key: str, value: str, names: tuple[str, ...]) -> None:
    if value in names:
        return
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"algo.{key} = {value!r} is unknown; {hint}allowed: {', '.join(names)}")
