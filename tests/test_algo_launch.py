"""An algorithm and the settings around it: what is refused, and what is handed on."""

from typing import Any

import pytest

from asyncrl.algo_launch import COMPARING, fitted
from asyncrl.config import Config
from asyncrl.launch import resolved
from asyncrl.settings import UsageError
from asyncrl.trainers.parts import ADVANTAGES
from asyncrl.trainers.presets import resolve


def config(algo: dict[str, Any], **sections: Any) -> Config:
    raw = Config.model_validate({"algo": algo, **sections})
    return raw.model_copy(update={"algo": resolve(raw.algo)})


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_group_of_one_is_refused_by_the_estimators_that_compare_it(advantage: str) -> None:
    alone = config({"name": "grpo", "advantage": advantage}, train={"group_size": 1})
    if advantage in {"reinforce", "reinforce_pp", "remax", "gae", "vtrace"}:
        assert fitted(alone) == alone
    else:
        with pytest.raises(UsageError, match=rf"group_size = 1 with algo\.advantage = '{advantage}'"):
            fitted(alone)
    assert set(ADVANTAGES) >= COMPARING


def test_pairs_are_refused_in_minibatches_and_with_a_divergence_in_the_reward() -> None:
    pairs = {"name": "online-dpo"}
    assert fitted(config(pairs)) == config(pairs)
    with pytest.raises(UsageError, match=r"learner\.minibatches = 2: the scale of a pair"):
        fitted(config(pairs, learner={"minibatches": 2}))
    with pytest.raises(UsageError, match="pairs of episodes whose rewards are equal"):
        fitted(config(pairs | {"kl": "k1", "kl_in": "reward"}))
    in_loss = config(pairs | {"kl": "k3"})
    assert fitted(in_loss) == in_loss


def test_the_weights_of_the_rewards_reach_gdpo_unless_it_has_its_own() -> None:
    reward = {"weights": {"length": -0.01, "right": 2.0}}
    given = Config.model_validate({"algo": {"name": "gdpo"}, "reward": reward})
    once = resolved(given, here=False)
    assert once.algo.advantage_args == reward
    assert resolved(once, here=False) == once
    own = {"name": "gdpo", "advantage_args": {"weights": {"right": 1.0}}}
    assert fitted(config(own, reward=reward)).algo.advantage_args == {"weights": {"right": 1.0}}


@pytest.mark.parametrize(("name", "wanted"), [("remax", True), ("grpo", False)])
def test_the_greedy_baseline_is_what_the_estimator_needs_and_nothing_else(name: str, wanted: bool) -> None:
    assert config({"name": name}).algo.greedy_baseline is wanted
    assert config({"name": name, "greedy_baseline": wanted}) == config({"name": name})
    with pytest.raises(ValueError, match=rf"algo\.greedy_baseline = {not wanted}, but algo\.advantage = '{name}'"):
        config({"name": name, "greedy_baseline": not wanted})


def test_a_filter_of_equal_rewards_needs_more_than_one_episode() -> None:
    alone = config({"name": "reinforce++", "filter": "equal_rewards"}, train={"group_size": 1})
    with pytest.raises(UsageError, match=r"would drop every group"):
        fitted(alone)
