"""What is refused and decided about the scorer before anything starts: model, device, address, settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq
from transformers import Qwen3Config

from asyncrl import cli, scorer_launch
from asyncrl.config import Config
from asyncrl.journal import Journal
from asyncrl.process import EXIT_USAGE, hold_run
from asyncrl.scorer_launch import check_device, check_reward_model, with_endpoint, with_endpoint_again
from asyncrl.settings import UsageError, read
from asyncrl.toy import init_model, write_tokenizer

HUB = 9
"""The hub's port where it does not matter."""


def classifier(folder: Path, outputs: int = 1) -> Path:
    """A reward model's folder without the weights, which nothing here looks at."""
    config = Qwen3Config(num_labels=outputs, architectures=["Qwen3ForSequenceClassification"])
    config.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    check_reward_model(classifier(tmp_path / "model"))
    with pytest.raises(UsageError, match=r"it has no config\.json"):
        check_reward_model(tmp_path)
    with pytest.raises(UsageError, match="its architecture is Qwen3ForCausalLM; give the Hugging Face folder"):
        check_reward_model(init_model(tmp_path / "policy", hidden=32, layers=1))
    for outputs in (2, 3):
        with pytest.raises(UsageError, match=f"it has {outputs} outputs"):
            check_reward_model(classifier(tmp_path / str(outputs), outputs))


def _config(**reward: Any) -> Config:
    return Config.model_validate({"reward": reward})


def test_a_run_with_a_model_gets_an_address_and_keeps_one_that_it_was_given() -> None:
    assert with_endpoint(_config(), HUB).reward.endpoint is None
    assert with_endpoint(_config(endpoint="tcp://elsewhere:1"), HUB).reward.endpoint == "tcp://elsewhere:1"
    placed = with_endpoint(_config(model="m"), HUB)
    assert placed.reward.endpoint is not None
    assert with_endpoint(placed, HUB) == placed
    with pytest.raises(UsageError, match=r"the scorer cannot listen there .* leave out reward.model"):
        with_endpoint(_config(model="m", endpoint="tcp://192.0.2.1:5600"), HUB)


def test_a_resumed_run_whose_address_is_taken_gets_and_stores_another(tmp_path: Path) -> None:
    config = with_endpoint(_config(model="m"), HUB)
    Journal.create(tmp_path / "run.db", "run", config.model_dump_json()).close()
    assert with_endpoint_again(config, tmp_path, HUB) == config
    taken = zmq.Context.instance().socket(zmq.ROUTER)
    taken.bind(str(config.reward.endpoint))
    lock = hold_run(tmp_path)
    with pytest.raises(UsageError, match="is being run by another hub"):
        with_endpoint_again(config, tmp_path, HUB)
    lock.close()
    moved = with_endpoint_again(config, tmp_path, HUB)
    taken.close(linger=0)
    assert moved.reward.endpoint != config.reward.endpoint
    journal = Journal.open(tmp_path / "run.db")
    assert Config.model_validate_json(journal.get("config_json")) == moved
    journal.close()


def test_the_scorer_never_gets_a_port_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = iter([5600, 5601, 5602, 5601, 5603])
    monkeypatch.setattr(scorer_launch, "free_port_pair", lambda _: next(ports))
    placed = with_endpoint(_config(model="m"), 5600)
    assert placed.reward.endpoint == "tcp://127.0.0.1:5602"
    for hub in (5601, 5602):
        with pytest.raises(UsageError, match=f"the hub has {hub} and {hub + 1}"):
            with_endpoint(placed, hub)
    Journal.create(tmp_path / "run.db", "run", placed.model_dump_json()).close()
    assert with_endpoint_again(placed, tmp_path, 5601).reward.endpoint == "tcp://127.0.0.1:5603"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"reward.model_device": "gpu", "reward.model": "m"}, "cpu, cuda or cuda:1"),
        ({"reward.model_device": "cuda:", "reward.model": "m"}, "cpu, cuda or cuda:1"),
        ({"reward.model_device": "cuda"}, "reward.model_device = cuda is for the scorer that the run starts, and"),
        (
            {"reward.model_batch": "4", "reward.endpoint": "tcp://a:1"},
            "reward.model_batch = 4 is for the scorer that",
        ),
        ({"reward.weights": '{"model": 0.5}'}, "reward.weights has model = 0.5, and there is no reward model"),
        ({"reward.endpoint": "tcp://10.0.0.7:0"}, "tcp://10.0.0.7:0 is no address that others can connect to"),
        ({"reward.endpoint": "tcp://10.0.0.7:65536"}, "and a port from 1 to 65535"),
        ({"reward.endpoint": "tcp://0.0.0.0:5600"}, "tcp://0.0.0.0:5600 is no address that others can connect to"),
        ({"reward.endpoint": "tcp://*:5600"}, "tcp://host:port"),
        ({"reward.endpoint": "tcp://a b:5600"}, "tcp://host:port"),
        ({"reward.endpoint": "tcp://:::5600"}, "tcp://host:port"),
        (
            {"reward.endpoint": "tcp://127.0.0.1:5600", "hub.port": "5600"},
            "ports 5600 and 5601 of 127.0.0.1 are the",
        ),
        ({"reward.endpoint": "tcp://127.0.0.1:5601", "hub.port": "5600"}, "are the hub's"),
    ],
)
def test_settings_that_cannot_work_or_would_do_nothing_are_refused(flags: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read([], dict(flags))
    assert said in str(caught.value)


def test_settings_of_the_scorer_that_can_work_are_taken() -> None:
    for endpoint in ("tcp://scorer.example:65535", "tcp://10.0.0.7:5600"):
        read([], {"reward.endpoint": endpoint, "hub.port": "5600", "reward.weights": '{"model": 0.5}'})
    read([], {"reward.model": "m", "reward.model_device": "cuda:1", "reward.model_batch": "4"})


def test_a_gpu_that_this_process_cannot_see_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    for device in ("cpu", "cuda", "cuda:1"):
        check_device(device)
    with pytest.raises(UsageError, match=r"CUDA_VISIBLE_DEVICES = '4,5' leaves cuda:0 to cuda:1 to choose from"):
        check_device("cuda:2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_device("cpu")
    with pytest.raises(UsageError, match=r"'' hides all GPUs; set --reward\.model_device cpu"):
        check_device("cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    check_device("cuda:7")


def test_a_dry_run_refuses_a_hidden_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = ["--reward.model", str(classifier(tmp_path / "model")), "--reward.model_device", "cuda"]
    assert cli.main(["train", "--dry-run", "--engine", "transformers", *model]) == EXIT_USAGE
    assert "hides all GPUs" in capsys.readouterr().err


def test_a_hub_by_itself_starts_no_scorer_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(classifier(tmp_path / "model"))
    runs = ["--run.dir", str(tmp_path / "runs")]
    assert cli.main(["hub", "--model", model, "--reward.model", model, *runs]) == EXIT_USAGE
    assert "start `asyncrl scorer` by hand and give its address as --reward.endpoint" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
