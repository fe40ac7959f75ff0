"""The scorer as a real process: its scores are the model's own, whatever shares the batch, dies or sends junk."""

from __future__ import annotations

import asyncio
import json
import os
import random
import string
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from asyncrl import cli
from asyncrl.chat import ChatFormat
from asyncrl.config import Config, Reward
from asyncrl.envs.reward_signatures import EpisodeView
from asyncrl.envs.rewards import RewardFault, Rewards
from asyncrl.journal import Journal
from asyncrl.messages import Ack, EpisodeStatus, Score, Scored, Task, encode
from asyncrl.process import EXIT_USAGE, hold_run
from asyncrl.scorer import Scorer, rewards_here, serve
from asyncrl.scorer_client import NotScored, ScorerClient
from asyncrl.scorer_launch import check_reward_model, with_endpoint, with_endpoint_again
from asyncrl.scorer_model import RewardModel
from asyncrl.settings import UsageError
from asyncrl.toy import PAD_ID, VOCAB_SIZE, init_model, write_tokenizer
from asyncrl.transport import free_port_pair

POSITIONS = 256


def make_reward_model(folder: Path, outputs: int = 1, pad: int | None = PAD_ID) -> Path:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=POSITIONS, num_labels=outputs,
        pad_token_id=pad, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(5)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "model")


def view(said: str, question: str = "?") -> EpisodeView:
    prompt, turns = [{"role": "user", "content": question}], [{"role": "assistant", "content": said}]
    return EpisodeView(Task("t", prompt), prompt, turns, "completed")


def ragged(count: int) -> list[EpisodeView]:
    draw = random.Random(1)
    return [view("".join(draw.choices(string.ascii_letters, k=draw.randint(1, 150)))) for _ in range(count)]


def alone(folder: Path, episodes: list[EpisodeView]) -> list[float]:
    """The slow reference: each conversation by itself, without any padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    chat = ChatFormat(folder)
    with torch.no_grad():
        rows = [torch.tensor([chat.conversation_ids(episode.messages)]) for episode in episodes]
        return [float(model(input_ids=row).logits) for row in rows]


class Served:
    """`asyncrl scorer` at one address, started as often as a test likes."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        self.endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-P", "-m", "asyncrl", "scorer", "--model", str(self.folder)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--endpoint", self.endpoint, *arguments], stdout=log, stderr=log
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def served(reward_model: Path) -> Iterator[Served]:
    scorer = Served(reward_model, reward_model.parent / "scorer.log")
    scorer.start("--batch", "8")
    yield scorer
    scorer.kill()


# ---- as a process ----------------------------------------------------------------------------------


async def test_scores_over_the_socket_are_those_of_each_conversation_alone(served: Served) -> None:
    client, episodes = ScorerClient(served.endpoint), ragged(30)
    async with asyncio.timeout(60):
        scores = await asyncio.gather(*(client.reward(episode) for episode in episodes))
    client.close()
    expected = alone(served.folder, episodes)
    assert scores == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1


async def test_a_killed_scorer_is_asked_again_and_its_successor_answers(served: Served) -> None:
    client, episodes = ScorerClient(served.endpoint, resend_after_s=0.2), ragged(3)
    async with asyncio.timeout(90):
        first = await client.reward(episodes[0])
        served.kill()
        later = [asyncio.create_task(client.reward(episode)) for episode in episodes]
        await asyncio.sleep(0.5)  # Long enough for all to be sent into the void, and sent again.
        assert not any(task.done() for task in later)
        served.start()
        scores = await asyncio.gather(*later)
    client.close()
    assert [first, *scores] == pytest.approx(alone(served.folder, [episodes[0], *episodes]), abs=1e-5)


async def test_junk_is_dropped_and_the_scorer_works_on(served: Served) -> None:
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.connect(served.endpoint)
    wrong = Score("one", [{}])  # type: ignore[arg-type]
    for junk in (b"", b"\x80\x04\x95cos\nsystem\n", os.urandom(5000), encode(Ack(1)), encode(wrong)):
        raw.send_multipart([junk, junk])
    client = ScorerClient(served.endpoint)
    async with asyncio.timeout(60):
        assert await client.reward(view("4")) == pytest.approx(alone(served.folder, [view("4")])[0], abs=1e-5)
    assert served.process is not None
    assert served.process.poll() is None
    assert raw.poll(200) == 0
    raw.close(linger=0)
    client.close()


