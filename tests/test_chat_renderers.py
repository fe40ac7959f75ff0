"""Families of the library `renderers`: taken if they make the template's ids, and only then."""

import importlib.util
import json
from pathlib import Path

import pytest

from asyncrl.chat import ChatFormat, Message
from asyncrl.toy import SPECIAL_TOKENS, write_tokenizer

INSTALLED = all(importlib.util.find_spec(name) for name in ("renderers", "httpx"))
needs_library = pytest.mark.skipif(not INSTALLED, reason="needs the extra: pip install 'asyncrl[renderers]'")
without_library = pytest.mark.skipif(INSTALLED, reason="says what happens where the library is not installed")

TEMPLATES = Path(__file__).parent / "chat_templates"
TOKENS = [
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "say", "description": "Says.", "parameters": PARAMETERS}}]
QUESTION: Message = {"role": "user", "content": "say it"}
ANSWER: Message = {"role": "tool", "name": "say", "tool_call_id": "call_0", "content": "said"}
CALL = "<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>17</arg_value>\n"
CALL += "<arg_key>n</arg_key>\n<arg_value>17</arg_value>\n</tool_call>"


def _folder(folder: Path, template: str) -> Path:
    write_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for i, token in enumerate(TOKENS):
        added = {**tokenizer["added_tokens"][0], "id": 256 + len(SPECIAL_TOKENS) + i, "content": token}
        tokenizer["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())
    return folder


@needs_library
def test_a_family_that_makes_the_templates_ids_is_found_and_reads_turns(tmp_path: Path) -> None:
    chat = ChatFormat(_folder(tmp_path, "glm"))
    assert chat.calls == "glm-4.5 (renderers)"
    chat.check_tools(TOOLS)
    assert set(chat.encode("<|user|><|observation|><|endoftext|>")) <= set(chat.stop_token_ids)
    message = chat.message(chat.encode(f"<think>so</think>\nI say{CALL}<|observation|>"), TOOLS)
    # The schema says what is a text and what a number.
    call = {"id": "call_0", "type": "function", "function": {"name": "say", "arguments": {"text": "17", "n": 17}}}
    assert message == {"role": "assistant", "content": "I say", "reasoning_content": "so", "tool_calls": [call]}


@needs_library
def test_a_call_that_the_family_cannot_read_is_told(tmp_path: Path) -> None:
    chat = ChatFormat(_folder(tmp_path, "glm"))
    message = chat.message(chat.encode(f"\n<think></think>\n{CALL}<tool_call>say\n<arg_key>te"), TOOLS)
    assert len(message["tool_calls"]) == 1
    assert message["malformed_calls"][0].startswith("a tool call is not closed: ")
    assert "<arg_key>te" in message["content"]


@needs_library
def test_a_family_appends_where_the_template_shows_no_end_of_turn(tmp_path: Path) -> None:
    chat = ChatFormat(_folder(tmp_path, "glm"))
    turn = chat.encode(f"\n<think></think>\n{CALL}<|observation|>")
    talk = [QUESTION, chat.message(turn, TOOLS)]
    suffix = chat.suffix_ids(talk, True, [ANSWER], TOOLS, turn=turn)
    assert suffix == chat.encode("\n<tool_response>\nsaid\n</tool_response><|assistant|>")
    assert chat.prompt_ids([QUESTION], TOOLS) + turn + suffix == chat.prompt_ids([*talk, ANSWER], TOOLS)
    # A new question makes GLM's template forget reasoning: the record forks.
    assert chat.suffix_ids(talk, True, [QUESTION], TOOLS, turn=turn) is None
    assert chat.suffix_ids(talk, True, [ANSWER], TOOLS) is None


@needs_library
def test_a_family_that_makes_other_ids_is_not_taken(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "glm")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("# Tools", "# My tools"))
    assert ChatFormat(folder).calls is None
    with pytest.raises(ValueError, match=r"'glm-4\.5': this family makes other token ids than .* chat template"):
        ChatFormat(folder, renderer="glm-4.5")
    with pytest.raises(ValueError, match=r"'glm': must be auto, template, or one of deepseek-r1, .*qwen3"):
        ChatFormat(folder, renderer="glm")


@needs_library
def test_what_can_be_read_without_the_library_is_read_without_it(tmp_path: Path) -> None:
    assert ChatFormat(_folder(tmp_path, "hermes")).calls == "hermes"
    assert ChatFormat(_folder(tmp_path, "glm"), renderer="template").calls is None


@without_library
def test_without_the_library_a_family_is_refused_with_the_extra_to_install(tmp_path: Path) -> None:
    chat = ChatFormat(_folder(tmp_path, "glm"))
    with pytest.raises(ValueError, match=r"prints tool calls as .*pip install 'asyncrl\[renderers\]'"):
        chat.check_tools(TOOLS)
    with pytest.raises(ValueError, match=r"renderer = 'glm-4\.5': No module named .*'asyncrl\[renderers\]'"):
        ChatFormat(tmp_path, renderer="glm-4.5")
