"""Puzzles of the real reasoning-gym, in real processes; one test is for machines without it."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from asyncrl.envs.adapters.reasoning_gym import PRESETS, ReasoningGym, make
from asyncrl.envs.base import Demonstrates, Environment, Step
from asyncrl.envs.rewards import RewardFault

# It is an extra, which the test environment does not install.
installed = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="needs pip install 'asyncrl[reasoning-gym]'"
)
SMALL = {"size": 40, "eval_size": 20, "workers": 1, "limit_s": 60}


@pytest.fixture
def opened() -> Iterator[list[ReasoningGym]]:
    made: list[ReasoningGym] = []
    yield made
    for environment in made:
        environment.pool.close()


async def _step(environment: ReasoningGym, index: int, text: str) -> Step:
    env = environment.make()
    await env.reset(environment.task("train", index))
    step = await env.step({"role": "assistant", "content": text})
    await env.close()
    return step


async def _paid(environment: ReasoningGym, index: int, text: str) -> float:
    reward = (await _step(environment, index, text)).rewards["correct"]
    assert reward is not None
    return reward


@installed
@pytest.mark.parametrize("preset", PRESETS)
async def test_each_preset_makes_short_tasks_whose_demonstration_earns_all_and_junk_nothing(
    preset: str, opened: list[ReasoningGym]
) -> None:
    environment = make(preset, **SMALL)
    opened.append(environment)
    assert isinstance(environment, Environment)
    assert isinstance(environment, Demonstrates)
    for index in (0, 17):
        task = environment.task("train", index)
        assert len(task.prompt[0]["content"]) <= 120
        assert len(environment.demonstration(task)) <= 4
        assert await _paid(environment, index, f" {environment.demonstration(task)}\n") == 1.0
        assert [await _paid(environment, index, junk) for junk in ("", "foo", "0123456789")] == [0.0] * 3
    questions = {split: environment.task(split, 0).prompt[0]["content"] for split in ("train", "eval")}
    assert questions["train"] != questions["eval"]
    assert environment.task("train", 40) == environment.task("train", 0)
    with pytest.raises(IndexError, match="has 20 tasks"):
        environment.task("eval", 20)


@installed
async def test_a_scorer_that_raises_on_an_answer_gives_nothing_and_is_counted(opened: list[ReasoningGym]) -> None:
    environment = make("prime_factorization", **SMALL)
    opened.append(environment)
    step = await _step(environment, 0, "it is prime")
    assert step == Step(True, {"correct": 0.0}, info={"scorer_raised": 1.0})


@installed
async def test_a_scorer_that_pays_for_junk_pays_for_the_right_answer_only(opened: list[ReasoningGym]) -> None:
    environment = make("game_of_life_halting", **SMALL)
    opened.append(environment)
    gold = environment.task("train", 0).answer
    assert await _paid(environment, 0, str(gold)) == 1.0
    assert await _paid(environment, 0, "foo") == 0.0


@installed
async def test_part_of_an_answer_is_paid_in_part_unless_it_must_be_exact(opened: list[ReasoningGym]) -> None:
    environment = make("gcd", **SMALL)
    opened.append(environment)
    text = f"it is {environment.task('train', 0).answer}"
    assert 0.0 < await _paid(environment, 0, text) < 1.0
    environment.exact = True
    assert await _paid(environment, 0, text) == 0.0


@installed
async def test_a_dataset_without_reference_answers_is_scored_but_not_demonstrated(
    opened: list[ReasoningGym],
) -> None:
    environment = make("propositional_logic", **SMALL)
    opened.append(environment)
    task = environment.task("train", 0)
    assert task.answer is None
    assert await _paid(environment, 0, "foo") == 0.0
    with pytest.raises(ValueError, match="no reference answers"):
        environment.demonstration(task)
    with pytest.raises(ValueError, match=r"env\.args\.exact"):
        make("propositional_logic", exact=True, **SMALL)


@installed
async def test_an_answer_between_tags_is_the_answer(opened: list[ReasoningGym]) -> None:
    environment = make(tags=True, **SMALL)
    opened.append(environment)
    task = environment.task("train", 0)
    assert task.prompt[0]["content"].endswith("between <answer> and </answer>.")
    shown = f"<answer>1</answer> no, {environment.demonstration(task)} is right"
    assert await _paid(environment, 0, shown) == 1.0
    assert await _step(environment, 0, str(task.answer)) == Step(True, {"correct": 0.0}, info={"no_answer": 1.0})


@installed
async def test_entries_that_draw_from_the_global_generator_are_the_same_when_they_are_scored(
    opened: list[ReasoningGym],
) -> None:
    environment = make("list_functions", **SMALL)
    opened.append(environment)
    for index in range(4):
        assert await _paid(environment, index, str(environment.task("train", index).answer)) == 1.0


@installed
def test_a_configuration_on_which_the_generator_never_ends_is_refused_in_time() -> None:
    config = {"min_base": 2, "max_base": 2}
    with pytest.raises(ValueError, match=r"env\.args\.config = .*did not answer within 2 s"):
        make("base_conversion", config=config, workers=1, limit_s=2)


@installed
async def test_an_answer_on_which_the_scorer_hangs_fails_the_episode_and_not_the_next(
    opened: list[ReasoningGym],
) -> None:
    environment = make("countdown", **SMALL)
    opened.append(environment)
    environment.limit_s = 2
    with pytest.raises(RewardFault, match=r"was not scored: .*did not answer within 2 s"):
        await _step(environment, 0, "9**9**9**9")
    environment.limit_s = 60
    assert await _paid(environment, 0, environment.demonstration(environment.task("train", 0))) == 1.0


@installed
def test_names_and_configurations_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"env\.args\.task = 'no_such', .*not registered"):
        make("no_such")
    with pytest.raises(ValueError, match="unexpected keyword argument 'colour'"):
        make("gcd", config={"colour": 1})


def test_a_bad_argument_is_named() -> None:
    for key, value in (("size", 0), ("eval_size", True), ("seed", -1), ("workers", 0), ("limit_s", 0)):
        with pytest.raises(ValueError, match=rf"env\.args\.{key} = {value}"):
            make(**{key: value})
    with pytest.raises(ValueError, match="without `seed` and `size`"):
        make("gcd", config={"seed": 1})


@pytest.mark.skipif(
    find_spec("reasoning_gym") is not None, reason="reasoning-gym is installed, and this is about its absence"
)
def test_without_the_library_the_error_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"pip install 'asyncrl\[reasoning-gym\]'"):
        make()
