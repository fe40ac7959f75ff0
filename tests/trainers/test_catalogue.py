"""The table of parts against the functions it names, and what resolving a preset promises."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.config import Algo
from asyncrl.trainers.about import ABOUT
from asyncrl.trainers.algorithm import build
from asyncrl.trainers.catalogue import GROUPS, SEVERAL, complete, find
from asyncrl.trainers.covariance_losses import MARKERS
from asyncrl.trainers.parts import PARTS
from asyncrl.trainers.presets import KINDS, PRESETS, resolve
from asyncrl.trainers.tokens import Tokens

TRAINERS = Path(__file__).parents[2] / "trainers"
ENTRIES = [
    pytest.param(part, id=f"{kind}-{name}") for kind, known in PARTS.items() for name, part in known.items()
]
LONGEST_FUNCTION, LONGEST_PRESET, LONGEST_FILE = 30, 15, 300


def keywords(function):
    return {key: p for key, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}


# ---- the table and the functions -------------------------------------------------------------------


@pytest.mark.parametrize("part", ENTRIES)
def test_a_part_has_a_function_with_exactly_its_parameters_and_their_defaults_in_the_table_only(part):
    found = keywords(part.function())
    assert set(found) == set(part.parameters)
    assert all(parameter.default is parameter.empty for parameter in found.values())


@pytest.mark.parametrize("part", ENTRIES)
def test_a_part_says_what_it_is_and_its_defaults_are_in_their_ranges(part):
    assert part.line
    assert inspect.getdoc(part.function())
    assert [parameter.check(parameter.default) for parameter in part.parameters.values()] == [None] * len(
        part.parameters
    )


def test_markers_take_parameters_of_their_loss():
    for name, marker in MARKERS.items():
        assert set(keywords(marker)) <= set(PARTS["loss"][name].parameters)


def test_parts_that_can_be_named_together_share_no_parameter():
    for kind in SEVERAL:
        owned = [key for part in PARTS[kind].values() for key in part.parameters]
        assert len(owned) == len(set(owned))


def test_every_kind_has_parts_a_setting_and_an_entry_point_group():
    assert set(PARTS) == set(GROUPS) == set(KINDS)
    assert set(KINDS) <= set(Algo.model_fields)


def test_naming_and_checking_parts_loads_no_torch():
    modules = ", ".join(
        f"asyncrl.trainers.{name}" for name in ("presets", "catalogue", "parts", "filters", "about")
    )
    code = (
        f"import sys, asyncrl.config, asyncrl.trainers.presets as p, {modules}\n"
        "for name in p.PRESETS: p.resolve(asyncrl.config.Algo(name=name))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0


# ---- size ------------------------------------------------------------------------------------------


def length(node):
    """Lines of a node's code, without its docstring."""
    first = node.body[0] if isinstance(node, ast.FunctionDef) else None
    has_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if has_text else 0)


