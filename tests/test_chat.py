"""Messages to ids and back: by the model's template, and never twice for what was sampled."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.chat import ChatFormat
from asyncrl.toy import SPECIAL_TOKENS, write_tokenizer

QWEN = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
FORGETFUL = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{%- if m.role == 'assistant' and not loop.last %}{{ 'dropped' }}{% else %}{{ m.content }}{% endif %}\
{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

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
    assert '"name": "add"' in chat.decode(prompt)
    turn = [*chat.encode("46"), chat.end_id]
    suffix = chat.suffix_ids([*QUESTION, chat.message(turn)], True, AGAIN, tools)
    assert suffix is not None
    assert "add" not in chat.decode(suffix)
    assert prompt + turn + suffix == chat.prompt_ids([*QUESTION, chat.message(turn), *AGAIN], tools)


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
