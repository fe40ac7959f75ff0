"""Tokens are exact across turns, tools and forks: what the engine sampled is what the learner trains, once.

A thousand random episodes with tools, on a template that appends turns and on one that rewrites earlier ones: a
real engine samples, the real episode loop keeps the record, and the learner's own forward over the rows that it
would train is compared with the engine's log-probs.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.chat import ChatFormat
from asyncrl.config import Config
from asyncrl.envs.registry import load
from asyncrl.envs.rewards import Rewards
from asyncrl.generator.engines.base import Delta, SamplingParams
from asyncrl.generator.engines.select import open_engine
from asyncrl.generator.episode import EpisodeRunner, World
from asyncrl.generator.record import TokenRecord
from asyncrl.learner import dist, model, rows
from asyncrl.messages import Batch, Chunk, EpisodeEnd, EpisodeMeta, Lease, Turn
from asyncrl.packing import plan
from asyncrl.toy import CHAT_TEMPLATE, init_model, warm_start

EPISODES = 500
CHATTER = f"{Path(__file__).with_name('chatter.py')}:make"
FORGETFUL = CHAT_TEMPLATE.replace(
    "(message.content or '')", "((message.content or '') if loop.last or message.role != 'assistant' else '..')"
)
"""Shows the assistant's earlier turns as two dots: no turn after the first is a mere suffix."""


@dataclass
class Heard:
    """The engine, and what it was asked and said."""

    engine: Any
    requests: dict[int, list[tuple[list[int], list[int]]]] = field(default_factory=dict)

    async def generate(self, rid: str, prompt: Sequence[int], params: SamplingParams) -> AsyncIterator[Delta]:
        sampled: list[int] = []
        self.requests.setdefault(int(rid), []).append((list(prompt), sampled))
        async for delta in self.engine.generate(rid, prompt, params):
            sampled += delta.token_ids
            yield delta


class Ends:
    """A sink that keeps how episodes ended."""

    def __init__(self) -> None:
        self.ends: list[EpisodeEnd] = []

    def chunk(self, chunk: Chunk, tokens: list[int], logprobs: list[float]) -> None:
        assert chunk.n == len(tokens)

    def turn(self, turn: Turn) -> None:
        assert turn.messages

    def end(self, end: EpisodeEnd) -> None:
        self.ends.append(end)


@pytest.fixture(scope="module")
def config() -> Config:
    return Config.model_validate(
        {
            "env": {"name": CHATTER, "tool_tokens": 12},
            "sampling": {"max_tokens": 72, "temperature": 0.8},
            "generator": {"engine": "transformers", "slots": 128, "max_model_len": 320},
            "toy": {"warm_steps": 120, "warm_rows": 24, "warm_loss": 0.0},
        }
    )


@pytest.fixture(scope="module")
def talker(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends most turns and calls the tool in some of them, rightly or wrongly."""
    torch.set_num_threads(2)
    folder = tmp_path_factory.mktemp("talker")
    warm_start(config, init_model(folder / "raw", hidden=64, layers=1), folder / "model", lambda line: None)
    return folder / "model"


async def _play(config: Config, folder: Path) -> tuple[Heard, Ends, list[TokenRecord]]:
    heard = Heard(await asyncio.to_thread(open_engine, config, str(folder), asyncio.get_running_loop()))
    ends, environment = Ends(), load(config.env.name, {})
    world = World(config, environment, ChatFormat(folder), heard, ends, Rewards(config.reward))  # type: ignore[arg-type]
    records = [TokenRecord() for _ in range(EPISODES)]
    try:
        async with asyncio.TaskGroup() as group:
            for index, record in enumerate(records):
                lease = Lease(index, index, environment.task("train", index), seed=index * 1009)
                group.create_task(EpisodeRunner(world, lease, record).run())
    finally:
        await heard.engine.close()
    return heard, ends, records


def _learner(config: Config, folder: Path, records: list[TokenRecord]) -> tuple[list[list[int]], np.ndarray]:
    """The labels of each episode that are trained, and all differences of log-probs, learner minus engine."""
    planned = plan([len(record.ids) for record in records], 1, config.learner.token_budget)[0]
    order = [index for row in planned for index in row]
    metas = [EpisodeMeta(i, i, 1.0, "completed", len(r.ids), 1) for i, r in enumerate(records)]
    batch = Batch(1, 1, metas, planned, [records[i].spans for i in order])
    ids = np.concatenate([np.array(records[i].ids, np.int32) for i in order])
    logprobs = np.concatenate([np.array(records[i].logprobs, np.float32) for i in order])
    share = rows.read(batch, ids, logprobs, 1, None)
    packed = rows.build(share, share.trained, np.ones(len(order)), {}, torch.device("cpu"))
    labels: list[list[int]] = [[] for _ in records]
    differences = []
    with dist.alone():
        policy = model.load(folder, "float32", dist.current("cpu"))
        for row, members in zip(packed, planned, strict=True):
            logp = model.logp_of(policy, row, config.sampling.temperature, None).logp
            differences.append((logp - row.tokens.behaviour).numpy())
            for index, part in zip(members, row.labels.split(list(row.tokens.lengths)), strict=True):
                labels[index] = part.tolist()
    return labels, np.concatenate(differences)


@pytest.mark.parametrize("template", ["appends turns", "rewrites earlier turns"])
def test_engine_and_learner_agree_on_every_sampled_token(template: str, config: Config, talker: Path) -> None:
    if template != "appends turns":
        (talker / "chat_template.jinja").write_text(FORGETFUL)
    heard, ends, records = asyncio.run(_play(config, talker))
    labels, differences = _learner(config, talker, records)

    assert {end.status for end in ends.ends} <= {"completed", "truncated_length", "truncated_context"}
    for index, record in enumerate(records):
        turns = heard.requests[index]
        # The mask covers exactly what was sampled, in order, each token once ...
        assert labels[index] == [token for _, sampled in turns for token in sampled]
        # ... and each turn was sampled from the very tokens that stand before it in its row.
        assert turns[-1][0] + turns[-1][1] == record.branch
    assert len(differences) == sum(map(len, labels))
    assert np.abs(differences).max() < 1e-4

    # It was a trial of what it should be one of.
    turns = sum(end.turns for end in ends.ends)
    calls = sum(end.info.get("tool_calls", 0) for end in ends.ends)
    assert turns > 1.5 * EPISODES
    assert calls > 0.1 * EPISODES
    assert sum(record.forks for record in records) == (0 if template == "appends turns" else turns - EPISODES)
