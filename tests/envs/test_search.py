"""The search environment, played through its protocol with the demonstration, with wrong calls, and elsewhere."""

import json
from pathlib import Path

import pytest

from asyncrl.envs.base import Demonstrates, Environment, Message, Step
from asyncrl.envs.check import check_env
from asyncrl.envs.search import Search, exact_match, make
from asyncrl.messages import Task


async def _play(environment: Search, task: Task, messages: list[Message]) -> list[Step]:
    env = environment.make()
    await env.reset(task)
    steps = [await env.step(message) for message in messages]
    await env.close()
    return steps


def _said(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message["role"] == "assistant"]


def _call(name: str, **arguments: object) -> Message:
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("hops", [1, 2])
async def test_the_demonstration_searches_reads_and_earns_the_reward(hops: int) -> None:
    environment = make(people=20, hops=hops)
    assert isinstance(environment, Environment)
    assert isinstance(environment, Demonstrates)
    for split in ("train", "eval"):
        for index in range(3):
            task = environment.task(split, index)
            shown = environment.demonstration(task)
            steps = await _play(environment, task, _said(shown))
            assert [message for step in steps for message in step.messages] == [
                message for message in shown if message["role"] == "tool"
            ]
            assert steps[-1].rewards == {"exact_match": 1.0}
            assert task.answer in shown[-2]["content"]


async def test_a_wrong_answer_earns_nothing_and_wrong_calls_are_answered() -> None:
    environment = make(people=10)
    task = environment.task("train", 0)
    calls = [_call("read", document_id="p99"), _call("search", query="qqq"), _call("search", query="was", k=10**9)]
    steps = await _play(environment, task, [*calls, {"role": "assistant", "content": "no idea"}])
    texts = [step.messages[0]["content"] for step in steps[:-1]]
    assert "no document 'p99'" in texts[0]
    assert texts[1] == "no document has any of these words"
    assert len(texts[2].splitlines()) <= 20
    assert steps[-1].rewards == {"exact_match": 0.0}


def test_the_made_up_facts_are_the_same_everywhere_and_others_with_another_seed() -> None:
    first, again, other = make(people=10, seed=1), make(people=10, seed=1), make(people=10, seed=2)
    assert first.task("train", 3) == again.task("train", 3) != other.task("train", 3)


def test_answers_are_compared_without_case_punctuation_and_articles() -> None:
    assert exact_match("The  Hague!", "hague") == 1.0
    assert exact_match("in Hague", "Hague") == 0.0
    assert exact_match("four", ["4", "Four"]) == 1.0
    assert exact_match("4", 4) == 1.0


def _write(path: Path, rows: list[object]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


async def test_documents_and_questions_of_ones_own(tmp_path: Path) -> None:
    corpus = _write(tmp_path / "corpus.jsonl", [{"id": "1", "title": "Oslo", "text": "The capital of Norway."}])
    questions = _write(
        tmp_path / "questions.jsonl",
        [
            {"question": f"What is the capital of Norway, {n}?", "answer": ["Oslo", "Kristiania"]}
            for n in range(20)
        ],
    )
    environment = make(corpus=corpus, questions=questions)
    task = environment.task("train", 0)
    steps = await _play(environment, task, _said(environment.demonstration(task)))
    assert steps[1].messages[0]["content"] == "Oslo\nThe capital of Norway."
    assert steps[-1].rewards == {"exact_match": 1.0}


def test_files_that_cannot_be_used_are_told_with_the_line(tmp_path: Path) -> None:
    good = _write(tmp_path / "good.jsonl", [{"id": "1", "title": "", "text": "x"}])
    twice = _write(tmp_path / "twice.jsonl", [{"id": "1", "title": "", "text": "x"}] * 2)
    asked = _write(tmp_path / "asked.jsonl", [{"question": "?", "answer": "x"}])
    unanswered = _write(tmp_path / "unanswered.jsonl", [{"question": "?", "answer": "x"}, {"question": "?"}])
    with pytest.raises(ValueError, match="give both or none"):
        make(corpus=good)
    with pytest.raises(ValueError, match="two documents have the id '1'"):
        make(corpus=twice, questions=asked)
    with pytest.raises(ValueError, match=r"asked.jsonl, line 1: .*`id`"):
        make(corpus=asked, questions=asked)
    with pytest.raises(ValueError, match="line 2: it has no `answer`"):
        make(corpus=good, questions=unanswered)
    with pytest.raises(ValueError, match=r"env\.args\.hops = 3"):
        make(hops=3)


def test_it_keeps_the_promises_of_environments() -> None:
    assert check_env("asyncrl.envs.search:make", {"people": 10, "hops": 2}, tasks=1).problems == []
