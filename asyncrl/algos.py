"""The text of `asyncrl algos`: all presets and parts, and what one preset is made of.

Everything here is read from the tables of `asyncrl.trainers`; nothing is kept twice. The list loads no torch. One
preset's text does, because it shows the docstrings of the functions, which state the formulas. Called by the
command line.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.config import Algo
from asyncrl.envs.registry import names
from asyncrl.trainers.about import ABOUT
from asyncrl.trainers.catalogue import GROUPS, Kind, Part, find, own
from asyncrl.trainers.parts import PARTS
from asyncrl.trainers.presets import GROUP, KINDS, needs, parts, resolve

NEEDS = {
    "logp": "a forward pass over the batch before the update",
    "squares": "sums of squared probabilities from that pass",
    "reference": "log-probs of a reference model",
    "reference_model": "the logits of a reference model",
    "value": "a critic, trained beside the policy",
    "process": "a process reward model, trained beside the policy",
    "greedy": "one greedy episode of each task, which is not trained",
}
"""What `catalogue.Part.needs` means, in words."""
INDENT = "    "
WIDTH = 110


def algos_text() -> str:
    """All presets and all parts with their parameters, installed plug-ins among them."""
    presets = [(name, f"{line} ({paper})") for name, (line, paper) in ABOUT.items()]
    presets += [(name, f"a plug-in of the group {GROUP}") for name in names(GROUP)]
    blocks = ["presets: --algo NAME; `asyncrl algos show NAME` explains one", *_columns(presets)]
    for kind in KINDS:
        blocks += ["", f"{kind}: --algo.{kind} NAME. {Algo.model_fields[kind].description}"]
        blocks += _columns(_rows(kind))
    return "\n".join([*blocks, "", "A parameter of a part: --algo.loss_args.clip_high 0.3"])


def show_text(name: str) -> str:
    """What a preset is made of: its parts with their parameters, papers and formulas, and what it needs.

    Raises:
        ValueError: there is no such preset, or it cannot be used.
    """
    algo = resolve(Algo(name=name))
    line, paper = ABOUT.get(name, ("a plug-in", ""))
    wanted = [NEEDS[need] for need in NEEDS if need in needs(algo)] or ["nothing but the policy"]
    blocks = [f"{name}: {line}" + (f" ({paper})" if paper else ""), f"needs: {'; '.join(wanted)}"]
    for kind, chosen, part in parts(algo):
        if chosen != "none":
            blocks += ["", f"{kind} = {chosen}: {_described(part)}"]
            blocks += _details(part, own(part, getattr(algo, f"{kind}_args", {})))
    return "\n".join([*blocks, "", *_settings(algo)])


def _rows(kind: Kind) -> list[tuple[str, str]]:
    """Names and descriptions of a kind's parts; the parameters are a second line."""
    rows = []
    for name in [*PARTS[kind], *(name for name in names(GROUPS[kind]) if name not in PARTS[kind])]:
        try:
            part = find(kind, name)
        except ValueError as error:
            # A broken plug-in must not hide the others; its own line says what is wrong with it.
            rows.append((name, f"cannot be used: {error}"))
            continue
        rows.append((name, _described(part)))
        if part.parameters:
            rows.append(("", _numbers({key: parameter.default for key, parameter in part.parameters.items()})))
    return rows


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    first = max(len(name) for name, _ in rows) + 4
    found = []
    for name, text in rows:
        lines = textwrap.wrap(text, WIDTH - first)
        found += [f"  {name}".ljust(first) + lines[0], *(" " * first + line for line in lines[1:])]
    return found


def _described(part: Part) -> str:
    return part.line + (f" ({part.paper})" if part.paper else "")


def _numbers(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())


def _details(part: Part, arguments: Mapping[str, Any]) -> list[str]:
    """A part's parameters and the prose of its docstring, which states the formula."""
    paragraphs = (inspect.getdoc(part.function()) or "").split("\n\n")
    sections = ("Args:", "Returns:", "Raises:")
    ends = [i for i, paragraph in enumerate(paragraphs) if paragraph.startswith(sections)]
    prose = "\n\n".join(paragraphs[: ends[0] if ends else None]).splitlines()
    lines = ([_numbers(arguments)] if arguments else []) + prose
    return [f"{INDENT}{line}".rstrip() for line in lines]


def _settings(algo: Algo) -> list[str]:
    """The kinds without a part, and the keys that are no parts; those of the KL term only where there is one."""
    keys: list[str] = [kind for kind in KINDS if getattr(algo, kind) == "none"]
    keys += ["proximal", "entropy_bonus"]
    if algo.kl != "none":
        keys += ["kl_in", "kl_coef", "kl_target", "kl_horizon", "reference_every"]
    return [f"{key} = {getattr(algo, key)}" for key in keys]
