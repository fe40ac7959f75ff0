"""Environments from classes in TRL's convention: methods are tools, calls bring a lost state back."""

import asyncio
import random
import sqlite3
import sys
import threading
import time
from typing import Any

import pytest

from asyncrl.envs.base import Environment, Message, Replays, Step
from asyncrl.envs.methods import MethodEnv
from asyncrl.envs.rewards import RewardFault
from asyncrl.envs.sources import Rows
from asyncrl.envs.tools import side_effects
from asyncrl.messages import Task

ROWS = [{"prompt": "Reach 10 from", "answer": 10, "start": i} for i in range(20)]
TASK = Task("t", [{"role": "user", "content": "Reach 10 from"}], 10, {"start": 3})


def calling(*calls: tuple[str, dict[str, Any]]) -> Message:
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


DONE = {"role": "assistant", "content": "done"}


class Counter:
    """A counter."""

    closed = 0

    def reset(self, start: int, answer: int, **row: Any) -> str:
        self.value, self.goal, self.row = start, answer, row
        return f" {start}."

    def add(self, number: int) -> int:
        """Adds to the counter.

        Args:
            number: what is added.
        """
        before = self.value
        time.sleep(0.001)  # Room for another call, if there were one beside it.
        self.value = before + number
        return self.value

    async def double(self) -> int:
        """Doubles the counter."""
        self.value *= 2
        return self.value

    def undocumented(self) -> None: ...

    def _private(self) -> None:
        """Is not for the model."""

    def get_reward(self) -> float:
        """Is not for the model either."""
        return float(self.value == self.goal)

    def close(self) -> None:
        """Nor is this."""
        type(self).closed += 1


class Mail:
    def reset(self) -> None:
        self.sent: list[str] = []

    def read(self) -> list[str]:
        """Reads what was sent."""
        return self.sent

    @side_effects
    def send(self, text: str) -> str:
        """Sends."""
        self.sent.append(text)
        return "sent"


async def test_public_methods_with_docstrings_are_tools_of_an_instance_of_the_episode() -> None:
    environment = MethodEnv(Counter, Rows(ROWS))
    assert isinstance(environment, Environment)
    one, other = environment.make(), environment.make()
    start = await one.reset(TASK)
    await other.reset(environment.task("train", 0))
    assert start.messages == [{"role": "user", "content": "Reach 10 from 3."}]
    assert TASK.prompt == [{"role": "user", "content": "Reach 10 from"}]
    assert [tool["function"]["name"] for tool in start.tools] == ["add", "double"]
    assert start.tools[0]["function"]["parameters"]["properties"] == {
        "number": {"type": "integer", "description": "what is added."}
    }
    step = await one.step(calling(("add", {"number": 2}), ("double", {})))
    assert [message["content"] for message in step.messages] == ["5", "10"]
    assert (step.done, step.info) == (False, {"tool_errors": 0})
    assert (await one.step(DONE)).rewards == {"reward": 1.0}
    assert (await other.step(DONE)).rewards == {"reward": 0.0}
    before = Counter.closed
    await one.close()
    assert Counter.closed == before + 1


async def test_the_calls_of_a_message_never_run_beside_each_other() -> None:
    env = MethodEnv(Counter, Rows(ROWS)).make()
    await env.reset(TASK)
    step = await env.step(calling(*[("add", {"number": 1})] * 20))
    assert [message["content"] for message in step.messages] == [str(n) for n in range(4, 24)]


async def test_reset_gets_the_columns_that_it_names_and_may_return_nothing_or_add_to_parts() -> None:
    class Named:
        def reset(self, start: int) -> str | None:
            return None if start else "!"

        async def get_reward(self) -> float:
            return 0.5

        def look(self) -> str:
            """Looks."""
            return "around"

    env = MethodEnv(Named, Rows(ROWS), system="Be brief.").make()
    assert (await env.reset(TASK)).messages == [{"role": "system", "content": "Be brief."}, *TASK.prompt]
    assert (await env.step(DONE)).rewards == {"reward": 0.5}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Go"}]}]
    start = await MethodEnv(Named, Rows(ROWS)).make().reset(Task("t", parts, None, {"start": 0}))
    assert start.messages[0]["content"] == [{"type": "text", "text": "Go"}, {"type": "text", "text": "!"}]


async def test_a_lost_episode_is_brought_back_by_doing_its_calls_again() -> None:
    environment = MethodEnv(Counter, Rows(ROWS))
    lost, found = environment.make(), environment.make()
    assert not isinstance(found, Replays)  # So the generator steps again, and compares the answers.
    messages = [calling(("add", {"number": 1}), ("double", {})), calling(("add", {"number": 2}))]
    await lost.reset(TASK)
    before = [await lost.step(message) for message in messages]
    await found.reset(TASK)
    assert [await found.step(message) for message in messages] == before
    assert (await found.step(DONE)).rewards == {"reward": 1.0}


