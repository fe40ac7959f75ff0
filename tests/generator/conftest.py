"""Plays one episode: what the model says, what the environment answers, and where an earlier process was lost."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.chat import ChatFormat
from asyncrl.config import Config
from asyncrl.envs.rewards import Rewards
from asyncrl.generator.episode import EpisodeRunner, World
from asyncrl.generator.record import TokenRecord
from asyncrl.messages import Lease, Prefix, Task
from asyncrl.toy import CHAT_TEMPLATE, write_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from reciting import QUESTION, Play, Played, Reciter, Talk


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatFormat(folder)


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """A template that shows the assistant's earlier turns as two dots: every later turn begins a new branch."""
    folder = tmp_path_factory.mktemp("forgetful")
    write_tokenizer(folder)
    said = "(message.content or '')"
    latest = f"({said} if loop.last or message.role != 'assistant' else '..')"
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace(said, latest))
    return ChatFormat(folder)


@pytest.fixture
def play(chat: ChatFormat) -> Play:
    """Runs one episode: what the model says ("." ends a turn), what the environment answers, and the limits."""
    toy = chat

    async def run(
        says: Sequence[str],
        steps: Iterable[Any] = (),
        wrong: dict[str, Callable[..., Any]] | None = None,
        make: Callable[[], Any] | None = None,
        cut: Played | None = None,
        chunks: int = 0,
        answered: bool = False,
        greedy: bool = False,
        chat: ChatFormat = toy,
        **limits: Any,
    ) -> Played:
        settings = {"max_tokens": 16, "max_model_len": 256, "max_turns": 4, "timeout_s": 20.0} | limits
        config = Config.model_validate(
            {
                "sampling": {"max_tokens": settings["max_tokens"], "temperature": 0.7},
                "generator": {"max_model_len": settings["max_model_len"]},
                "env": {"max_turns": settings["max_turns"], "timeout_s": settings["timeout_s"]},
                "learner": {"token_budget": settings.get("token_budget", 8192)},
                "reward": settings.get("reward", {}),
            }
        )
        prompt = toy.prompt_ids(QUESTION)
        played = Played(prompt)

        class Environment:
            def task(self, split: str, index: int) -> Task:
                raise AssertionError("an episode has its task from its lease")

            def make(self) -> Talk:
                played.envs.append(Talk(steps, wrong or {}))
                return make() if make else played.envs[-1]

        turns = [chat.encode(text.removesuffix(".")) + [chat.end_id] * text.endswith(".") for text in says]
        engine = Reciter(turns, prompt[-1])
        played.requests = engine.requests
        prefix = Prefix()
        if cut is not None:
            prefix, tokens, logprobs = cut.prefix(chunks, answered)
            played.record = TokenRecord.from_prefix(prefix, tokens, logprobs)
        lease = Lease(7, 3, Task("t", QUESTION), seed=11, prefix=prefix, greedy=greedy)
        world = World(config, Environment(), chat, engine, played, Rewards(config.reward))  # type: ignore[arg-type]
        await EpisodeRunner(world, lease, played.record).run()
        return played

    return run
