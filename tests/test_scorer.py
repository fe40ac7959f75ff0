"""The scorer as a real process: its scores are the model's own, whatever shares the batch, dies or sends junk."""

from __future__ import annotations

import asyncio
import os
import random
import string
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from asyncrl import cli, keys
from asyncrl.chat import ChatFormat
from asyncrl.config import Reward
from asyncrl.envs.reward_signatures import EpisodeView
from asyncrl.envs.rewards import RewardFault, Rewards
from asyncrl.messages import Ack, EpisodeStatus, Score, Scored, Task, encode
from asyncrl.process import EXIT_USAGE
from asyncrl.scorer import Scorer, rewards_here, serve
from asyncrl.scorer_client import NotScored, ScorerClient
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
    async with asyncio.timeout(300):
        scores = await asyncio.gather(*(client.reward(episode) for episode in episodes))
    client.close()
    expected = alone(served.folder, episodes)
    assert scores == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1


async def test_a_killed_scorer_is_asked_again_and_its_successor_answers(served: Served) -> None:
    client, episodes = ScorerClient(served.endpoint, resend_after_s=0.2), ragged(3)
    async with asyncio.timeout(300):  # Up to two cold starts of torch.
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
    async with asyncio.timeout(300):
        assert await client.reward(view("4")) == pytest.approx(alone(served.folder, [view("4")])[0], abs=1e-5)
    assert served.process is not None
    assert served.process.poll() is None
    assert raw.poll(200) == 0
    raw.close(linger=0)
    client.close()


async def test_a_model_that_cannot_be_served_ends_the_process_with_the_reason(
    reward_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = zmq.Context.instance().socket(zmq.ROUTER)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    # A taken address may be its predecessor's, which the kernel has not cleared away yet: worth another try.
    assert await serve(str(reward_model), f"tcp://127.0.0.1:{port}", "cpu", 4, 30, 30) == 1
    assert f"on cpu at tcp://127.0.0.1:{port}: Address already in use" in capsys.readouterr().out
    taken.close(linger=0)
    keys.write(keys.make(), tmp_path / "a.key")
    monkeypatch.setenv(keys.ENVIRONMENT, str(tmp_path / "a.key"))
    assert await serve(str(reward_model), "tcp://192.0.2.1:5600", "cpu", 4, 30, 30) == EXIT_USAGE
    assert "cannot be served on cpu at tcp://192.0.2.1:5600" in capsys.readouterr().out
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
        assert fault.status is EpisodeStatus.FAILED_REWARD
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


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.01)


async def test_what_waits_is_computed_together_and_a_resend_is_not_computed_twice() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    model = Slow()
    scorer = Scorer(model, endpoint, batch=4, timeout_s=30)
    task = asyncio.create_task(scorer.run())
    for number in (0, 1, 2, 3, 4, 5, 1, 4):
        scorer._on_message(b"peer", Score(number, []), [])  # Before the first batch is made.
    await until(lambda: bool(model.batches))
    for number in (0, 3, 5):
        scorer._on_message(b"peer", Score(number, []), [])  # While it is computed, or waits for that.
    model.may.release(2)
    await until(lambda: not scorer._waiting)
    assert model.batches == [[0, 1, 2, 3], [4, 5]]
    task.cancel()
    scorer.close()


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


async def test_an_error_of_the_device_ends_the_scorer() -> None:
    class Broken(RewardModel):
        def __init__(self) -> None: ...

        def answers(self, requests: Any) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

    scorer = Scorer(Broken(), f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}", batch=4, timeout_s=30)
    scorer._on_message(b"peer", Score(0, []), [])
    with pytest.raises(RuntimeError, match="device-side assert"):
        await scorer.run()
    scorer.close()


HANGS = """
import asyncio, threading
from asyncrl import scorer
from asyncrl.config import Reward
from asyncrl.settings import UsageError

class Hangs:
    def __init__(self, path, device): ...
    def answers(self, requests): threading.Event().wait()

scorer.RewardModel = Hangs

async def evaluate():
    async with scorer.rewards_here(Reward(model="it", timeout_s=0.2)) as rewards:
        asyncio.create_task(rewards._calls["model"]._adapted.function(VIEW))
        await asyncio.Event().wait()

try:
    asyncio.run(evaluate())
except UsageError as error:
    print(error, flush=True)
"""


def test_a_batch_that_hangs_ends_the_evaluation_and_its_process() -> None:
    view = "from types import SimpleNamespace\nVIEW = SimpleNamespace(messages=[])\n"
    command = [sys.executable, "-P", "-c", view + HANGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "a batch of up to 16 conversations took longer than reward.timeout_s = 0.2 s; lower"
    )


async def test_what_goes_wrong_beside_the_scorer_is_raised_as_it_is(reward_model: Path) -> None:
    with pytest.raises(TimeoutError, match="of the body"):
        async with rewards_here(Reward(model=str(reward_model))):
            raise TimeoutError("of the body")

    async def evaluate() -> None:
        async with rewards_here(Reward(model=str(reward_model))):
            here.set()
            await asyncio.Event().wait()

    here = asyncio.Event()
    task = asyncio.create_task(evaluate())
    await here.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "error", [RuntimeError("No CUDA GPUs are available"), AssertionError("not compiled with CUDA")]
)
async def test_a_device_that_is_not_there_is_refused_with_the_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_it(path: str, device: str) -> None:
        raise error

    monkeypatch.setattr("asyncrl.scorer.RewardModel", open_it)
    assert await serve("it", "tcp://127.0.0.1:9", "cuda", 4, 30, 30) == EXIT_USAGE
    assert f"it cannot be served on cuda at tcp://127.0.0.1:9: {error}" in capsys.readouterr().out
    with pytest.raises(UsageError, match=f"reward.model = it on cuda cannot be served: {error}"):
        async with rewards_here(Reward(model="it", model_device="cuda")):
            pass


async def test_memory_that_is_not_there_yet_is_worth_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_it(path: str, device: str) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("asyncrl.scorer.RewardModel", open_it)
    assert await serve("it", "tcp://127.0.0.1:9", "cuda", 4, 30, 30) == 1


async def test_nothing_is_kept_for_a_scorer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    client = ScorerClient(endpoint)
    stale = asyncio.create_task(client.reward(view("stale")))
    ready = asyncio.create_task(client.ready())
    await until(lambda: client._socket.unroutable > 5)
    stale.cancel()  # Its time limit, as the generators see it.
    model = Slow()
    model.may.release(100)
    scorer = Scorer(model, endpoint, batch=4, timeout_s=30)
    task = asyncio.create_task(scorer.run())
    async with asyncio.timeout(60):
        await ready
        assert await client.reward(view("fresh")) == 1.0
    assert model.batches == [[1], [2]]
    task.cancel()
    scorer.close()
    client.close()


async def test_the_scorer_says_why_a_conversation_has_no_score(reward_model: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port_pair('127.0.0.1')}"
    scorer = Scorer(RewardModel(str(reward_model), "cpu"), endpoint, batch=4, timeout_s=30)
    task, client = asyncio.create_task(scorer.run()), ScorerClient(endpoint)
    with pytest.raises(NotScored, match="it has 3"):
        await client.reward(view("x" * 300))
    task.cancel()
    scorer.close()
    client.close()
