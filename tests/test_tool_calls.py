"""Calls in a turn's text: read exactly, or complained about; nothing is lost and nothing repaired."""

import json

import pytest

from asyncrl.tool_calls import FORMATS, PROBE, Reading, after_reasoning, hermes, llama3, recognise

ADD = ("add", {"a": 1, "b": [2, {"c": "3"}]})
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "3"}]}}</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": [2, {"c": "3"}]}}'


def test_a_text_without_calls_is_content_as_it_is() -> None:
    for text in ("", " 46\n", '{"answer": 46}', "{not json", "a; b"):
        assert hermes(text) == llama3(text) == Reading(text, [], [])


def test_calls_amid_text_are_taken_out_of_it() -> None:
    text = f"  I add.\n{CALL}\nthen\n\n{CALL}\n and wait. "
    assert hermes(text) == Reading("  I add.\nthen\nand wait.", [ADD, ADD], [])


def test_whole_numbers_of_64_bits_are_read_exactly() -> None:
    arguments = {"least": -(2**63), "most": 2**64 - 1, "small": 5e-324}
    reading = hermes(f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>")
    assert reading.calls == [("add", arguments)]


def test_neighbouring_calls_leave_no_text() -> None:
    assert hermes(f"{CALL}\n{CALL}") == Reading("", [ADD, ADD], [])


def test_closing_tags_braces_and_quotes_within_texts_end_nothing() -> None:
    arguments = {"text": 'say "hi" \\ </tool_call> <tool_call> {"name": "x"} ; é😀', "more": {"x": {"y": []}}}
    text = f"<tool_call>\n{json.dumps({'name': 'say', 'arguments': arguments})}\n</tool_call>"
    assert hermes(text) == Reading("", [("say", arguments)], [])
    text = json.dumps({"name": "say", "parameters": arguments}, ensure_ascii=False)
    assert llama3(text) == Reading("", [("say", arguments)], [])


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ('<tool_call>{"name": "add", "arguments": {}}', "not closed"),
        ('<tool_call>{"name": "add", "argum', "not closed"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "no valid JSON"),
        ("<tool_call></tool_call>", "no valid JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON value"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "no valid JSON.*surrogates"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "no valid JSON.*recursion"),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "no valid JSON.*digits"),
        ('<tool_call>{"name": "add", "arguments": {"a": [-1e999]}}</tool_call>', "-1e999 is too large"),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": {2**64}}}}}</tool_call>', "more than 64 bits"),
        ("<tool_call>[1]</tool_call>", "must be a JSON object, but is"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": "add"}</tool_call>', "\"arguments\" of the tool call 'add' .* is missing"),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "must be a JSON object, but is"),
        ('<tool_call>{"name": "add", "arguments": {}} {}</tool_call>', "more than one JSON object"),
    ],
)
def test_a_malformed_call_is_explained_and_its_text_stays(block: str, complaint: str) -> None:
    reading = hermes(f"I try.\n{block}")
    assert reading.content == f"I try.\n{block}"
    assert reading.calls == []
    assert len(reading.malformed) == 1
    assert reading.malformed[0].startswith(("a tool call", '"arguments" of the tool call'))
    with pytest.raises(ValueError, match=complaint):
        raise ValueError(reading.malformed[0])


def test_a_well_formed_call_beside_a_malformed_one_is_not_lost() -> None:
    bad = "<tool_call>{oops}</tool_call>"
    reading = hermes(f"{bad}{CALL} so")
    assert (reading.content, reading.calls, len(reading.malformed)) == (f"{bad}\nso", [ADD], 1)
    unclosed = '<tool_call>{"name": "add",'
    reading = hermes(f"{unclosed}{CALL}")
    assert (reading.content, reading.calls, len(reading.malformed)) == (unclosed, [ADD], 1)


def test_a_closing_tag_alone_is_complained_about() -> None:
    text = '{"name": "add", "arguments": {}}</tool_call>'
    assert hermes(text) == Reading(text, [], ["a tool call's </tool_call> has no <tool_call> before it"])


def test_calls_that_are_only_thought_about_are_none() -> None:
    text = f"<think>maybe {CALL}</think>\n\nyes\n{CALL}"
    start = after_reasoning(text, opened=False)
    assert hermes(text, start) == Reading(f"<think>maybe {CALL}</think>\n\nyes", [ADD], [])
    assert after_reasoning("maybe</think>yes", opened=True) == len("maybe</think>")
    # A closing tag that closes nothing is text; reasoning without an end hides no call.
    assert after_reasoning("maybe</think>yes", opened=False) == 0
    assert after_reasoning(f"<think>maybe {CALL}", opened=False) == 0


def test_llama_calls_stand_alone_or_behind_the_tag_or_several() -> None:
    assert llama3(LLAMA) == Reading("", [ADD], [])
    assert llama3(f"\n<|python_tag|>{LLAMA} ; {LLAMA}") == Reading("", [ADD, ADD], [])
    assert llama3(f"I add.\n<|python_tag|>{LLAMA}") == Reading("I add.", [ADD], [])
    assert llama3(f"{LLAMA} done") == Reading("done", [ADD], [])
    assert llama3(f"I say {LLAMA}") == Reading(f"I say {LLAMA}", [], [])


@pytest.mark.parametrize(
    ("text", "complaint", "calls"),
    [
        ('<|python_tag|>brave_search.call(query="x")', "no valid JSON", []),
        ('{"name": "add", "parameters": {"a": 1}', "no valid JSON", []),
        ('{"parameters": {}}', 'no "name"', []),
        ('{"name": "add", "parameters": [1]}', "must be a JSON object", []),
        (f'{LLAMA}; {{"name": "add"}}', "\"parameters\" of the tool call 'add' must .* missing", [ADD]),
    ],
)
def test_a_malformed_llama_call_is_explained(text: str, complaint: str, calls: list[object]) -> None:
    reading = llama3(text)
    assert reading.content == (text.removeprefix(f"{LLAMA}; ") if calls else text)
    assert reading.calls == calls
    with pytest.raises(ValueError, match=complaint):
        raise ValueError(*reading.malformed)


def test_a_format_is_recognised_by_what_it_prints() -> None:
    name, arguments = PROBE
    assert recognise(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>") == "hermes"
    assert recognise(json.dumps({"name": name, "parameters": arguments})) == "llama3"
    # Python's own spelling of the arguments is not JSON.
    assert recognise(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>') is None
    assert recognise("") is None
    assert set(FORMATS) == {"hermes", "llama3"}
