"""Games of TextArena: alone, or against an opponent that plays by chance or from a list.

    asyncrl train --env textarena --env.args '{"game": "TicTacToe-v0"}'
    user: rules, board     assistant: [4]     user: the opponent's move, board     assistant: …

The library's games draw from Python's one global random generator, so none is kept. The state of an episode is
its seed and the list of all moves: every step plays the game anew (`asyncrl.envs.adapters.textarena_match`, in a
process of `asyncrl.envs.process_pool`), from its seed through the moves so far to one more. That costs about a
millisecond for most games, more for those that make a puzzle when they begin; snapshots are a few hundred bytes.

A move that the game calls invalid is answered by the game, which ends at the second in a row. A move on which the
game raises is not made, and the model is told. The reward is what the game's `close` gives the player, also for a
game that was lost by an invalid move. Games that need the word lists of nltk do not work offline. Needs
`pip install 'asyncrl[textarena]'`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.envs.adapters.textarena_match import Opponent
from asyncrl.envs.arguments import check_seconds, check_whole
from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.drawn import seed_task
from asyncrl.envs.process_pool import CallLost, CallRaised, ProcessPool
from asyncrl.messages import Task

MATCH = "asyncrl.envs.adapters.textarena_match"


@dataclass(frozen=True, slots=True)
class TextArena:
    """The environment."""

    game: str
    players: int
    player: int | None
    opponent: Opponent
    seed: int
    limit_s: float
    pool: ProcessPool

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th game; there are always more.

        Raises:
            ValueError: the split is neither `train` nor `eval`, or the index is negative.
        """
        task = seed_task(f"textarena/{self.game}", self.seed, split, index)
        own = index % self.players if self.player is None else self.player
        return Task(task.id, task.prompt, metadata=task.metadata | {"player": own})

    def make(self) -> TextArenaEnv:
        """A new, unused episode."""
        return TextArenaEnv(self)

    async def play(self, task: Task, moves: list[Any], move: str | None) -> dict[str, Any]:
        """Runs the game to the player's next turn or its end; see `textarena_match.play`.

        Raises:
            CallRaised: the game raised, but not on `move`.
            CallLost: it did not get there in time.
        """
        result: dict[str, Any] = await self.pool.acall(*self._game(task), moves, move, limit_s=self.limit_s)
        return result

    def try_out(self) -> None:
        """Begins a game for each place at the table. Raises as `play` does."""
        for index in range(self.players):
            self.pool.call(*self._game(self.task("train", index)), [], None, limit_s=self.limit_s)

    def _game(self, task: Task) -> tuple[Any, ...]:
        seed, player = task.metadata["seed"], task.metadata["player"]
        return f"{MATCH}:play", self.game, self.players, seed, player, self.opponent


class TextArenaEnv:
    """One episode: the moves of all players so far."""

    def __init__(self, environment: TextArena) -> None:
        self._environment = environment
        self._task: Task | None = None
        self._moves: list[Any] = []

    async def reset(self, task: Task) -> Start:
        """Begins the game, up to the player's first turn."""
        self._task = task
        result = await self._play(task, None)
        if result["done"]:
            raise RuntimeError(f"the game {self._environment.game!r} ended before the player's first turn")
        return Start([{"role": "user", "content": result["text"]}])

    async def step(self, message: Message) -> Step:
        """Makes the player's move, and the opponent's until it is the player's turn again."""
        if self._task is None:
            raise RuntimeError("the episode was not reset; call reset(task) before step(message)")
        said = message.get("content")
        result = await self._play(self._task, said.strip() if isinstance(said, str) else "")
        info = {"invalid_moves": float(result["invalid"])}
        if result["done"]:
            return Step(True, {"game": result["reward"]}, info=info)
        return Step(False, messages=[{"role": "user", "content": result["text"]}], info=info)

    async def truncated(self, status: str) -> dict[str, float | None]:
        """The reward of a lost game: who does not finish must not fare better than who loses."""
        return {"game": -1.0 if self._environment.players > 1 else 0.0}

    async def snapshot(self) -> bytes:
        """All moves, as JSON."""
        return json.dumps(self._moves).encode()

    async def restore(self, task: Task, blob: bytes) -> None:
        """Takes the moves over."""
        self._task, self._moves = task, json.loads(blob)

    async def close(self) -> None:
        """Holds nothing; the processes belong to the environment."""

    async def _play(self, task: Task, move: str | None) -> dict[str, Any]:
        result = await self._environment.play(task, self._moves, move)
        self._moves = result["moves"]
        return result


def make(
    game: str = "TicTacToe-v0",
    opponent: Literal["random"] | list[str] = "random",
    opponent_moves: list[str] | None = None,
    player: int | None = None,
    seed: int = 0,
    limit_s: float = 20.0,
    workers: int = 2,
) -> TextArena:
    """The entry point.

    Args:
        game: id of a game for one or two players, as `textarena.make` takes it.
        opponent: in a game for two: `random` makes a legal move by chance; a list of moves is made in turn, and
            then again from the first.
        opponent_moves: what `random` draws from, for games that do not name the legal moves: for ConnectFour-v0
            ["[col 0]", "[col 1]", ...]. None: what stands in square brackets in what the game said last.
        player: which one the model is, 0 or 1. None: by turns, from task to task.
        seed: another one gives other games.
        limit_s: time limit of a step in seconds. Keep it below `env.timeout_s`.
        workers: most processes, in each generator; each takes about 60 MB.

    Raises:
        ValueError: an argument is out of its range, the library is missing, or the game cannot be played here.
    """
    for name, value, least in (("seed", seed, 0), ("workers", workers, 1)):
        check_whole(name, value, least)
    for name, moves in (
        ("opponent", None if opponent == "random" else opponent),
        ("opponent_moves", opponent_moves),
    ):
        if moves is not None and not (
            isinstance(moves, list) and moves and all(isinstance(m, str) for m in moves)
        ):
            raise ValueError(f"env.args.{name} = {moves!r}: must be a list of moves, at least one")
    if player not in (None, 0, 1) or isinstance(player, bool):
        raise ValueError(f"env.args.player = {player!r}: must be 0, 1 or null")
    check_seconds("limit_s", limit_s)
    pool = ProcessPool(f"{MATCH}:load_library", workers)
    other = Opponent(None if opponent == "random" else list(opponent), opponent_moves)
    try:
        players = pool.call(f"{MATCH}:number_of_players", game, limit_s=limit_s)
        made = TextArena(game, players, player if players == 2 else 0, other, seed, limit_s, pool)
        made.try_out()
    except (CallRaised, CallLost) as error:
        raise ValueError(f"env.args.game = {game!r}: {error}") from error
    return made