async def test_a_model_that_cannot_be_served_ends_the_process_with_the_reason(
    reward_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = zmq.Context.instance().socket(zmq.ROUTER)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    assert await serve(str(reward_model), f"tcp://127.0.0.1:{port}", "cpu", 4, 30) == EXIT_USAGE
    assert f"cannot be served at tcp://127.0.0.1:{port}: Address already in use" in capsys.readouterr().out
    taken.close(linger=0)
    policy = init_model(tmp_path / "policy", hidden=32, layers=1)
    assert cli.main(["scorer", "--model", str(policy), "--endpoint", "tcp://127.0.0.1:1"]) == EXIT_USAGE
    assert "its architecture is Qwen3ForCausalLM" in capsys.readouterr().err


# ---- in this process -------------------------------------------------------------------------------


async def test_what_cannot_be_scored_is_answered_with_the_reason_and_harms_no_other(reward_model: Path) -> None:
    async with rewards_here(Reward(model=str(reward_model))) as rewards:
        nameless = EpisodeView(Task("t", []), [], [{"content": "no role"}], "completed")
        episodes = [view("4"), view("x" * POSITIONS), nameless, view("5")]
        found = await asyncio.gather(*(rewards.of(each, {}) for each in episodes), return_exceptions=True)
    assert [found[0]["model"], found[3]["model"]] == pytest.approx(  # type: ignore[index]
        alone(reward_model, [view("4"), view("5")]), abs=1e-5
    )
    for fault, said in ((found[1], f"and the reward model takes 1 to {POSITIONS}"), (found[2], "template raised")):
        assert isinstance(fault, RewardFault)
        assert fault.status is EpisodeStatus.FAILED_ENVIRONMENT
        assert str(fault).startswith("reward function 'model' raised NotScored: ")
        assert said in str(fault)


async def test_a_scorer_that_is_not_there_fails_the_episode_at_its_time_limit() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    client = ScorerClient(endpoint, resend_after_s=0.05)
    with pytest.raises(RewardFault, match=f"scorer at {endpoint}.* did not answer within") as caught:
        await Rewards(Reward(endpoint=endpoint, timeout_s=0.3), client.reward).of(view("4"), {})
    assert caught.value.status is EpisodeStatus.FAILED_TIME
    client.close()


class Slow(RewardModel):
    """Answers with its batch's size, when it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may = threading.Semaphore(0)

    def answers(self, requests: Any) -> Any:
        self.batches.append([request.request for request in requests])
        self.may.acquire()
        return [Scored(request.request, float(len(requests))) for request in requests]


async def test_what_waits_is_computed_together_and_a_resend_is_not_computed_twice() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    model = Slow()
    scorer = Scorer(model, endpoint, batch=4, timeout_s=30)
    task = asyncio.create_task(scorer.run())
    client = ScorerClient(endpoint, resend_after_s=0.05)
    scores = [asyncio.create_task(client.reward(view("4"))) for _ in range(6)]
    await asyncio.sleep(0.5)  # Several resends of all six, while the first batch is being computed.
    model.may.release(10)
    assert sorted(await asyncio.gather(*scores))[-1] > 1
    computed = [number for batch in model.batches for number in batch]
    assert sorted(computed) == list(range(6))
    assert all(len(batch) <= 4 for batch in model.batches)
    task.cancel()
    scorer.close()
    client.close()


async def test_a_batch_that_hangs_ends_the_scorer() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    model = Slow()
    scorer = Scorer(model, endpoint, batch=4, timeout_s=0.3)
    client = ScorerClient(endpoint)
    waits = asyncio.create_task(client.reward(view("4")))
    with pytest.raises(TimeoutError):
        await scorer.run()
    waits.cancel()
    model.may.release()
    scorer.close()
    client.close()


def test_rows_that_do_not_fit_into_memory_together_are_halved(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, episodes = RewardModel(str(reward_model), "cpu"), ragged(7)
    forward, sizes = model._model.forward, []

    def small(input_ids: torch.Tensor, **rest: Any) -> Any:
        sizes.append(len(input_ids))
        if len(input_ids) > 2 or input_ids.shape[1] > 180:
            raise torch.OutOfMemoryError("out of memory")
        return forward(input_ids=input_ids, **rest)

    monkeypatch.setattr(model._model, "forward", small)
    conversations = [episode.messages for episode in [*episodes, view("x" * 200)]]
    answers = model.answers([Score(i, conversation) for i, conversation in enumerate(conversations)])
    assert [answer.request for answer in answers] == list(range(8))
    assert [answer.score for answer in answers[:7]] == pytest.approx(alone(reward_model, episodes), abs=1e-5)
    assert "do not fit into the scorer's memory" in answers[7].reason
    assert sizes[0] == 8


def test_a_model_without_a_padding_token_scores_ragged_batches_all_the_same(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", pad=None)
    episodes = ragged(9)
    answers = RewardModel(str(folder), "cpu").answers([Score(i, e.messages) for i, e in enumerate(episodes)])
    assert [answer.score for answer in answers] == pytest.approx(alone(folder, episodes), abs=1e-5)


# ---- before the start ------------------------------------------------------------------------------


def test_what_is_no_reward_model_is_refused(tmp_path: Path, reward_model: Path) -> None:
    check_reward_model(reward_model)
    with pytest.raises(UsageError, match=r"it has no config\.json"):
        check_reward_model(tmp_path)
    with pytest.raises(UsageError, match="its architecture is Qwen3ForCausalLM; give the Hugging Face folder"):
        check_reward_model(init_model(tmp_path / "policy", hidden=32, layers=1))
    for outputs in (2, 3):
        with pytest.raises(UsageError, match=f"it has {outputs} outputs"):
            check_reward_model(make_reward_model(tmp_path / str(outputs), outputs))


def test_a_classifier_whose_head_was_never_trained_is_refused(tmp_path: Path) -> None:
    policy = init_model(tmp_path / "policy", hidden=32, layers=1)
    config = json.loads((policy / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "good"}}
    (policy / "config.json").write_text(json.dumps(config))
    check_reward_model(policy)
    with pytest.raises(ValueError, match=r"1 outputs and lacks score.weight; a reward model is a trained"):
        RewardModel(str(policy), "cpu")


def _config(**reward: Any) -> Config:
    return Config.model_validate({"reward": reward})


def test_a_run_with_a_model_gets_an_address_and_keeps_one_that_it_was_given() -> None:
    assert with_endpoint(_config()).reward.endpoint is None
    assert with_endpoint(_config(endpoint="tcp://elsewhere:1")).reward.endpoint == "tcp://elsewhere:1"
    placed = with_endpoint(_config(model="m"))
    assert placed.reward.endpoint is not None
    assert with_endpoint(placed) == placed
    with pytest.raises(UsageError, match=r"the scorer cannot listen there .* leave out reward.model"):
        with_endpoint(_config(model="m", endpoint="tcp://192.0.2.1:5600"))


def test_a_resumed_run_whose_address_is_taken_gets_and_stores_another(tmp_path: Path) -> None:
    config = with_endpoint(_config(model="m"))
    Journal.create(tmp_path / "run.db", "run", config.model_dump_json()).close()
    assert with_endpoint_again(config, tmp_path) == config
    taken = zmq.Context.instance().socket(zmq.ROUTER)
    taken.bind(str(config.reward.endpoint))
    lock = hold_run(tmp_path)
    with pytest.raises(UsageError, match="is being run by another hub"):
        with_endpoint_again(config, tmp_path)
    lock.close()
    moved = with_endpoint_again(config, tmp_path)
    taken.close(linger=0)
    assert moved.reward.endpoint != config.reward.endpoint
    journal = Journal.open(tmp_path / "run.db")
    assert Config.model_validate_json(journal.get("config_json")) == moved
    journal.close()


async def test_the_scorer_says_why_a_conversation_has_no_score(reward_model: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    scorer = Scorer(RewardModel(str(reward_model), "cpu"), endpoint, batch=4, timeout_s=30)
    task, client = asyncio.create_task(scorer.run()), ScorerClient(endpoint)
    with pytest.raises(NotScored, match="it has 3"):
        await client.reward(view("x" * 300))
    task.cancel()
    scorer.close()
    client.close()
