"""One game of TextArena, played from its beginning in a process of its own.

TextArena's games draw from Python's one global random generator, which nothing else may touch meanwhile; here
nothing else runs. Called by `asyncrl.envs.adapters.textarena` through `asyncrl.envs.process_pool`. It keeps
nothing between calls. Free of torch.
"""

from __future__ import annotations

import copy
import random
import re
from typing import Any, NamedTuple

from asyncrl.envs.adapters.extras import load_extra

TURNS_IN_A_ROW = 1000
"""So many turns of the opponent without one of the player's are an endless game."""
_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")


class Opponent(NamedTuple):
    """How the other player plays."""

    script: list[str] | None
    """Its moves, made in turn and then again from the first. None: it plays by chance."""
    moves: list[str] | None
    """What it tries by chance. None: what the game named last, in square brackets."""


def load_library() -> None:
    """Imports TextArena in a new process."""
    _library()


def _library() -> Any:
    return load_extra("textarena", "textarena", "textarena")


def number_of_players(game: str) -> int:
    """Finds out by trying, for the library does not tell."""
    library = _library()
    refused: Exception | None = None
    for players in (1, 2):
        env = library.make(game)
        try:
            env.reset(num_players=players, seed=0)
        except Exception as error:  # An AssertionError as a rule, but each game has its own.
            refused = error
        else:
            return players
    raise ValueError(f"it begins with neither one player nor two: {type(refused).__name__}: {refused}")


def play(
    game: str, players: int, seed: int, player: int, opponent: list[Any], moves: list[Any], move: str | None
) -> dict[str, Any]:
    """Runs a game from its beginning through all moves so far and one of the player's, to the player's next turn.

    Args:
        game: its id.
        players: their number.
        seed: of the game, and of an opponent that plays by chance.
        player: the one that the model is.
        opponent: the fields of an `Opponent`.
        moves: `[player, text]` for each move so far.
        move: the player's next; None at the beginning.

    Returns:
        `moves` with the new ones, `text` that the player has not seen, `done`, `reward` at the end, and whether
        the move was `invalid`.
    """
    match = _Match(game, players, seed)
    for who, text in moves:
        match.read(who)
        match.move(text)
    match.read(player)
    text, invalid = "", False
    if move is not None:
        try:
            match.move(move)
        except Exception as error:  # The game cannot take this text: it is as if nothing had been said.
            again = play(game, players, seed, player, opponent, moves, None)
            return again | {"text": f"error: {type(error).__name__}: {error}. Make another move.", "invalid": True}
        invalid = match.invalid(player)
    for _ in range(TURNS_IN_A_ROW):
        if match.done or match.turn == player:
            break
        match.oppose(Opponent(*opponent), f"{seed}/{len(match.moves)}")
    else:
        raise RuntimeError(f"the opponent had {TURNS_IN_A_ROW} turns in a row")
    text = match.read(player) if move is not None else match.seen[player]
    reward = match.rewards().get(player) if match.done else None
    return {"moves": match.moves, "text": text, "done": match.done, "reward": reward, "invalid": invalid}


class _Match:
    """A game in this process. Its own wrappers take the moves; what players see is read beneath them."""

    def __init__(self, game: str, players: int, seed: int) -> None:
        random.seed(seed)
        self._game = _library().make(game)
        self._game.reset(num_players=players, seed=seed)
        self._inner = self._game
        while "env" in vars(self._inner):
            self._inner = self._inner.env
        self.moves: list[Any] = []
        self.done = False
        self.seen = [""] * players

    @property
    def turn(self) -> int:
        return int(self._inner.state.current_player_id)

    def read(self, player: int) -> str:
        """What a player has not read yet, without that player's own moves."""
        observations, kinds = self._inner.state.observations, _library().ObservationType
        names = self._inner.state.role_mapping
        lines = [
            text if sender == -1 else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in observations[player]
            if (sender, kind) != (player, kinds.PLAYER_ACTION)
        ]
        observations[player] = []
        new = "\n".join(lines).strip()
        self.seen[player] = f"{self.seen[player]}\n{new}".strip()
        return new

    def move(self, text: str) -> None:
        self.moves = [*self.moves, [self.turn, text]]
        self.done, _ = self._game.step(text)

    def invalid(self, player: int) -> bool:
        state = self._inner.state
        return bool(state.game_info[player]["invalid_move"] or (state.error_count and self.turn == player))

    def rewards(self) -> dict[int, float]:
        rewards, _ = self._game.close()
        return {int(player): float(reward) for player, reward in (rewards or {}).items()}

    def oppose(self, opponent: Opponent, seed: str) -> None:
        """The move of the player whose turn it is."""
        own = self.turn
        if opponent.script is not None:
            made = sum(who == own for who, _ in self.moves)
            self.move(opponent.script[made % len(opponent.script)])
            return
        self.read(own)
        choices = opponent.moves or _named(self.seen[own])
        random.Random(seed).shuffle(choices)
        legal = next((choice for choice in choices if self._is_legal(choice, own)), None)
        if legal is None:
            raise RuntimeError(
                f"the opponent knows no legal move (it tried {choices}); give env.args.opponent_moves all that "
                f"there are in this game. It saw: ...{self.seen[own][-300:]}"
            )
        self.move(legal)

    def _is_legal(self, move: str, own: int) -> bool:
        """Tries a move on a copy of the game, and puts the global random generator back."""
        before, trial = random.getstate(), copy.copy(self)
        trial._game = copy.deepcopy(self._game)
        trial._inner = trial._game
        while "env" in vars(trial._inner):
            trial._inner = trial._inner.env
        try:
            trial.move(move)
            return not trial.invalid(own)
        except Exception:  # A game that raises on a move does not take it.
            return False
        finally:
            random.setstate(before)


def _named(seen: str) -> list[str]:
    """The moves that a player was told of last: those after the last `available`, or else all."""
    told = _BRACKETS.findall(seen[seen.lower().rfind("available") :]) or _BRACKETS.findall(seen)
    return sorted({text for text in told if not text.startswith(("[Player", "[GAME"))})
