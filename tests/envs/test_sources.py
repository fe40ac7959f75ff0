"""Sources of tasks: every row once an epoch, splits that share nothing, and errors that name file and line."""

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.envs.rows import read, task_of
from asyncrl.envs.sources import SEARCH, Rows, Stream
from asyncrl.messages import Task

ROWS = [{"question": f"{i}+{i}=", "answer": str(2 * i), "level": i % 3} for i in range(300)]


def asked(task: Task) -> str:
    return task.prompt[-1]["content"]


def all_of(source: Any, split: Any, start: int = 0) -> list[Task]:
    found = []
    while True:
        try:
            found.append(source.task(split, start + len(found)))
        except IndexError:
            return found


# ---- rows to tasks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "metadata"),
    [
        ({"prompt": "2+2=", "answer": 4}, "2+2=", 4, {}),
        ({"question": "2+2=", "answer": "4", "level": 1}, "2+2=", "4", {"level": 1}),
        ({"messages": [{"role": "user", "content": "2+2="}]}, "2+2=", None, {}),
        ({"prompt": "2+2=", "question": "other", "x": None}, "2+2=", None, {"question": "other"}),
        ({"prompt": None, "question": "2+2="}, "2+2=", None, {}),
        ({"prompt": "2+2=", "seen": {"at": (1, 2)}}, "2+2=", None, {"seen": {"at": [1, 2]}}),
    ],
)
def test_columns_become_prompt_answer_and_metadata(row: Any, prompt: str, answer: Any, metadata: Any) -> None:
    assert task_of(row, "t", "") == Task("t", [{"role": "user", "content": prompt}], answer, metadata)


def test_a_row_of_verl_is_a_task_as_it_is() -> None:
    prompt = [{"role": "system", "content": "Count."}, {"role": "user", "content": "2+2="}]
    rest = {
        "data_source": "sums",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 7},
    }
    assert task_of({"prompt": prompt} | rest, "t", "") == Task("t", prompt, "4", rest)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("text", "row 3: a str; a row is a mapping"),
        ({"text": "2+2="}, "row 3: no column 'prompt', 'messages', 'question'; there are: text"),
        ({"prompt": ""}, "row 3: 'prompt' must be a text or a list of messages, and is ''"),
        ({"messages": [{"content": "hi"}]}, "row 3: 'messages': a message is .* and this is {'content': 'hi'}"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "ends with an assist",
        ),
        ({"prompt": "a", "large": 2**70}, "row 3: a column cannot be sent as JSON: "),
        ({"prompt": "a", "image": object()}, "row 3: a column cannot be sent as JSON: .*object"),
    ],
)
def test_a_row_that_is_no_task_is_refused_with_its_place(row: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        task_of(row, "t", "row 3")


# ---- order -----------------------------------------------------------------------------------------


@given(size=st.integers(1, 60), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**9))
@settings(max_examples=50)
def test_an_epoch_is_a_permutation_of_all_rows(size: int, seed: int, epoch: int) -> None:
    source = Rows(ROWS[:size], ROWS[:1], seed=seed)
    tasks = [source.task("train", epoch * size + i) for i in range(size)]
    assert {asked(task) for task in tasks} == {row["question"] for row in ROWS[:size]}
    assert len({task.id for task in tasks}) == size


@given(indices=st.lists(st.integers(0, 2000), max_size=20), seed=st.integers(0, 3))
@settings(max_examples=20)
def test_a_task_depends_on_split_and_index_alone(indices: list[int], seed: int) -> None:
    source = Rows(ROWS, seed=seed)
    again = {index: Rows(ROWS, seed=seed).task("train", index) for index in reversed(indices)}
    for index in indices:
        assert source.task("train", index) == again[index]


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    def order(seed: int, epoch: int) -> list[str]:
        return [Rows(ROWS[:30], ROWS[:1], seed=seed).task("train", 30 * epoch + i).id for i in range(30)]

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert len(set(map(tuple, orders))) == 4
    # The first place is uniform: 30 rows, 900 epochs, Poisson(30) each; 6 standard deviations never happen.
    source = Rows(ROWS[:30], ROWS[:1])
    first = Counter(source.task("train", 30 * epoch).id for epoch in range(900))
    assert len(first) == 30
    assert max(first.values()) < 30 + 6 * math.sqrt(30)


FIRST = [930, 744, 132, 567, 361]


def test_the_order_never_changes() -> None:
    # A run that is resumed with a newer version must see the tasks that it was started with.
    source = Rows([{"prompt": str(i)} for i in range(1000)], [{"prompt": "e"}], seed=5)
    assert [int(asked(source.task("train", i))) for i in (0, 1, 2, 1000, 1001)] == FIRST


def test_training_ends_after_its_epochs_and_evaluation_after_one() -> None:
    source = Rows(ROWS[:10], ROWS[10:13], epochs=2)
    assert Counter(asked(task) for task in all_of(source, "train")) == {row["question"]: 2 for row in ROWS[:10]}
    assert [asked(task) for task in all_of(source, "eval")] == [row["question"] for row in ROWS[10:13]]
    Rows(ROWS[:10]).task("train", 10**12)


# ---- splits ----------------------------------------------------------------------------------------


def test_the_splits_share_no_prompt_whatever_the_seed() -> None:
    twice = ROWS + [row | {"answer": "other"} for row in ROWS]
    one, other = Rows(twice, seed=1, epochs=1), Rows(list(reversed(twice)), seed=2, epochs=1)
    train, held_out = ({asked(task) for task in all_of(one, split)} for split in ("train", "eval"))
    assert held_out == {asked(task) for task in all_of(other, "eval")}
    assert not train & held_out
    assert len(train | held_out) == 300
    assert 5 < len(held_out) < 60  # Binomial(300, 0.1).


