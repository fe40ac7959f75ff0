"""Mathematical answers with the real math-verify, in real processes; one test is for machines without it."""

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl.envs.base import Step
from asyncrl.envs.math_answers import Judge, MathAnswers, gold_of, make, math_reward
from asyncrl.envs.process_pool import CallRaised
from asyncrl.envs.rewards import RewardFault
from asyncrl.messages import EpisodeStatus

installed = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs pip install 'asyncrl[math]'")

PAIRS = [
    ("42", "The answer is \\boxed{42}.", True),
    ("42", "it may be 41, but it is \\boxed{42}", True),
    ("42", "it is 42", True),
    ("42", "it is 43", False),
    ("42", "", False),
    ("\\frac{1}{2}", "\\boxed{0.5}", True),
    ("0.5", "\\boxed{1/2}", True),
    ("x^2-1", "\\boxed{(x-1)(x+1)}", True),
    ("x^2-1", "\\boxed{(x-1)^2}", False),
    ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", True),
    ("2\\sqrt{3}", "$\\sqrt{12}$", True),
    ("12,345", "\\boxed{12345}", True),
    ("50\\%", "\\boxed{50\\%}", True),
    ("7", "\\boxed{" * 300, False),
    ("7", "\\boxed{1/0}", False),
    ("7", "\\boxed{\\frac{1}{}", False),
    ("7", "\x00\ud7ff" * 100, False),
]
HANGS = "\\boxed{9^{9^{9^{9}}}}"


def _write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def _answer(environment: MathAnswers, index: int, text: str) -> Step:
    async def play() -> Step:
        env = environment.make()
        start = await env.reset(environment.task("train", index))
        assert start.messages[-1]["content"].endswith("\nPut the final answer in \\boxed{}.")
        return await env.step({"role": "assistant", "content": text})

    return asyncio.run(play())


@installed
def test_answers_are_judged_as_mathematics() -> None:
    judge = Judge(workers=1, limit_s=60)
    assert [judge.of(gold_of({"answer": gold}), text)[0] for gold, text, _ in PAIRS] == [
        right for *_, right in PAIRS
    ]


@installed
def test_an_episode_is_rewarded_and_the_demonstration_is_right(tmp_path: Path) -> None:
    rows = [
        {"problem": f"What is {n} + 1?", "answer": str(n + 1), "solution": f"\\boxed{{{n + 1}}}"} for n in range(9)
    ]
    environment = make(_write(tmp_path / "sums.jsonl", rows), _write(tmp_path / "eval.jsonl", rows), limit_s=60)
    shown = environment.demonstration(environment.task("train", 0))
    assert _answer(environment, 0, shown).rewards == {"correct": 1.0}
    assert _answer(environment, 0, "\\boxed{-1}") == Step(True, {"correct": 0.0}, info={"judge_errors": 0.0})


@installed
def test_an_answer_that_hangs_fails_its_episode_and_not_the_next(tmp_path: Path) -> None:
    rows = [{"question": "What is 1 + 1?", "answer": "... #### 2"}]
    path = _write(tmp_path / "sums.jsonl", rows)
    environment = make(path, path, limit_s=3)
    with pytest.raises(RewardFault, match="did not answer within 3 s") as caught:
        _answer(environment, 0, HANGS)
    assert caught.value.status is EpisodeStatus.FAILED_TIME


@installed
def test_a_reference_answer_that_cannot_be_read_is_told_with_its_row(tmp_path: Path) -> None:
    good: dict[str, object] = {"problem": "?", "answer": "1"}
    early = _write(tmp_path / "early.jsonl", [good, {"problem": "?", "answer": "\\frac{1}{"}])
    with pytest.raises(ValueError, match=r"early.jsonl, row 1: math-verify .*frac"):
        make(early)
    late = _write(tmp_path / "late.jsonl", [good] * 100 + [{"problem": "?", "answer": "\\frac{1}{"}])
    environment = make(late, late)
    with pytest.raises(ValueError, match="row eval/100: math-verify"):
        environment.task("eval", 100)


@installed
def test_the_reward_function_judges_the_last_message() -> None:
    assert math_reward(final="so \\boxed{1/2}", answer="0.5") == 1.0
    assert math_reward(final="\\boxed{2}", answer=0.5) == 0.0
    with pytest.raises(ValueError, match="no `answer`"):
        math_reward(final="1", answer=None)


def test_a_row_without_problem_or_answer_is_told_before_anything_starts(tmp_path: Path) -> None:
    for row, wrong in (
        ({"answer": "1"}, "no text `problem`"),
        ({"problem": "?"}, "no `answer`"),
        ({"problem": "?", "answer": " "}, "no `answer`"),
        ({"problem": "?", "solution": "It is one."}, r"no `solution` with \\boxed"),
    ):
        with pytest.raises(ValueError, match=rf"line 2: .*{wrong}"):
            make(_write(tmp_path / "rows.jsonl", [{"problem": "?", "answer": "1"}, row]))
    with pytest.raises(ValueError, match=r"env\.args\.limit_s = 0"):
        make("rows.jsonl", limit_s=0)
    with pytest.raises(ValueError, match=r"env\.args\.workers = 0"):
        make("rows.jsonl", workers=0)


def test_the_reference_answer_is_found_in_the_usual_columns() -> None:
    assert (
        gold_of({"answer": "$7$"}) == gold_of({"answer": 7}) == gold_of({"answer": "... #### 7"}) == "\\boxed{7}"
    )
    assert gold_of({"solution": "\\boxed{6}, so \\boxed{7}"}) == "\\boxed{7}"
    assert gold_of({"answer": None, "solution": "#### 7"}) == "\\boxed{7}"


@pytest.mark.skipif(find_spec("math_verify") is not None, reason="math-verify is installed")
def test_without_the_library_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CallRaised, match=r"pip install 'asyncrl\[math\]'"):
        make(_write(tmp_path / "rows.jsonl", [{"problem": "?", "answer": "1"}]))
