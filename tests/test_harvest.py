"""What ended episodes brought: the reward between steps, and the reason that a hopeless run is given up with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncrl.config import Algo, Config
from asyncrl.groups import Episode, Group
from asyncrl.harvest import FUTILE_BATCHES, Harvest
from asyncrl.hub import Hub
from asyncrl.launch import create
from asyncrl.messages import Chunks, EpisodeEnd, Hello, Lease, Message, Task, Welcome
from asyncrl.metrics.reader import RunReader
from asyncrl.process import EXIT_STOP_RUN
from asyncrl.trainers.presets import resolve
from asyncrl.transport import AsyncSocket, free_port_pair

CONFIG = Config.model_validate({"algo": {"filter": "none"}, "train": {"groups_per_step": 2, "group_size": 2}})
FUTILE = FUTILE_BATCHES * 2
LOST = "reward function 'judge' raised KeyError: 'lost'"


def ended(
    harvest: Harvest, reward: float | None, *, greedy: bool = False, detail: str = LOST, info: Any = None
) -> None:
    episode = Episode(0, 0, Group(0, 0, Task("t", []), 0), greedy, sampled=3, length=5)
    status = "failed_environment" if reward is None else "completed"
    harvest.ended(EpisodeEnd(0, 0, 1, status, reward, 1, detail, info=info or {}), episode)


def test_a_steps_reward_is_the_mean_of_the_episodes_that_ended_since_the_last_one() -> None:
    harvest = Harvest(CONFIG, 0)
    for reward in (1.0, 0.0, None, 0.5, float("nan")):
        ended(harvest, reward)
    ended(harvest, 100.0, greedy=True)
    assert harvest.take_metrics() == {"reward": 0.5, "turns": 1.0, "episodes_ended": 3}
    assert harvest.take_metrics() == {"episodes_ended": 0}


def test_turns_and_counts_are_means_over_rewarded_episodes() -> None:
    harvest = Harvest(CONFIG, 0)
    ended(harvest, 1.0, info={"tool_calls": 3.0, "forks": 1.0})
    ended(harvest, 0.0)
    ended(harvest, None, info={"tool_calls": 50.0})
    found = harvest.take_metrics()
    assert (found["env/tool_calls"], found["env/forks"], found["turns"]) == (1.5, 0.5, 1.0)


def test_a_run_is_hopeless_once_so_many_groups_were_dropped_since_the_last_batch() -> None:
    harvest = Harvest(CONFIG, 7)
    assert harvest.hopeless(7 + FUTILE - 1, 1) is None
    assert harvest.hopeless(7 + FUTILE, 1) is not None
    harvest.batch_served(7 + FUTILE)
    assert harvest.hopeless(7 + FUTILE, 2) is None


def test_failing_episodes_are_blamed_with_the_commonest_reason_and_not_the_filter() -> None:
    harvest = Harvest(CONFIG, 0)
    for detail in (LOST, "other", LOST):
        ended(harvest, None, detail=detail)
    ended(harvest, 1.0)
    text = harvest.hopeless(FUTILE, 1) or ""
    assert f"3 of 4 episodes failed, 2 of them with: environment: {LOST}" in text
    assert "filter" not in text


@pytest.mark.parametrize("failed_before_the_batch", [0, 5])
def test_the_filter_is_blamed_where_episodes_end_with_rewards(failed_before_the_batch: int) -> None:
    harvest = Harvest(CONFIG.model_copy(update={"algo": Algo(filter="equal_rewards")}), 0)
    for _ in range(failed_before_the_batch):
        ended(harvest, None)
    harvest.batch_served(0)
    ended(harvest, 1.0)
    text = harvest.hopeless(FUTILE, 3) or ""
    assert "step 3 is still without a batch" in text
    assert "the filter 'equal_rewards'" in text
    assert "failed" not in text


async def test_a_hub_whose_episodes_all_fail_gives_the_run_up_with_their_reason(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"algo": resolve(CONFIG.algo)})
    create(config, tmp_path / "run")
    port = free_port_pair(config.hub.host)
    hub = Hub(tmp_path / "run", port)
    opened: list[AsyncSocket] = []

    def on_control(_peer: bytes, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Welcome):
            opened.append(AsyncSocket(zmq.DEALER, lambda *_: None, "generator-0/a"))
            opened[-1].connect(message.data_endpoint)
        elif isinstance(message, Lease):
            end = EpisodeEnd(message.lease_id, message.episode_id, 0, "failed_environment", None, 0, LOST)
            opened[-1].send(Chunks(message.lease_id, ends=[end]), [b"", b""])

    opened.append(AsyncSocket(zmq.DEALER, on_control, "generator-0/a"))
    opened[0].connect(f"tcp://{config.hub.host}:{port}")
    opened[0].send(Hello("generator", "generator-0", "a", capacity=64, version=0))
    async with asyncio.timeout(120):
        assert await hub.run() == EXIT_STOP_RUN
    for socket in opened:
        socket.close()
    with RunReader(tmp_path / "run") as reader:
        (reason,) = [event.detail for event in reader.events() if event.what == "failed"]
    assert f" of them with: environment: {LOST}. Repair that first" in reason