def test_a_share_of_nothing_holds_nothing_out_and_everything_held_out_is_an_error() -> None:
    assert len(all_of(Rows(ROWS, share=0, epochs=1), "train")) == 300
    assert all_of(Rows(ROWS, share=0), "eval") == []
    with pytest.raises(
        ValueError, match="all 4 rows are held out for evaluation: those of one prompt stay together"
    ):
        Rows(ROWS[:1] * 4, share=0.9999).task("train", 0)


@pytest.mark.parametrize("arguments", [{"seed": -1}, {"seed": "a"}, {"epochs": 0}, {"epochs": True}, {"share": 1}])
def test_arguments_out_of_range_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match="must be a"):
        Rows(ROWS, **arguments)


def test_no_rows_are_no_source() -> None:
    with pytest.raises(ValueError, match="there are no rows"):
        Rows([])


class Columns:
    """As a data set of Hugging Face: a length, a dict for an index, and nothing else."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < 20:
            raise IndexError(index)
        return ROWS[index]


def test_whatever_has_a_length_and_gives_dicts_is_a_source() -> None:
    tasks = [Rows(source, epochs=1) for source in (Columns(), ROWS[:20])]
    assert all_of(tasks[0], "train") == all_of(tasks[1], "train")
    assert all_of(tasks[0], "eval") == all_of(tasks[1], "eval")


# ---- streams ---------------------------------------------------------------------------------------


def test_a_stream_is_read_as_far_as_it_is_asked_for_and_kept() -> None:
    read_rows = []

    def endless() -> Iterator[dict[str, Any]]:
        i = 0
        while True:
            read_rows.append(i)
            yield {"prompt": str(i)}
            i += 1

    stream = Stream(endless)
    held_out = stream.task("eval", 0)
    until = len(read_rows)
    train = [stream.task("train", i) for i in range(20)]
    assert len(read_rows) < until + 40
    assert (
        [stream.task("train", i) for i in range(20)]
        == train
        == [Stream(endless).task("train", i) for i in range(20)]
    )
    assert held_out not in train
    assert held_out.id == f"eval/{asked(held_out)}"


def test_a_stream_ends_where_its_rows_end_and_an_empty_split_is_not_searched_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(lambda: iter(ROWS))
    assert len(all_of(stream, "train")) + len(all_of(stream, "eval")) == 300
    monkeypatch.setattr("asyncrl.envs.sources.SEARCH", SEARCH // 1000)
    same = Stream(lambda: ({"prompt": "again"} for _ in iter(int, 1)))
    assert same.task("train", 5).id == "train/5"
    with pytest.raises(IndexError, match="'eval' has no task 0 in 100 rows"):
        same.task("eval", 0)


# ---- files -----------------------------------------------------------------------------------------


def test_a_file_of_lines_gives_its_rows_by_number_and_in_order(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS[:5]] + ['{"prompt": "größer?"}']
    file.write_bytes(b"\xef\xbb\xbf\r\n" + "\r\n\n".join(lines).encode())
    rows = read(file)
    assert list(rows) == [*ROWS[:5], {"prompt": "größer?"}]
    assert [rows[i] for i in reversed(range(6))] == list(reversed(list(rows)))
    assert rows.where(2).endswith("train.jsonl, line 6")
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert read(file)[0] == {"prompt": "a"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": "a"', r"bad\.jsonl, line 3: no JSON: .*one object per line"),
        (b'{"prompt": "a"}\n[1]', r"bad\.jsonl, line 2: a list; one JSON object per line"),
        (b'{"prompt": "a"}\n{"text": "a"}', r"bad\.jsonl, line 2: no column 'prompt'.*there are: text"),
        (b'{"prompt": "\xff"}', r"bad\.jsonl, line 1: no JSON"),
        (b"\n \n", r"bad\.jsonl is empty"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_with_its_file(tmp_path: Path, text: bytes, said: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=said):
        read(file)


def test_a_file_that_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.jsonl cannot be read: .*No such file"):
        read(tmp_path / "no.jsonl")
    with pytest.raises(ValueError, match=r"train\.csv: give a file whose name ends in \.jsonl or \.parquet"):
        read(tmp_path / "train.csv")


def test_a_parquet_file_gives_its_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'asyncrl[parquet]'")
    pyarrow = pytest.importorskip("pyarrow")
    prompt = [{"role": "user", "content": "2+2="}]
    rest = {
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 7},
    }
    file = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": prompt} | rest] * 3), file)
    rows = read(file)
    assert len(rows) == len(list(rows)) == 3
    assert rows.where(2).endswith("train.parquet, row 2")
    assert Rows(rows, share=0).task("train", 4).prompt == prompt
    assert task_of(rows[2], "t", "") == Task("t", prompt, "4", rest)
    file.write_bytes(b"PAR1 not")
    with pytest.raises(ValueError, match=r"train\.parquet cannot be read: "):
        read(file)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"parquet needs pyarrow: pip install 'asyncrl\[parquet\]'"):
        read(tmp_path / "train.parquet")


def test_the_tasks_are_the_same_in_another_process_with_another_hash_seed(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    code = (
        "import sys; from asyncrl.envs.rows import read; from asyncrl.envs.sources import Rows\n"
        "source = Rows(read(sys.argv[1]), seed=3)\n"
        "print([source.task(s, i).id for s in ('train', 'eval') for i in range(9)], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", code, str(file)]
    done = subprocess.run(command, env={"PYTHONHASHSEED": "77"}, capture_output=True, text=True, timeout=60)
    source = Rows(read(file), seed=3)
    here = [source.task(split, i).id for split in ("train", "eval") for i in range(9)]
    assert done.stdout.strip() == f"{here} False"