@pytest.mark.parametrize("path", sorted(TRAINERS.glob("*.py")), ids=lambda path: path.name)
def test_a_file_and_its_functions_fit_the_head(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert {f.name: length(f) for f in functions if length(f) > LONGEST_FUNCTION} == {}


def test_a_preset_is_a_few_lines():
    [table] = [
        node.value
        for node in ast.walk(ast.parse((TRAINERS / "presets.py").read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "PRESETS"
    ]
    assert len(table.keys) == len(PRESETS)
    assert max(length(value) for value in table.values) <= LONGEST_PRESET


# ---- presets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_preset_leaves_nothing_open_and_resolving_again_changes_nothing(name):
    resolved = resolve(Algo(name=name))
    assert None not in resolved.model_dump().values()
    assert resolve(resolved) == resolved


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_built(name):
    assert build(Algo(name=name)).settings == resolve(Algo(name=name))


def test_every_preset_has_a_line_and_a_paper():
    assert list(ABOUT) == list(PRESETS)
    assert all(line and "arXiv:" in paper for line, paper in ABOUT.values())


def test_a_parameter_of_the_user_changes_one_number_of_the_preset():
    chosen = resolve(Algo(name="dapo", loss_args={"clip_high": 0.5}))
    assert chosen.loss_args == {"clip_low": 0.2, "clip_high": 0.5, "clip_dual": 10.0}


def test_a_part_that_the_user_names_brings_its_own_defaults():
    chosen = resolve(Algo(name="dapo", loss="cispo", proximal="behaviour"))
    assert chosen.loss_args == {"clip_low": 1.0, "clip_high": 0.2}
    assert resolve(Algo(name="dapo", loss="ppo_clip")).loss_args["clip_high"] == 0.28


# ---- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        (Algo(name="grpoo"), "algo.name = 'grpoo' is unknown; did you mean 'grpo'"),
        (Algo(loss="ppo_clipp"), "algo.loss = 'ppo_clipp' is unknown; did you mean 'ppo_clip'"),
        (Algo(advantage="zzz"), "algo.advantage = 'zzz' is unknown; allowed: dpo, dr_grpo"),
        (Algo(rejection="token_k1,geometrik"), "did you mean 'geometric'"),
        (Algo(kl="k4"), "algo.kl = 'k4' is unknown"),
        (Algo(loss_args={"clip_hihg": 0.3}), "has 'clip_hihg'; did you mean 'clip_high'"),
        (Algo(loss_args={"tau": 1.0}), "takes clip_low"),
        (Algo(filter_args={"low": 0.1}, filter="none"), "takes no parameters"),
        (Algo(loss_args={"clip_low": 1.5}), "clip_low = 1.5 must be from 0 to 1"),
        (Algo(loss_args={"clip_high": float("nan")}), "clip_high = nan must be from 0"),
        (Algo(loss_args={"clip_high": "wide"}), "must be a number"),
        (Algo(loss_args={"clip_high": True}), "must be a number"),
        (Algo(shaping="overlong", shaping_args={"overlong_buffer": 2.5}), "must be a whole number"),
        (Algo(name="ppo", advantage_args={"whiten": 1}), "must be true or false"),
        (Algo(name="gdpo", advantage_args={"weights": 1}), "must be a table of numbers"),
        (Algo(loss_args={"clip_dual": 0.5}), "clip_dual"),
        (Algo(loss="gspo", proximal="current"), "would clip nothing"),
        (Algo(loss="reinforce", proximal="behaviour"), "uncorrected"),
        (Algo(kl="full", kl_in="reward"), "use 'k1'"),
        (Algo(kl="k1"), "expected gradient is 0"),
        (Algo(kl_target=0.1), "are for a KL term"),
        (Algo(reference_every=5), "no part needs a reference"),
        (Algo(name="rloo", proximal="loglinear"), "has no ratio"),
        (Algo(name="cispo", proximal="behaviour", correction="icepop"), "nothing to correct"),
        (Algo(name="prime", filter_args={"low": 0.9}), "low = 0.9 is above high = 0.8"),
        (Algo(correction="icepop", correction_args={"low": 6.0}), "nothing lies between them"),
        (Algo(shaping="clip", shaping_args={"reward_low": 2.0}), "is above"),
        (Algo(shaping="overlong,overlong"), "names a part twice"),
        (Algo(name="gdpo", advantage_args={"weights": {"x": "heavy"}}), "must be a table of numbers"),
        (Algo(name="gdpo", shaping="overlong"), "would do nothing"),
        (Algo(name="online-dpo", rejection="veto"), "no DPO loss"),
    ],
)
def test_what_no_part_takes_or_what_contradicts_itself_is_refused_with_the_way_out(algo, message):
    with pytest.raises(ValueError, match=message):
        resolve(algo)


# ---- plug-ins --------------------------------------------------------------------------------------

PLUGIN = '''
import torch

def scaled(logp, tokens, *, strength=2.0):
    """-strength A log pi."""
    return -strength * tokens.advantage * logp, torch.zeros_like(logp, dtype=torch.bool)

def whole(logp, tokens):
    return -tokens.advantage * logp, torch.zeros_like(logp, dtype=torch.bool)

whole.level = "sequence"
whole.needs = ("reference",)

def open_ended(logp, tokens, *, strength):
    return logp

number = 3
'''


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "my_losses.py"
    path.write_text(PLUGIN)
    return path


@pytest.mark.parametrize(("given", "strength"), [({}, 2.0), ({"strength": 0.5}, 0.5)])
def test_a_function_of_a_file_is_a_part_with_its_own_parameters(plugin, given, strength):
    algo = Algo(name="grpo", loss=f"{plugin}:scaled", loss_args=given)
    assert resolve(algo).loss_args == {"strength": strength}
    assert find("loss", f"{plugin}:scaled").line == "-strength A log pi."
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = Tokens(logp.detach().clone(), torch.ones(2), torch.ones(2), [2])
    build(algo).token_loss(logp, torch.zeros(2), tokens)[0].sum().backward()
    assert logp.grad.tolist() == [-strength, -strength]


def test_a_plugin_says_what_it_must_see_and_what_it_needs(plugin):
    built = build(Algo(name="grpo", loss=f"{plugin}:whole", proximal="behaviour", correction="none"))
    assert built.sequence_level
    assert built.needs == {"reference"}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("scaled", {"strenght": 1.0}, "did you mean 'strength'"),
        ("scaled", {"strength": "much"}, "must be a number"),
        ("open_ended", {}, "its parameter 'strength' needs a default"),
        ("number", {}, "is a int, not a function"),
        ("scalded", {}, "did you mean 'scaled'"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused(plugin, name, given, message):
    with pytest.raises(ValueError, match=message):
        complete("loss", f"{plugin}:{name}", given)


def test_a_preset_of_a_file_is_a_preset(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from asyncrl.config import Algo\nMINE = Algo(loss='dppo_kl', loss_args={'delta': 0.1})\nNOT = 3\n"
    )
    chosen = resolve(Algo(name=f"{path}:MINE"))
    assert (chosen.loss, chosen.advantage) == ("dppo_kl", "grpo")
    assert chosen.loss_args == {"delta": 0.1, "cap": 20.0}
    with pytest.raises(ValueError, match=r"not an asyncrl\.config\.Algo"):
        resolve(Algo(name=f"{path}:NOT"))
