"""Files of conversations and preference pairs: what is read, and how a line that cannot be used is refused."""

import json
from pathlib import Path

import pytest

from asyncrl.datasets import conversations, pairs
from asyncrl.settings import UsageError

QUESTION = {"role": "user", "content": "2+2="}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "5"))
AGAIN = {"role": "user", "content": "sure?"}


def _file(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_conversation_says_which_of_its_turns_are_trained(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    talk = [QUESTION, call | {"train": False}, {"role": "tool", "content": "4"}, GOOD]
    [read] = conversations(_file(tmp_path, "", {"messages": talk, "tools": tools, "source": "ignored"}, ""))
    assert read.where == f"{tmp_path}/data.jsonl, line 2"
    assert read.messages == [QUESTION, call, talk[2], GOOD]
    assert read.trained == [False, False, False, True]
    assert read.tools == tools


def test_a_file_of_another_system_is_read_with_its_mark_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    line = json.dumps({"messages": [QUESTION | {"content": "a\u2028b"}, GOOD]}, ensure_ascii=False)
    path.write_bytes(f"{line}\r\n{line}\r\n".encode("utf-8-sig"))
    assert [talk.messages[0]["content"] for talk in conversations(path)] == ["a\u2028b"] * 2


FORMS = {
    "whole conversations": {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    "messages after a prompt": {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    "texts": {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    "texts after messages": {"prompt": [QUESTION], "chosen": "4", "rejected": "5"},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_is_two_conversations_in_any_of_the_usual_forms(tmp_path: Path, form: str) -> None:
    [(chosen, rejected)] = pairs(_file(tmp_path, FORMS[form]))
    assert chosen.messages == [QUESTION, GOOD]
    assert rejected.messages == [QUESTION, BAD]
    assert chosen.trained == rejected.trained == [False, True]


def test_only_what_follows_the_common_beginning_of_a_pair_is_trained(tmp_path: Path) -> None:
    begin = [QUESTION, GOOD, AGAIN]
    line = {"chosen": [*begin, GOOD], "rejected": [*begin, BAD, AGAIN, GOOD]}
    [(chosen, rejected)] = pairs(_file(tmp_path, line))
    assert chosen.trained == [False, False, False, True]
    assert rejected.trained == [False, False, False, True, False, True]


REFUSED_CONVERSATIONS = {
    "not valid JSON": '{"messages": [',
    "a list; one JSON object": [1],
    '"messages" must be a list of at least one message, and is missing': {"text": "hello"},
    '"messages" must be a list of at least one message, and is []': {"messages": []},
    '"messages"[1]: a message is {"role"': {"messages": [QUESTION, "4"]},
    '"messages"[0]: "content" must be text': {"messages": [{"role": "user", "content": [{"text": "x"}]}, GOOD]},
    '"content" must be text (or null beside "tool_calls"), and is missing': {"messages": [{"role": "assistant"}]},
    '"tool_calls" must be a list of objects': {"messages": [QUESTION, GOOD | {"tool_calls": ["add"]}]},
    '"train" must be true or false': {"messages": [QUESTION | {"train": False}, GOOD]},
    "ends with a message of role 'user'": {"messages": [QUESTION, GOOD, AGAIN]},
    'every assistant message says "train": false': {"messages": [QUESTION, GOOD | {"train": False}]},
    '"tools" must be a list of objects': {"messages": [QUESTION, GOOD], "tools": {"name": "add"}},
}


@pytest.mark.parametrize("what", REFUSED_CONVERSATIONS)
def test_a_line_that_is_no_conversation_is_refused_with_its_number(tmp_path: Path, what: str) -> None:
    path = _file(tmp_path, {"messages": [QUESTION, GOOD]}, "", REFUSED_CONVERSATIONS[what])
    with pytest.raises(UsageError) as refused:
        conversations(path)
    assert str(refused.value).startswith(f"{path}, line 3: ")
    assert what in str(refused.value)


REFUSED_PAIRS = {
    '"rejected" must be a list': {"prompt": "2+2=", "chosen": "4"},
    '"chosen" is a text, which needs a "prompt"': {"chosen": "4", "rejected": "5"},
    "are the same, or one begins with the other": {"prompt": "2+2=", "chosen": "4", "rejected": "4"},
    '"chosen" ends with a message of role': {"chosen": [QUESTION], "rejected": [QUESTION, BAD]},
    "first differ in message 0": {"chosen": [QUESTION, GOOD], "rejected": [AGAIN, GOOD]},
}


@pytest.mark.parametrize("what", REFUSED_PAIRS)
def test_a_line_that_is_no_pair_is_refused_with_its_number(tmp_path: Path, what: str) -> None:
    path = _file(tmp_path, FORMS["texts"], REFUSED_PAIRS[what])
    with pytest.raises(UsageError) as refused:
        pairs(path)
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert what in str(refused.value)


def test_a_file_that_cannot_be_read_or_is_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.jsonl cannot be read"):
        conversations(tmp_path / "nowhere.jsonl")
    with pytest.raises(UsageError, match="is empty"):
        conversations(_file(tmp_path, "", "  "))
    (tmp_path / "latin").write_bytes(b'{"messages": "\xff"}')
    with pytest.raises(UsageError, match="cannot be read"):
        pairs(tmp_path / "latin")