async def test_what_cannot_be_done_twice_cannot_be_brought_back_and_the_reason_is_told() -> None:
    environment = MethodEnv(Mail, Rows(ROWS))
    env = environment.make()
    await env.reset(TASK)
    assert isinstance(env, Replays)
    await env.replay(calling(("read", {})), Step(False, info={"tool_errors": 0}))
    with pytest.raises(RuntimeError, match="1 did; the tools do not repeat themselves"):
        await env.replay(calling(("read", {})), Step(False, info={"tool_errors": 1}))
    with pytest.raises(
        RuntimeError, match="the tool 'send' has side effects and was called, so this episode cannot"
    ):
        await env.replay(calling(("read", {}), ("send", {"text": "hi"})), Step(False))
    step = await env.interrupted(calling(("send", {"text": "hi"}), ("read", {})))  # type: ignore[attr-defined]
    assert "unknown" in step.messages[0]["content"]
    assert step.messages[1]["content"] == "[]"
    assert (await env.step(DONE)).rewards == {}


async def test_what_the_class_does_wrong_fails_where_it_is_done() -> None:
    class Wrong:
        def reset(self, start: int) -> Any:
            if start == 3:
                return 3
            raise LookupError("no board")

        def look(self) -> str:
            """Looks."""
            raise ValueError("too dark")

        def get_reward(self) -> float:
            raise ValueError("no judge")

    class Quits:
        async def reset(self) -> None:
            sys.exit("bye")

        def look(self) -> str:
            """Looks."""
            return "around"

        def close(self) -> None:
            sys.exit("closed")

    gone = MethodEnv(Quits, Rows(ROWS)).make()
    with pytest.raises(RuntimeError, match="it raised SystemExit: bye"):
        await gone.reset(TASK)
    with pytest.raises(RuntimeError, match="it raised SystemExit: closed"):
        await gone.close()
    environment = MethodEnv(Wrong, Rows(ROWS))
    with pytest.raises(TypeError, match=r"Wrong\.reset returned int; return text or None"):
        await environment.make().reset(TASK)
    with pytest.raises(LookupError, match="no board"):
        await environment.make().reset(Task("t", TASK.prompt, None, {"start": 4}))


async def test_a_failing_or_hanging_method_is_an_error_that_the_model_sees_and_a_failing_reward_a_fault() -> None:
    go = threading.Event()

    class Dark:
        def reset(self) -> None: ...

        def look(self) -> str:
            """Looks."""
            raise ValueError("too dark")

        def wait(self) -> None:
            """Waits."""
            go.wait()

        def get_reward(self) -> float:
            raise ValueError("no judge")

    env = MethodEnv(Dark, Rows(ROWS), tool_timeout_s=0.1).make()
    await env.reset(TASK)
    step = await env.step(calling(("look", {}), ("wait", {}), ("look", {})))
    lost = "the thread of Dark is lost: an earlier call did not return in time"
    assert [message["content"] for message in step.messages] == [
        "error: ValueError: too dark",
        "error: wait did not answer within 0.1 s",
        f"error: RuntimeError: {lost}",
    ]
    with pytest.raises(RewardFault, match=lost):
        await env.step(DONE)
    go.set()
    again = MethodEnv(Dark, Rows(ROWS)).make()
    await again.reset(TASK)
    with pytest.raises(RewardFault, match="raised ValueError: no judge"):
        await again.step(DONE)


def test_a_class_that_cannot_be_an_environment_is_refused() -> None:
    class Silent:
        def reset(self) -> None: ...

        def look(self) -> str: ...

    class Vague:
        def reset(self) -> None: ...

        def look(self, where) -> str:
            """Looks."""

    with pytest.raises(ValueError, match=r"is no class with a method `reset\(self, \*\*row\)"):
        MethodEnv(random.Random(), Rows(ROWS))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="class Silent has no tool"):
        MethodEnv(Silent, Rows(ROWS))
    with pytest.raises(ValueError, match="tool 'look': parameter 'where' has no type hint"):
        MethodEnv(Vague, Rows(ROWS))


async def test_all_of_an_instance_lives_in_one_thread_of_its_own() -> None:
    class Shelf:
        """SQLite refuses a connection that was made in another thread."""

        def __init__(self) -> None:
            self.db = sqlite3.connect(":memory:")

        def reset(self, **row: object) -> None:
            self.db.execute("CREATE TABLE book (title TEXT)")

        def put(self, title: str) -> str:
            """Puts a book on the shelf."""
            self.db.execute("INSERT INTO book VALUES (?)", (title,))
            return "done"

        def get_reward(self) -> float:
            return float(self.db.execute("SELECT count(*) FROM book").fetchone()[0])

        def close(self) -> None:
            self.db.close()

    async def episode() -> dict[str, float | None]:
        env = MethodEnv(Shelf, Rows(ROWS)).make()
        await env.reset(Task("t", [{"role": "user", "content": "?"}]))
        call = {"id": "call_0", "type": "function", "function": {"name": "put", "arguments": {"title": "x"}}}
        for _ in range(3):
            step = await env.step({"role": "assistant", "content": "", "tool_calls": [call]})
            assert step.messages[0]["content"] == "done"
        done = await env.step({"role": "assistant", "content": "that is all"})
        await env.close()
        return done.rewards

    assert await asyncio.gather(*(episode() for _ in range(16))) == [{"reward": 3.0}] * 16
