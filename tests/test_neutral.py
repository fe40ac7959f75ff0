"""Texts from outside: they spell no control token, and are no longer than allowed."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.chat import ChatFormat
from asyncrl.toy import SPECIAL_TOKENS, write_tokenizer

MARKUP = ("<tool_call>", "</tool_response>", "<think>", "[/THINK]")
WORD = "hello"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    _add(folder, *MARKUP, WORD, "   ", special=False)
    _add(folder, "<|wide|>", special=True, lstrip=True, rstrip=True)
    return ChatFormat(folder)


def _add(folder: Path, *tokens: str, **how: bool) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    known = tokenizer["added_tokens"]
    for token in tokens:
        known.append({**known[0], "id": 256 + len(known), "content": token, **how})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _ids(*tokens: str, chat: ChatFormat) -> set[int]:
    ids = [chat.encode(token) for token in tokens]
    assert all(len(one) == 1 for one in ids)
    return {one[0] for one in ids}


def _attack() -> st.SearchStrategy[str]:
    pieces = st.sampled_from(
        [*SPECIAL_TOKENS, *MARKUP, WORD, "<|wide|>", "<", "|>", " ", "\n", "<|im_", "end|>", "é"]
    )
    return st.lists(pieces | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)).map("".join)


@settings(max_examples=50)
@given(text=_attack())
def test_no_control_token_is_left_in_a_tools_answer(chat: ChatFormat, text: str) -> None:
    message = chat.neutral({"role": "tool", "content": text})
    assert not set(chat.encode(message["content"])) & _ids(*SPECIAL_TOKENS, *MARKUP, "<|wide|>", chat=chat)
    # Nothing but spaces is put in, and a text that needs none is left as it is.
    assert message["content"].replace(" ", "") == text.replace(" ", "")
    assert chat.neutral(message) == message


@settings(max_examples=25)
@given(text=_attack())
def test_the_template_has_no_more_control_tokens_than_it_prints_itself(chat: ChatFormat, text: str) -> None:
    def controls(content: str) -> list[int]:
        message = chat.neutral({"role": "tool", "content": content})
        return [i for i in chat.prompt_ids([message]) if 256 <= i < 256 + len(SPECIAL_TOKENS)]

    assert controls(text) == controls("harmless")


def test_a_broken_token_stays_readable_and_users_may_use_markup(chat: ChatFormat) -> None:
    text = "a<|im_end|>b <think> hello   c"
    assert chat.neutral({"role": "tool", "content": text})["content"] == "a< |im_end|>b < think> hello   c"
    for role in ("user", "system", "assistant"):
        assert chat.neutral({"role": role, "content": text})["content"] == "a< |im_end|>b <think> hello   c"


def test_all_texts_of_a_message_are_made_neutral_and_the_message_itself_is_left(chat: ChatFormat) -> None:
    bad, good = "<|im_end|>", "< |im_end|>"
    message = {
        "role": "tool",
        "name": bad,
        "content": [{"type": "text", "text": bad}],
        "tool_call_id": None,
        "n": 1,
    }
    neutral = {
        "role": "tool",
        "name": good,
        "content": [{"type": "text", "text": good}],
        "tool_call_id": None,
        "n": 1,
    }
    assert chat.neutral(message) == neutral
    assert message["name"] == bad
    schema = {"type": "function", "function": {"name": "x", "description": bad}}
    assert chat.neutral(schema)["function"]["description"] == good


def test_a_calls_arguments_are_neutral_whatever_they_are_called(chat: ChatFormat) -> None:
    call = {
        "function": {"name": "f", "arguments": {"role": "<|im_end|>", "<|im_start|>": [{"role": "<|im_end|>"}]}}
    }
    changed = chat.neutral({"role": "assistant", "content": "", "tool_calls": [call]})
    assert changed["tool_calls"][0]["function"]["arguments"] == {
        "role": "< |im_end|>",
        "< |im_start|>": [{"role": "< |im_end|>"}],
    }


def test_a_text_within_the_limit_is_left_alone(chat: ChatFormat) -> None:
    assert chat.cut("x" * 50, 50) == "x" * 50
    assert chat.cut("", 1) == ""


def test_a_cut_text_ends_with_a_notice_for_the_model(chat: ChatFormat) -> None:
    cut = chat.cut("x" * 5000, 100)
    notice = "\n[cut: 5000 tokens, the limit is 100]"
    assert cut == "x" * (100 - len(notice)) + notice
    # Of a text that is very long, only the beginning is looked at.
    assert chat.cut("x" * 10**7, 100).endswith("x\n[cut: 10000000 characters, the limit is 100 tokens]")


def test_a_limit_too_small_for_the_notice_leaves_a_beginning(chat: ChatFormat) -> None:
    assert chat.cut("x" * 5000, 3) == "xxx"
    assert chat.cut("😀😀", 3) == ""


@settings(max_examples=50)
@given(text=st.text(st.sampled_from("aé😀\n <"), max_size=200), limit=st.integers(1, 120))
def test_a_cut_text_never_has_more_tokens_than_the_limit(chat: ChatFormat, text: str, limit: int) -> None:
    cut = chat.cut(text, limit)
    assert len(chat.encode(cut)) <= limit
    assert text.startswith(cut.partition("[cut: ")[0].removesuffix("\n"))
    assert (cut == text) == (len(chat.encode(text)) <= limit)
