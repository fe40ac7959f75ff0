"""An episode goes on in another process: what is brought back, what is done again, and what must not be."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from reciting import DONE, MORE, Play, Played, Talk

from asyncrl.chat import ChatFormat
from asyncrl.envs.base import Message, Start, Step
from asyncrl.messages import Task

SAYS = ["one.", "two.", "three."]
STEPS = [MORE, MORE, DONE]
AFTER_STEP_1 = 3
"""Chunks of the prompt and of the first turn; the third of them is its stop token."""


class Keeps(Talk):
    """An environment with snapshots: how many turns it has heard."""

    async def snapshot(self) -> bytes:
        return bytes([len(self.heard)])

    async def restore(self, task: Task, blob: bytes) -> None:
        self.heard = ["restored"] * blob[0]


class Listens(Talk):
    """An environment that is told of its earlier answers."""

    async def replay(self, message: Message, step: Step) -> None:
        assert (step.messages, step.rewards) == (MORE.messages, MORE.rewards)
        self.heard.append(f"again: {message['content']}")


class Careful(Listens):
    """An environment whose answers have effects that must not be done twice."""

    async def interrupted(self, message: Message) -> Step:
        self.heard.append(f"interrupted: {message['content']}")
        return self.steps[len(self.heard) - 1]


async def _both(play: Play, kind: type[Talk], chunks: int, answered: bool = False) -> tuple[Played, Played, Talk]:
    """An uninterrupted episode, one that goes on after so many of its chunks, and the latter's environment."""
    made: list[Talk] = []

    def make() -> Talk:
        made.append(kind(STEPS, {}))
        return made[-1]

    whole = await play(SAYS, make=make)
    resumed = await play(SAYS, make=make, cut=whole, chunks=chunks, answered=answered)
    assert resumed.record.ids == whole.record.ids
    assert resumed.ends == whole.ends
    resumed.check_chunks(first=chunks)
    return whole, resumed, made[-1]


@pytest.mark.parametrize(
    ("chunks", "answered", "heard"),
    [
        (1, True, ["one", "two", "three"]),
        (2, False, ["one", "two", "three"]),
        (AFTER_STEP_1, False, ["one", "two", "three"]),
        (AFTER_STEP_1, True, ["restored", "two", "three"]),
        (AFTER_STEP_1 + 1, False, ["restored", "two", "three"]),
        (AFTER_STEP_1 + 4, False, ["restored", "restored", "three"]),
    ],
)
async def test_an_environment_is_restored_from_its_last_snapshot(
    play: Play, chunks: int, answered: bool, heard: list[str]
) -> None:
    whole, _, env = await _both(play, Keeps, chunks, answered)
    assert env.heard == heard
    assert [turn.snapshot for _, turn in whole.turns] == [b"\x00", b"\x01", b"\x02"]


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("chunks", range(1, 9))
async def test_an_episode_of_several_branches_goes_on_in_the_branch_that_it_was_in(
    play: Play, forgetful: ChatFormat, chunks: int, answered: bool
) -> None:
    whole = await play(SAYS, STEPS, chat=forgetful)
    assert (whole.result[0], whole.record.forks, len(whole.chunks)) == ("completed", 2, 9)
    resumed = await play(SAYS, STEPS, chat=forgetful, cut=whole, chunks=chunks, answered=answered)
    assert resumed.record.ids == whole.record.ids
    assert resumed.record.spans[-1:] == whole.record.spans[-1:]
    assert resumed.record.branch == whole.record.branch
    seeds = [params.seed for _, params in whole.requests]
    assert [params.seed for _, params in resumed.requests] == seeds[len(seeds) - len(resumed.requests) :]
    assert resumed.ends == whole.ends
    resumed.check_chunks(first=chunks)


async def test_an_environment_may_take_its_recorded_answers_instead_of_answering_again(play: Play) -> None:
    _, _, env = await _both(play, Listens, AFTER_STEP_1 + 4)
    assert env.heard == ["again: one", "again: two", "three"]


@pytest.mark.parametrize(
    ("chunks", "answered", "heard"),
    [
        (AFTER_STEP_1 - 1, False, ["one", "two", "three"]),
        (AFTER_STEP_1, False, ["interrupted: one", "two", "three"]),
        (AFTER_STEP_1, True, ["again: one", "two", "three"]),
        (AFTER_STEP_1 + 1, False, ["again: one", "two", "three"]),
    ],
)
async def test_an_answer_that_may_have_begun_is_interrupted_and_no_other(
    play: Play, chunks: int, answered: bool, heard: list[str]
) -> None:
    _, _, env = await _both(play, Careful, chunks, answered)
    assert env.heard == heard


async def test_an_episode_of_one_turn_records_nothing_but_its_tokens(play: Play) -> None:
    assert (await play(["2."], [DONE])).turns == []


async def _step_otherwise(env: Talk, message: Message) -> Step:
    env.heard.append(message["content"])
    return Step(done=False, messages=[{"role": "user", "content": f"{len(env.heard)}?"}])


async def _done_at_once(env: Talk, message: Message) -> Step:
    return DONE


async def _other_start(env: Talk, task: Task) -> Start:
    return Start([{"role": "user", "content": "2+2="}])


@pytest.mark.parametrize(
    ("method", "other", "chunks", "what"),
    [
        ("step", _step_otherwise, 4, "step of turn 1 did not give the recorded answer again"),
        ("step", _done_at_once, 4, "step of turn 1 did not give the recorded answer again"),
        ("reset", _other_start, 4, "reset did not give the recorded answer again"),
        ("reset", _other_start, 2, "reset gave another prompt"),
    ],
)
async def test_an_environment_that_contradicts_the_record_fails_the_episode(
    play: Play, method: str, other: Callable[..., Any], chunks: int, what: str
) -> None:
    class Other(Talk):
        pass

    whole = await play(SAYS, STEPS)
    setattr(Other, method, other)
    resumed = await play(SAYS, make=lambda: Other(STEPS, {}), cut=whole, chunks=chunks)
    assert resumed.result[:2] == ("failed_environment", None)
    assert f"cannot go on elsewhere: {what}" in resumed.ends[0].detail


async def test_a_snapshot_that_is_too_large_fails_the_episode(play: Play) -> None:
    class Large(Keeps):
        async def snapshot(self) -> bytes:
            return bytes(2 << 20)

    played = await play(SAYS, make=lambda: Large(STEPS, {}))
    assert played.result == ("failed_environment", None, 0)
    assert "snapshot has 2097152 bytes; at most 1048576" in played.ends[0].detail


async def test_what_the_environment_says_of_a_truncated_episode_is_its_reward(play: Play) -> None:
    class Strict(Talk):
        async def truncated(self, status: str) -> dict[str, float | None]:
            return {status: -1.0}

    def made(steps: Sequence[Step]) -> Callable[[], Talk]:
        return lambda: Strict(steps, {})

    turns = await play(SAYS, make=made(STEPS), max_turns=2)
    assert turns.ends[0].rewards == {"polite": 0.5, "truncated_turns": -1.0}
    length = await play(["twenty-two"], make=made([Step(done=False)]), max_tokens=4)
    assert length.ends[0].rewards == {"truncated_length": -1.0}
    empty = await play(["no"], make=made([]), max_tokens=1, max_model_len=4)
    assert empty.ends[0].rewards == {"truncated_context": -1.0}
    done = await play(["twenty-two"], make=made([DONE]), max_tokens=4)
    assert done.ends[0].rewards == {"right": 1.0}
