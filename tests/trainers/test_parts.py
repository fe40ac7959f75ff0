"""The torch-free parts: presets, filters, shaping; and that naming them never loads torch."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Algo
from asyncrl.trainers.advantages import ADVANTAGES
from asyncrl.trainers.aggregation import AGGREGATIONS
from asyncrl.trainers.corrections import CORRECTIONS
from asyncrl.trainers.filters import FILTERS, group_filter
from asyncrl.trainers.losses import LOSSES
from asyncrl.trainers.presets import PARTS, PRESETS, resolve
from asyncrl.trainers.shaping import overlong_penalty


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_preset_leaves_nothing_open(name):
    resolved = resolve(Algo(name=name))
    assert None not in resolved.model_dump().values()
    assert resolve(resolved) == resolved


def test_dapo_is_what_its_paper_says_with_the_correction_on():
    dapo = resolve(Algo(name="dapo"))
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation, dapo.filter) == (
        0.2,
        0.28,
        "token_mean",
        "equal_rewards",
    )
    assert (dapo.correction, dapo.correction_cap) == ("token_tis", 2.0)


def test_a_key_of_the_user_replaces_one_part_of_the_preset():
    chosen = resolve(Algo(name="dapo", clip_high=0.5, filter="none", overlong_buffer=4))
    assert (chosen.clip_high, chosen.filter, chosen.overlong_buffer) == (0.5, "none", 4)
    assert chosen.clip_low == 0.2


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        (Algo(name="dappo"), "did you mean 'dapo'"),
        (Algo(loss="ppo_clipp"), "did you mean 'ppo_clip'"),
        (Algo(advantage="zzz"), "algo.advantage = 'zzz' is unknown; allowed: grpo"),
        (Algo(loss="reinforce", proximal="behaviour"), "uncorrected"),
        (Algo(clip_dual=0.5), "clip_dual"),
        (Algo(ratio="sequence"), "proximal"),
        (Algo(ratio="sequence", loss="reinforce"), "has no ratio"),
    ],
)
def test_a_wrong_name_or_contradiction_is_refused_with_the_way_out(algo, message):
    with pytest.raises(ValueError, match=message):
        resolve(algo)


def test_every_name_has_a_function_and_every_function_a_name():
    registries = {
        "advantage": ADVANTAGES,
        "loss": LOSSES,
        "aggregation": AGGREGATIONS,
        "correction": CORRECTIONS,
        "filter": FILTERS,
    }
    assert {key: set(names) for key, names in PARTS.items()} == {key: set(r) for key, r in registries.items()}


def test_the_parts_that_the_hub_imports_do_not_load_torch():
    parts = "asyncrl.trainers.presets, asyncrl.trainers.filters, asyncrl.trainers.shaping, asyncrl.packing"
    code = f"import sys, {parts}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 1.0, 1.0], "equal rewards"),
        ([0.0, 1.0], None),
        ([1.0, None, 1.0], "equal rewards"),
        ([1.0, None, 0.0], None),
        ([0.5], "equal rewards"),
        ([None, None], "no rewards"),
    ],
)
def test_dynamic_sampling_drops_groups_without_a_difference(rewards, reason):
    assert group_filter("equal_rewards")(rewards) == reason
    assert group_filter("none")(rewards) is None


@pytest.mark.parametrize(
    ("sampled", "penalty"), [(1, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (40, -1.0)]
)
def test_the_overlong_penalty_grows_over_the_buffer(sampled, penalty):
    assert overlong_penalty(sampled, max_tokens=16, buffer=4) == penalty


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 100))
def test_the_overlong_penalty_never_leaves_its_range(sampled, max_tokens, buffer):
    assert -1 <= overlong_penalty(sampled, max_tokens, buffer) <= 0
