"""Games of the real TextArena, in real processes; one test is for machines without it."""

import random
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from asyncrl.envs.adapters.textarena import TextArena, make
from asyncrl.envs.base import Environment, Message, Step
from asyncrl.messages import Task

# It is an extra, which the test environment does not install.
installed = pytest.mark.skipif(find_spec("textarena") is None, reason="needs pip install 'asyncrl[textarena]'")
FAST = {"workers": 1, "limit_s": 60}


@pytest.fixture
def opened() -> Iterator[list[TextArena]]:
    made: list[TextArena] = []
    yield made
    for environment in made:
        environment.pool.close()


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


async def _play(environment: TextArena, task: Task, moves: list[str], elsewhere: bool = False) -> list[Step]:
    """Makes the moves until the game is over; `elsewhere`: each in a new episode, restored from the last one."""
    env = environment.make()
    await env.reset(task)
    steps: list[Step] = []
    for move in moves:
        steps.append(await env.step(_says(move)))
        if steps[-1].done:
            break
        if elsewhere:
            blob, env = await env.snapshot(), environment.make()
            await env.restore(task, blob)
    await env.close()
    return steps


@installed
async def test_a_number_is_guessed_from_the_games_hints(opened: list[TextArena]) -> None:
    environment = make("GuessTheNumber-v0", **FAST)
    opened.append(environment)
    assert isinstance(environment, Environment)
    env = environment.make()
    start = await env.reset(environment.task("train", 0))
    assert "between 1 and 20" in start.messages[0]["content"]
    low, high, step = 1, 20, Step(False)
    while not step.done:
        guess = (low + high) // 2
        step = await env.step(_says(f"[{guess}]"))
        told = step.messages[0]["content"] if step.messages else ""
        low, high = (guess + 1, high) if "higher" in told else (low, guess - 1)
    assert step.rewards == {"game": 1.0}


@installed
async def test_two_players_take_turns_and_the_player_never_sees_its_own_moves_again(
    opened: list[TextArena],
) -> None:
    environment = make("TicTacToe-v0", **FAST)
    opened.append(environment)
    assert [environment.task("train", index).metadata["player"] for index in range(4)] == [0, 1, 0, 1]
    for index in range(4):
        task = environment.task("train", index)
        steps = await _play(environment, task, [f"[{cell}]" for cell in range(9)], elsewhere=True)
        again = await _play(environment, task, [f"[{cell}]" for cell in range(9)])
        assert steps == again
        own = f"[Player {task.metadata['player']}]"
        assert all(own not in message["content"] for step in steps for message in step.messages)


@installed
async def test_an_opponent_with_a_list_of_moves_plays_it(opened: list[TextArena]) -> None:
    environment = make("TicTacToe-v0", opponent=["[3]", "[4]", "[8]"], player=0, **FAST)
    opened.append(environment)
    steps = await _play(environment, environment.task("eval", 0), ["[0]", "[1]", "[2]"])
    assert "[Player 1] [3]" in steps[0].messages[0]["content"]
    assert steps[-1] == Step(True, {"game": 1.0}, info={"invalid_moves": 0.0})
    open_still = await _play(environment, environment.task("eval", 0), ["[0]", "[1]", "[6]"])
    assert not open_still[-1].done


@installed
async def test_an_invalid_move_is_answered_and_the_second_loses(opened: list[TextArena]) -> None:
    environment = make("TicTacToe-v0", player=0, **FAST)
    opened.append(environment)
    steps = await _play(environment, environment.task("train", 0), ["I do not know", "[99]"])
    assert "invalid move" in steps[0].messages[0]["content"]
    assert not steps[0].done
    assert steps[1] == Step(True, {"game": -1.0}, info={"invalid_moves": 1.0})
    steps = await _play(environment, environment.task("train", 0), ["", "[4]"])
    assert [step.info["invalid_moves"] for step in steps] == [1.0, 0.0]
    assert await environment.make().truncated("truncated_turns") == {"game": -1.0}


@installed
async def test_junk_in_many_games_is_answered_or_ends_them_with_a_reward(opened: list[TextArena]) -> None:
    for game in ("FrozenLake-v0", "Mastermind-v0", "KuhnPoker-v0"):
        environment = make(game, **FAST)
        opened.append(environment)
        for junk in ("", "[" * 50, "[9 9 9]", "é\x00"):
            steps = await _play(environment, environment.task("train", 1), [junk] * 5)
            assert steps[-1].done is (steps[-1].rewards.get("game") is not None)


@installed
async def test_a_game_that_does_not_name_its_moves_needs_a_list_of_the_opponents(opened: list[TextArena]) -> None:
    environment = make("ConnectFour-v0", opponent_moves=[f"[col {n}]" for n in range(7)], player=0, **FAST)
    opened.append(environment)
    draw = random.Random(0)
    steps = await _play(
        environment, environment.task("train", 0), [f"[col {draw.randrange(7)}]" for _ in range(60)]
    )
    assert steps[-1].done
    assert len(steps) > 3


@installed
async def test_the_seed_fixes_the_game_and_nothing_else_does(opened: list[TextArena]) -> None:
    environment = make("Mastermind-v0", **FAST)
    opened.append(environment)
    guesses = ["[1 2 3 4]", "[3 4 5 6]", "[6 5 2 1]"]
    games = []
    for index in (0, 0, 1, 2, 3):
        random.seed(index)
        games.append(await _play(environment, environment.task("train", index), guesses))
    assert games[0] == games[1]
    assert len({str(game) for game in games}) > 2


@installed
def test_games_that_cannot_be_played_here_are_refused() -> None:
    with pytest.raises(ValueError, match=r"env\.args\.game = 'NoSuch-v0': .*not found"):
        make("NoSuch-v0", **FAST)
    with pytest.raises(ValueError, match="neither one player nor two"):
        make("ThreePlayerTicTacToe-v0", **FAST)


def test_a_bad_argument_is_named() -> None:
    for key, value in (
        ("opponent", []),
        ("opponent", "mcts"),
        ("opponent_moves", [1]),
        ("player", 2),
        ("seed", -1),
    ):
        with pytest.raises(ValueError, match=rf"env\.args\.{key} = "):
            make(**{key: value})


@pytest.mark.skipif(find_spec("textarena") is not None, reason="TextArena is installed")
def test_without_the_library_the_error_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"pip install 'asyncrl\[textarena\]'"):
        make()
