"""A real run whose rewards come from a file's functions and from a reward model, with the scorer killed once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from asyncrl.toy import PAD_ID, VOCAB_SIZE, write_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_function.py"
WEIGHTS = {"correct": 2.0, "brief": 0.5, "compute_score": 0.0, "model": -0.25}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_labels=1, pad_token_id=PAD_ID, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(5)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.mark.slow
def test_functions_and_a_model_reward_every_episode_and_a_killed_scorer_is_only_waited_for(
    start, account, reward_model: Path
) -> None:
    run = start(
        "--reward.functions", json.dumps([f"{EXAMPLE}:brief", f"{EXAMPLE}:compute_score"]),
        "--reward.weights", json.dumps(WEIGHTS), "--reward.model", str(reward_model), "--steps", "12",
    )  # fmt: skip
    run.wait_for_step(2)
    run.kill("scorer")
    assert run.wait() == 0, run.output()
    with run.reader() as reader:
        account(reader, 12, 16)
        episodes = reader.episodes(state="trained", limit=1000)
        events = [(event.source, event.what) for event in reader.events()]
    assert ("scorer", "died") in events
    assert events.count(("scorer", "started")) == 2
    assert len(episodes) >= 12 * 16
    for episode in episodes:
        assert set(episode.rewards) == set(WEIGHTS)
        assert episode.reward == pytest.approx(sum(WEIGHTS[name] * x for name, x in episode.rewards.items()))
    assert len({episode.rewards["model"] for episode in episodes}) > len(episodes) / 2
