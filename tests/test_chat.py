"""Messages to ids and back: by the model's template, and never twice for what was sampled."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.chat import ChatFormat, Message
from asyncrl.tool_calls import END_OF_THINK, MARKERS, OPEN
from asyncrl.toy import SPECIAL_TOKENS, write_tokenizer

QWEN = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
FORGETFUL = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{%- if m.role == 'assistant' and not loop.last %}{{ 'dropped' }}{% else %}{{ m.content }}{% endif %}\
{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES = Path(__file__).parent / "chat_templates"

QUESTION = [{"role": "user", "content": "12+34="}]
AGAIN = [{"role": "tool", "content": "wrong"}, {"role": "user", "content": "again"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def _with_template(folder: Path, template: str) -> ChatFormat:
    (folder / "chat_template.jinja").write_text(template)
    return ChatFormat(folder)


def test_a_prompt_ends_with_the_header_of_the_assistants_turn(folder: Path) -> None:
    chat = ChatFormat(folder)
    ids = chat.prompt_ids(QUESTION)
    # One id for each role's header, one for each character, one for the end of the message.
    assert len(ids) == 1 + len("12+34=") + 1 + 1
    assert ids[-1] == 256 + SPECIAL_TOKENS.index("<|im_start|>assistant\n")
    assert chat.decode(ids) == "12+34="


@pytest.mark.parametrize("template", [None, QWEN])
@pytest.mark.parametrize("ended", [True, False])
def test_record_and_suffix_make_the_rendering_of_the_whole_conversation(
    folder: Path, template: str | None, ended: bool
) -> None:
    chat = ChatFormat(folder) if template is None else _with_template(folder, template)
    sampled = [*chat.encode("46"), *([chat.end_id] if ended else [])]
    before = [*QUESTION, chat.message(sampled)]
    suffix = chat.suffix_ids(before, ended, AGAIN)
    assert suffix is not None
    assert chat.prompt_ids(QUESTION) + sampled + suffix == chat.prompt_ids([*before, *AGAIN])


def test_the_suffix_never_depends_on_how_the_turn_would_be_tokenised(folder: Path) -> None:
    chat = ChatFormat(folder)
    # Half of a two-byte character: the text of these ids does not encode to them again.
    broken = chat.encode("é")[:1]
    assert chat.encode(chat.decode(broken)) != broken
    turn = [*broken, chat.end_id]
    suffix = chat.suffix_ids([*QUESTION, chat.message(turn)], True, AGAIN)
    whole = chat.suffix_ids([*QUESTION, chat.message([*chat.encode("46"), chat.end_id])], True, AGAIN)
    assert suffix == whole


def test_a_template_that_rewrites_earlier_turns_gives_no_suffix(folder: Path) -> None:
    chat = _with_template(folder, FORGETFUL)
    assert chat.suffix_ids([*QUESTION, {"role": "assistant", "content": "46"}], True, AGAIN) is None


def test_a_second_turn_follows_a_second_turn(folder: Path) -> None:
    chat = ChatFormat(folder)
    messages, ids = list(QUESTION), chat.prompt_ids(QUESTION)
    for answer in ("4", "45", "46"):
        turn = [*chat.encode(answer), chat.end_id]
        messages.append(chat.message(turn))
        suffix = chat.suffix_ids(messages, True, AGAIN)
        assert suffix is not None
        messages += AGAIN
        ids += turn + suffix
    assert ids == chat.prompt_ids(messages)


def test_tools_are_part_of_the_prompt_and_not_of_the_suffix(folder: Path) -> None:
    chat = ChatFormat(folder)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    prompt = chat.prompt_ids(QUESTION, tools)
    assert "add" in chat.decode(prompt)
    turn = [*chat.encode("46"), chat.end_id]
    suffix = chat.suffix_ids([*QUESTION, chat.message(turn)], True, AGAIN, tools)
    assert suffix is not None
    assert "add" not in chat.decode(suffix)
    assert prompt + turn + suffix == chat.prompt_ids([*QUESTION, chat.message(turn), *AGAIN], tools)


# ---- tool calls ----------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
ADD = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": [34]}}}
RESULT = [{"role": "tool", "name": "add", "tool_call_id": "call_0", "content": "46"}]


def _with_file(folder: Path, name: str) -> ChatFormat:
    return _with_template(folder, (TEMPLATES / f"{name}.jinja").read_text())


@pytest.fixture(scope="module", params=["toy", "hermes", "llama3", "text_arguments", "forgets_reasoning"])
def calling(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(folder)
    return ChatFormat(folder) if request.param == "toy" else _with_file(folder, request.param)


def _words() -> st.SearchStrategy[str]:
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    return text | st.sampled_from([*MARKERS, "}", '"', "\\", "; {", "\n", "é😀"])


def _arguments() -> st.SearchStrategy[dict[str, object]]:
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | _words()
    )
    values = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words(), inner, max_size=3)
    )
    return st.dictionaries(_words(), values, max_size=3)


@settings(max_examples=25)
@given(name=st.from_regex("[a-z_]{1,8}", fullmatch=True), arguments=_arguments(), content=_words())
def test_a_call_that_the_template_prints_is_read_back(
    calling: ChatFormat, name: str, arguments: dict[str, object], content: str
) -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    # Llama 3 says nothing beside a call, and text that looks like a call would be one.
    content = "" if calling.calls == "llama3" or any(m in content for m in MARKERS) else content.strip()
    said = calling.neutral({"role": "assistant", "content": content, "tool_calls": [call]})
    turn = calling.turn_ids([*QUESTION, said], TOOLS)
    assert turn is not None
    read = calling.message(turn, TOOLS)
    assert read["content"].removeprefix("<think>\n\n</think>").strip() == said["content"]
    assert read["tool_calls"] == said["tool_calls"]
    assert "malformed_calls" not in read


def test_record_and_suffix_go_on_after_a_tools_answer(calling: ChatFormat) -> None:
    said: Message = {"role": "assistant", "content": "", "tool_calls": [ADD]}
    before = [*QUESTION, said]
    turn, suffix = calling.turn_ids(before, TOOLS), calling.suffix_ids(before, True, RESULT, TOOLS)
    assert turn is not None
    assert suffix is not None
    whole = calling.prompt_ids([*before, *RESULT], TOOLS)
    thought = calling.encode("<think>\n\n</think>\n\n")
    turn = turn[len(thought) :] if turn[: len(thought)] == thought else turn
    assert calling.prompt_ids(QUESTION, TOOLS) + turn + suffix == whole
    assert calling.suffix_ids(before, False, RESULT, TOOLS) == [calling.end_id, *suffix]


def test_a_demonstration_with_calls_in_the_middle_is_put_together_from_its_parts(folder: Path) -> None:
    chat = _with_file(folder, "hermes")
    two = [{**ADD, "id": f"call_{i}"} for i in range(2)]
    talk: list[Message] = [
        *QUESTION,
        {"role": "assistant", "content": "I add.", "tool_calls": two},
        *RESULT,
        *RESULT,
        {"role": "assistant", "content": "46"},
    ]
    called, answered = chat.turn_ids(talk[:2], TOOLS), chat.turn_ids(talk, TOOLS)
    suffix = chat.suffix_ids(talk[:2], True, talk[2:4], TOOLS)
    assert called is not None
    assert suffix is not None
    assert answered is not None
    whole = chat.prompt_ids(QUESTION, TOOLS) + called + suffix + answered + chat.encode("\n")
    assert whole == chat.conversation_ids(talk, TOOLS)
    assert chat.message(called) == talk[1]


def test_calls_are_numbered_and_malformed_ones_are_told(folder: Path) -> None:
    chat = ChatFormat(folder)
    good = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    message = chat.message([*chat.encode(f"a{good}b{OPEN}{{c{good}"), chat.end_id])
    assert [call["id"] for call in message["tool_calls"]] == ["call_0", "call_1"]
    assert message["content"] == f"a\nb{OPEN}{{c"
    assert message["malformed_calls"] == ["a tool call is not closed: </tool_call> is missing"]


def test_a_conversation_without_tools_has_no_calls(folder: Path) -> None:
    chat = _with_file(folder, "llama3")
    text = '{"name": "add", "parameters": {}}'
    assert "tool_calls" in chat.message(chat.encode(text))
    assert chat.message(chat.encode(text), []) == {"role": "assistant", "content": text}


def test_markers_that_are_special_tokens_are_still_read(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    known = tokenizer["added_tokens"]
    for i, marker in enumerate(MARKERS):
        known.append({**known[0], "id": 256 + len(SPECIAL_TOKENS) + i, "content": marker})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    chat = ChatFormat(folder)
    ids = chat.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>')
    assert len(ids) == 2 + len('{"name": "add", "arguments": {}}') + 1
    assert chat.message(ids)["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}


# ---- templates that change what was said ------------------------------------------------------------


def test_reasoning_that_a_new_question_makes_the_template_forget_forks_the_record(folder: Path) -> None:
    chat = _with_file(folder, "forgets_reasoning")
    thought = f"<think>\n12 and 34\n{END_OF_THINK}\n\n"
    user, tool = [{"role": "user", "content": "again"}], RESULT
    for content, calls, new, appended in (
        ("46", [], user, True),
        (f"{thought}46", [], user, False),
        ("", [ADD], tool, True),
        (thought, [ADD], tool, True),
        (thought, [ADD], user, False),
    ):
        said: Message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        suffix = chat.suffix_ids([*QUESTION, said], True, new, TOOLS)
        assert (suffix is not None) == appended, (content, calls, new)
    # A turn before the last one: its reasoning was kept while only tools answered.
    talk: list[Message] = [*QUESTION, {"role": "assistant", "content": thought, "tool_calls": [ADD]}, *RESULT]
    assert chat.suffix_ids([*talk, {"role": "assistant", "content": "46"}], True, user, TOOLS) is None


def test_a_template_that_leaves_out_what_was_said_beside_a_call_forks_the_record(folder: Path) -> None:
    chat = _with_file(folder, "llama3")
    said: Message = {"role": "assistant", "content": "I add.", "tool_calls": [ADD]}
    assert chat.suffix_ids([*QUESTION, said], True, RESULT, TOOLS) is None


def test_reasoning_that_the_template_never_repeats_forks_the_record(folder: Path) -> None:
    forgets = "{% for m in messages %}<|im_start|>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
    chat = _with_template(folder, forgets)
    for content, appended in (("46", True), ("<think>so</think>46", False)):
        suffix = chat.suffix_ids([*QUESTION, {"role": "assistant", "content": content}], True, AGAIN)
        assert (suffix is not None) == appended


def test_an_end_of_text_behind_the_last_turn_is_no_part_of_it(folder: Path) -> None:
    ended = "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
    chat = _with_template(folder, QWEN.replace("<|im_end|>' + '\\n'", "<|im_end|>'") + ended)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259]}))
    chat = ChatFormat(folder)
    said: Message = {"role": "assistant", "content": "46"}
    turn, suffix = chat.turn_ids([*QUESTION, said]), chat.suffix_ids([*QUESTION, said], True, AGAIN)
    assert turn == [*chat.encode("46"), chat.end_id]
    assert suffix is not None
    assert chat.prompt_ids(QUESTION) + turn + suffix == chat.prompt_ids([*QUESTION, said, *AGAIN])


def test_a_turn_whose_end_is_no_token_of_its_own_has_no_suffix(folder: Path) -> None:
    # The toy's tokenizer has no such token: the text behind the turn could merge with it.
    chat = _with_template(folder, QWEN.replace("<|im_end|>", "###"))
    assert chat.suffix_ids([*QUESTION, {"role": "assistant", "content": "46"}], True, AGAIN) is None
    assert chat.turn_ids([*QUESTION, {"role": "assistant", "content": "46"}]) is None


def test_a_message_carries_no_special_token(folder: Path) -> None:
    chat = ChatFormat(folder)
    assert chat.message([*chat.encode("46"), chat.end_id]) == {"role": "assistant", "content": "46"}
    assert chat.message([]) == {"role": "assistant", "content": ""}
    assert chat.decode(range(256, 256 + len(SPECIAL_TOKENS))) == ""


def test_text_of_any_script_survives(folder: Path) -> None:
    chat = ChatFormat(folder)
    text = "naïve 北京 😀\t\n  x"
    assert chat.decode(chat.encode(text)) == text


def test_all_end_tokens_of_the_generation_configuration_stop_a_turn(folder: Path) -> None:
    assert ChatFormat(folder).stop_token_ids == (258,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, 258]}))
    assert ChatFormat(folder).stop_token_ids == (258, 259)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    assert ChatFormat(folder).stop_token_ids == (256, 258)


def test_a_folder_without_a_tokenizer_is_refused_with_the_next_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json there.*asyncrl init-model"):
        ChatFormat(tmp_path)


def test_a_tokenizer_without_a_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        ChatFormat(folder)


def test_it_does_not_import_torch(folder: Path) -> None:
    code = (
        "import sys; from asyncrl.chat import ChatFormat\n"
        f"chat = ChatFormat({str(folder)!r}); chat.prompt_ids([dict(role='user', content='1')])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=120).returncode == 0
