"""What is said of a chat template before a run, and which templates are refused."""

from pathlib import Path

import pytest

from asyncrl.chat import ChatFormat
from asyncrl.toy import write_tokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


def _chat(folder: Path, template: str | None) -> ChatFormat:
    write_tokenizer(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())
    return ChatFormat(folder, renderer="template")


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (
            None,
            "chat template: user messages are appended; tool answers are appended; tool calls are read as hermes",
        ),
        (
            "llama3",
            "chat template: user messages are appended; tool answers are appended, and after a turn with <think> "
            "they start a new branch of the record; tool calls are read as llama3",
        ),
        (
            "forgets_reasoning",
            "chat template: user messages are appended, and after a turn with <think> they start a new branch of "
            "the record; tool answers are appended; tool calls are read as hermes",
        ),
        ("no_tools", "chat template: user messages are appended; it cannot show tools"),
        ("refuses_tool_messages", "chat template: user messages are appended; it cannot show what tools answer"),
        (
            "xml",
            "chat template: user messages are appended; tool answers are appended; its tool calls cannot be read",
        ),
    ],
)
def test_a_sentence_says_what_a_template_can_do(tmp_path: Path, template: str | None, sentence: str) -> None:
    assert str(_chat(tmp_path, template).probe()) == sentence


def test_tools_are_not_spoken_of_where_there_are_none(tmp_path: Path) -> None:
    probe = _chat(tmp_path, "no_tools").probe(tools=False)
    assert str(probe) == "chat template: user messages are appended"
    assert probe.tool_answer is probe.calls is None


@pytest.mark.parametrize("template", [None, "hermes", "llama3", "forgets_reasoning", "text_arguments"])
def test_a_template_with_tools_is_taken(tmp_path: Path, template: str | None) -> None:
    _chat(tmp_path, template).check_tools(TOOLS)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("no_tools", r"chat_template\.jinja: the chat template does not show the tools add\. Use a model"),
        ("refuses_tool_messages", r"chat_template\.jinja: .* refuses a tool's answer: Only user and assistant"),
        (
            "xml",
            r"chat_template\.jinja: .* prints tool calls as '<invoke name=\"probe_tool\"/>'\. .*\[renderers\]",
        ),
    ],
)
def test_a_template_that_cannot_do_with_tools_is_refused_with_its_file(
    tmp_path: Path, template: str, reason: str
) -> None:
    chat = _chat(tmp_path, template)
    chat.check_tools([])
    with pytest.raises(ValueError, match=reason):
        chat.check_tools(TOOLS)


def test_a_template_that_leaves_answers_or_calls_out_is_refused(tmp_path: Path) -> None:
    chat = _chat(tmp_path, "no_tools")
    listed = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    deaf = listed + "{% for m in messages if m.role != 'tool' %}{{ m.role + m.content }}<|im_end|>{% endfor %}"
    mute = listed + "{% for m in messages %}{{ m.role + m.content }}<|im_end|>{% endfor %}"
    for template, reason in ((deaf, "leaves a tool's answer out"), (mute, "leaves tool calls out")):
        (tmp_path / "chat_template.jinja").write_text(template)
        chat = ChatFormat(tmp_path)
        with pytest.raises(ValueError, match=reason):
            chat.check_tools(TOOLS)
