"""The reward model without its sockets: its batches, rows that it cannot compute, and models of other kinds."""

from __future__ import annotations

import json
import random
import string
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from asyncrl.chat import ChatFormat
from asyncrl.messages import Score, Scored
from asyncrl.scorer_launch import check_reward_model
from asyncrl.scorer_model import RewardModel
from asyncrl.toy import PAD_ID, VOCAB_SIZE, init_model, write_tokenizer

Conversation = list[dict[str, Any]]


def make_reward_model(folder: Path, pad: int | None = PAD_ID) -> Path:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, num_labels=1, pad_token_id=pad,
        initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(5)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "model")


def said(text: str) -> Conversation:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]


def ragged(count: int) -> list[Conversation]:
    draw = random.Random(1)
    return [said("".join(draw.choices(string.ascii_letters, k=draw.randint(1, 150)))) for _ in range(count)]


def answers(model: RewardModel, conversations: list[Conversation]) -> list[Scored]:
    return model.answers([Score(i, conversation) for i, conversation in enumerate(conversations)])


def alone(folder: Path, conversations: list[Conversation]) -> list[float]:
    """The slow reference: each conversation by itself, without any padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    chat = ChatFormat(folder)
    with torch.no_grad():
        rows = [torch.tensor([chat.conversation_ids(conversation)]) for conversation in conversations]
        return [float(model(input_ids=row).logits) for row in rows]


def test_rows_that_do_not_fit_into_memory_together_are_halved(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, conversations = RewardModel(str(reward_model), "cpu"), ragged(7)
    forward, sizes = model._model.forward, []

    def small(input_ids: torch.Tensor, **rest: Any) -> Any:
        sizes.append(len(input_ids))
        if len(input_ids) > 2 or input_ids.shape[1] > 180:
            raise torch.OutOfMemoryError("out of memory")
        return forward(input_ids=input_ids, **rest)

    monkeypatch.setattr(model._model, "forward", small)
    found = answers(model, [*conversations, said("x" * 200)])
    assert [answer.request for answer in found] == list(range(8))
    assert [answer.score for answer in found[:7]] == pytest.approx(alone(reward_model, conversations), abs=1e-5)
    assert "do not fit into the scorer's memory" in found[7].reason
    assert sizes[0] == 8


def test_a_row_that_the_model_fails_on_is_answered_with_the_reason_and_harms_no_other(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, conversations = RewardModel(str(reward_model), "cpu"), ragged(9)
    bad = model.tokens(conversations[4])
    forward = model._model.forward

    def fails(input_ids: torch.Tensor, **rest: Any) -> Any:
        if any(row[: len(bad)].tolist() == bad for row in input_ids):
            raise IndexError("index out of range in self")
        return forward(input_ids=input_ids, **rest)

    monkeypatch.setattr(model._model, "forward", fails)
    found, expected = answers(model, conversations), alone(reward_model, conversations)
    assert found[4] == Scored(4, None, "the reward model raised IndexError: index out of range in self")
    assert [a.score for a in found if a.request != 4] == pytest.approx(expected[:4] + expected[5:], abs=1e-5)


@pytest.mark.parametrize("error", [torch.AcceleratorError("lost"), RuntimeError("CUDA error: misaligned address")])
def test_a_device_that_failed_is_no_rows_fault(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(**_: Any) -> Any:
        raise error

    model = RewardModel(str(reward_model), "cpu")
    monkeypatch.setattr(model._model, "forward", fails)
    with pytest.raises(type(error), match=str(error)):
        answers(model, ragged(2))


def test_halves_are_computed_without_the_memory_of_the_attempt_that_failed(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RewardModel(str(reward_model), "cpu")
    forward, hidden, still_held = model._model.forward, [], []

    def small(input_ids: torch.Tensor, **rest: Any) -> Any:
        still_held.append([size for size, state in hidden if state() is not None])
        if len(input_ids) > 1:
            state = torch.zeros(len(input_ids), 1000)
            hidden.append((len(input_ids), weakref.ref(state)))
            raise torch.OutOfMemoryError("out of memory")
        return forward(input_ids=input_ids, **rest)

    monkeypatch.setattr(model._model, "forward", small)
    answers(model, ragged(4))
    assert [size for size, _ in hidden] == [4, 2, 2]
    assert still_held == [[]] * 7


def test_positions_that_begin_after_the_padding_id_are_fewer_than_the_configuration_says(tmp_path: Path) -> None:
    config = RobertaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=PAD_ID + 1 + 64, type_vocab_size=1, num_labels=1, pad_token_id=PAD_ID,
    )  # fmt: skip
    torch.manual_seed(5)
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    model = RewardModel(str(tmp_path), "cpu")
    room = 64 - len(model.tokens(said("")))
    found = answers(model, [said("x" * room), said("x" * (room + 1))])
    assert found[0].score is not None
    assert found[1].reason == "it has 65 tokens, and the reward model takes 1 to 64"


def test_a_token_that_the_model_does_not_know_is_named_before_it_can_end_a_gpu(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RewardModel(str(reward_model), "cpu")
    monkeypatch.setattr(model._chat, "conversation_ids", lambda _: [1, VOCAB_SIZE])
    assert answers(model, [said("4")])[0].reason == (
        f"it has the token {VOCAB_SIZE}, and the reward model has embeddings of {VOCAB_SIZE}"
    )


def test_a_model_without_a_padding_token_scores_ragged_batches_all_the_same(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", pad=None)
    found = answers(RewardModel(str(folder), "cpu"), ragged(9))
    assert [answer.score for answer in found] == pytest.approx(alone(folder, ragged(9)), abs=1e-5)


def test_a_classifier_whose_head_was_never_trained_is_refused(tmp_path: Path) -> None:
    policy = init_model(tmp_path / "policy", hidden=32, layers=1)
    config = json.loads((policy / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "good"}}
    (policy / "config.json").write_text(json.dumps(config))
    check_reward_model(policy)
    with pytest.raises(ValueError, match=r"1 outputs and lacks score.weight; a reward model is a trained"):
        RewardModel(str(policy), "cpu")
