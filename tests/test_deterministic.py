"""What a deterministic run sets by itself, and what it refuses."""

from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.deterministic import settled
from asyncrl.launch import resolved
from asyncrl.settings import UsageError


def _config(**sections: Any) -> Config:
    return Config.model_validate({"run": {"deterministic": True}} | sections)


def test_what_the_user_left_open_is_set_to_what_the_mode_needs() -> None:
    found = settled(_config())
    assert (found.staleness.max_lag, found.generator.engine, found.weights.kv) == (0, "transformers", "recompute")
    assert settled(_config(generator={"engine": "auto"})).generator.engine == "transformers"


def test_a_stored_deterministic_configuration_is_settled_already() -> None:
    once = settled(_config())
    assert settled(Config.model_validate_json(once.model_dump_json())) == once


def test_another_run_keeps_its_settings() -> None:
    assert settled(Config()) == Config()


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"staleness": {"max_lag": 1}}, r"staleness.max_lag = 1 .* needs 0: which version"),
        ({"generator": {"engine": "vllm"}}, r"generator.engine = 'vllm' .* only the embedded engine"),
        ({"generator": {"engine": "mine.py:open"}}, "only the embedded engine"),
        ({"generator": {"device": "cuda"}}, "generator.device = 'cuda'"),
        ({"learner": {"device": "cuda"}}, "learner.device = 'cuda'"),
        ({"generator": {"threads": 2}}, "generator.threads = 2"),
        ({"learner": {"threads": 4}}, "learner.threads = 4"),
        ({"weights": {"kv": "keep"}}, "weights.kv = 'keep'"),
        ({"env": {"pass_rate": (0.1, 0.9)}}, r"env.pass_rate = \(0.1, 0.9\) .* needs that it is not given"),
        ({"reward": {"model": "folder"}}, "reward.model = 'folder'"),
        ({"reward": {"endpoint": "tcp://there:5000"}}, "reward.endpoint = 'tcp://there:5000'"),
    ],
)
def test_what_contradicts_the_mode_is_refused_with_the_reason(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settled(_config(**sections))


def test_a_contradiction_stops_the_launch() -> None:
    with pytest.raises(UsageError, match=r"Leave staleness\.max_lag out, or --deterministic"):
        resolved(_config(staleness={"max_lag": 3}))
