"""The built-in environment: the same tasks everywhere, disjoint splits, and a reward that junk cannot raise."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.envs.arithmetic import make, split_of
from asyncrl.envs.base import Environment
from asyncrl.messages import Task


def _operands(task: Task) -> tuple[int, str, int]:
    text = task.prompt[0]["content"].removesuffix("=")
    operator = "+" if "+" in text else "-"
    left, right = text.split(operator)
    return int(left), operator, int(right)


async def _reward(task: Task, content: object) -> float | None:
    env = make().make()
    await env.reset(task)
    step = await env.step({"role": "assistant", "content": content})
    await env.close()
    assert step.done
    return step.rewards["correct"]


def test_it_is_an_environment() -> None:
    assert isinstance(make(), Environment)


FIRST_TRAIN = ["44+62=", "78+33=", "86+53="]
FIRST_EVAL = ["20+93=", "37+92=", "16+16="]


@given(
    split=st.sampled_from(["train", "eval"]),
    index=st.integers(0, 10**9),
    digits=st.integers(1, 18),
    operators=st.sampled_from(["+", "-", "+-"]),
)
def test_every_answer_is_right_and_every_operand_has_the_digits(split, index, digits, operators) -> None:
    task = make(digits=digits, operators=operators).task(split, index)
    left, operator, right = _operands(task)
    assert operator in operators
    assert len(str(left)) == len(str(right)) == digits
    assert int(task.answer) == (left + right if operator == "+" else left - right)
    assert split_of(left, operator, right) == split


def test_train_and_eval_share_no_problem_not_even_a_mirrored_one() -> None:
    for seed in (0, 1):
        environment = make(digits=1, seed=seed)
        seen = {
            split: {frozenset(_operands(environment.task(split, i))) for i in range(1500)}
            for split in ("train", "eval")
        }
        assert len(seen["train"] | seen["eval"]) == 55  # all unordered pairs of ten digits
        assert not seen["train"] & seen["eval"]
        assert 1 <= len(seen["eval"]) <= 15


def test_no_seed_can_move_a_problem_into_the_other_split() -> None:
    train = {_operands(make(seed=1).task("train", i)) for i in range(3000)}
    held_out = {_operands(make(seed=2).task("eval", i)) for i in range(3000)}
    assert not train & held_out


def test_tasks_are_the_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from asyncrl.envs.arithmetic import make\n"
        "print([make(operators='+-', seed=3).task(s, i).prompt for s in ('train', 'eval') for i in range(20)])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    here = [make(operators="+-", seed=3).task(s, i).prompt for s in ("train", "eval") for i in range(20)]
    assert done.stdout.strip() == str(here)


def test_the_first_tasks_never_change() -> None:
    # A run that is resumed with a newer version must see the tasks that it was started with.
    assert [make().task("train", i).prompt[0]["content"] for i in range(3)] == FIRST_TRAIN
    assert [make().task("eval", i).prompt[0]["content"] for i in range(3)] == FIRST_EVAL


def test_operands_are_uniform() -> None:
    # 90 values, 9000 draws: the count of each is Poisson(100); 6 standard deviations never happen by chance.
    counts = Counter(_operands(make().task("train", i))[side] for i in range(4500) for side in (0, 2))
    assert set(counts) == set(range(10, 100))
    assert all(40 < number < 160 for number in counts.values())


async def test_the_right_number_is_worth_one() -> None:
    task = make().task("train", 0)
    assert await _reward(task, task.answer) == 1.0
    assert await _reward(task, f"  {task.answer}\n") == 1.0


@pytest.mark.parametrize("junk", ["", " ", None, 7, [], {"a": 1}, "0" * 10**5, "1e999", "\x00", "½", "=", "nan"])
async def test_junk_is_worth_nothing_and_never_raises(junk: object) -> None:
    assert await _reward(make().task("train", 0), junk) == 0.0


async def test_a_number_that_only_contains_or_equals_in_value_is_worth_nothing() -> None:
    task = make().task("train", 0)
    for wrong in (f"{task.answer}0", f"1{task.answer}", f"0{task.answer}", f"+{task.answer}", f"{task.answer}.0"):
        assert await _reward(task, wrong) == 0.0


async def test_the_demonstration_earns_the_full_reward() -> None:
    environment = make(digits=3, operators="+-")
    for index in range(50):
        task = environment.task("train", index)
        assert await _reward(task, environment.demonstration(task)) == 1.0


async def test_a_step_before_the_reset_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="call reset"):
        await make().make().step({"role": "assistant", "content": "1"})


@pytest.mark.parametrize("arguments", [{"digits": 0}, {"digits": 19}, {"digits": "2"}, {"digits": True}])
def test_a_bad_number_of_digits_is_refused_with_the_range(arguments) -> None:
    with pytest.raises(ValueError, match=r"env\.args\.digits = .* from 1 to 18"):
        make(**arguments)


@pytest.mark.parametrize("operators", ["", "*", "+*", 3])
def test_bad_operators_are_refused_with_the_allowed_ones(operators) -> None:
    with pytest.raises(ValueError, match=r"env\.args\.operators = .* '\+-'"):
        make(operators=operators)


def test_a_task_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no task 0 of split 'test'"):
        make().task("test", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no task -1 of split 'train'"):
        make().task("train", -1)
