"""Tool calls in the text of an answer that is cut into pieces anywhere."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.errors import InvalidRequestError
from multiworld.serve.gateway.openai.tool_calls import (
    MAX_SPACE,
    Call,
    Calling,
    CallParser,
    Family,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    calling_of,
)

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOLS = [
    Tool("function", Function("weather", parameters=PLACE)),
    Tool("function", Function("now")),
]
CALL = '{"name": "weather", "arguments": {"place": "Köln </tool"}}'


def parsed(
    calling: Calling, family: Family | None, pieces: list[str]
) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls of an answer that comes in pieces."""
    parser = CallParser(calling, family)
    found = [each for piece in pieces for each in parser.feed(piece)]
    found += parser.end()
    calls: dict[int, tuple[str, str]] = {}
    for each in found:
        if isinstance(each, Call):
            name, arguments = calls.get(each.number, ("", ""))
            calls[each.number] = name + each.name, arguments + each.arguments
    text = "".join(each for each in found if isinstance(each, str))
    return text, [(name, json.loads(given)) for name, given in calls.values()]


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


WEATHER = [("weather", {"place": "Köln </tool"})]
MARKED = '{"name": "weather", "arguments": {"place": "</tool_call>, </tool_call>"}}'
MARKS = [("weather", {"place": "</tool_call>, </tool_call>"})]
FREE = Calling(tuple(TOOLS))
SMALLER, NOTHING = "2 < 3, <tool> and </tool_call>", "<tool_call>nothing</tool_call>"


@given(st.lists(st.integers(0, 500), max_size=30))
@pytest.mark.parametrize(
    ("family", "text", "said", "calls"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", WEATHER),
        (
            "hermes",
            f'Let me see. <tool_call>{CALL}</tool_call><tool_call>{{"name": "now"}}'
            "</tool_call>",
            "Let me see. ",
            [*WEATHER, ("now", {})],
        ),
        (
            "hermes",
            "2 < 3, <tool> and </tool_call>",
            "2 < 3, <tool> and </tool_call>",
            [],
        ),
        (
            "hermes",
            "<tool_call>nothing</tool_call>",
            "<tool_call>nothing</tool_call>",
            [],
        ),
        ("hermes", f"<tool_call>{MARKED}</tool_call> so.", " so.", MARKS),
        (
            "hermes",
            f'<tool_call>{{"name": "now</tool_call> <tool_call>{CALL}</tool_call>',
            '<tool_call>{"name": "now</tool_call> ',
            WEATHER,
        ),
        ("hermes", "it ends in <tool_call", "it ends in <tool_call", []),
        ("hermes", f"<tool_call>{CALL}", "", WEATHER),
        ("llama3_json", CALL.replace("arguments", "parameters"), "", WEATHER),
        ("llama3_json", f"[{CALL}, {CALL}]", "", WEATHER * 2),
        ("llama3_json", f"{CALL}; {CALL};\n", "", WEATHER * 2),
        ("llama3_json", f"{CALL}\n\nI called it.", "I called it.", WEATHER),
        ("llama3_json", "[1] says so.", "[1] says so.", []),
        ("llama3_json", "It is warm. {", "It is warm. {", []),
        ("llama3_json", '{"name": "unknown"}', '{"name": "unknown"}', []),
        ("llama3_json", '{"cut', '{"cut', []),
    ],
)
def test_calls_are_found_in_the_output_of_a_model_family(
    family: Family, text: str, said: str, calls: list[Any], at: list[int]
) -> None:
    found = parsed(FREE, family, cut(text, at))
    assert (found[0].strip(), found[1]) == (said.strip(), calls)


@given(st.lists(st.integers(0, 500), max_size=30))
def test_required_calls_are_a_list_and_a_named_one_is_its_arguments(
    at: list[int],
) -> None:
    text = json.dumps([{"name": "now", "parameters": {"a": 1}}])
    required = Calling(tuple(TOOLS), is_required=True)
    assert parsed(required, None, cut(text, at)) == ("", [("now", {"a": 1})])
    named = Calling(tuple(TOOLS), named="weather")
    text = '{"place": "Bonn"}'
    assert parsed(named, None, cut(text, at)) == ("", [("weather", {"place": "Bonn"})])


def test_text_without_calls_is_not_held_back() -> None:
    parser = CallParser(FREE, "hermes")
    assert list(parser.feed("Hello <")) == ["Hello "]
    assert list(parser.feed("b>")) == ["<b>"]
    parser = CallParser(FREE, "llama3_json")
    assert list(parser.feed("Hello {")) == ["Hello {"]
    for begun in ("[1", "{1", "{}"):
        assert list(CallParser(FREE, "llama3_json").feed(begun)) == [begun]
    for begun in ("[", " [ {", '{ "'):
        assert not list(CallParser(FREE, "llama3_json").feed(begun))


def test_space_between_calls_is_no_text() -> None:
    call = f"<tool_call>{CALL}</tool_call>"
    for places in (0, 200):
        text = f"Sure. {call}\n{call}\n"
        said, calls = parsed(FREE, "hermes", cut(text, [*range(places)]))
        assert (said, calls) == ("Sure. ", WEATHER * 2)


def test_arguments_are_an_object_where_a_schema_does_not_say() -> None:
    """Clients expect an object."""
    properties: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
    several: list[dict[str, Any]] = [{}, properties, {"anyOf": [{}]}]
    for parameters in several:
        function = {"name": "f", "parameters": parameters}
        tool = msgspec.convert({"type": "function", "function": function}, Tool)
        ((_, schema),) = Calling((tool,)).forms()
        assert schema == {"type": "object", **parameters}


class Appended(str):
    """String that records the longest string it was appended to."""

    __slots__ = ()
    longest = 0

    def __radd__(self, other: str) -> str:
        Appended.longest = max(Appended.longest, len(other))
        return "".join((other, self))


@pytest.mark.parametrize(
    ("family", "begin", "end"),
    [("hermes", "<tool_call>", "</tool_call>"), ("llama3_json", "", "")],
)
def test_call_so_far_is_not_copied_for_each_token(
    family: Family, begin: str, end: str
) -> None:
    """Its pieces are joined once it may be complete."""
    parser = CallParser(FREE, family)
    assert not list(parser.feed(begin + '{"name": "weather", "arguments": {"place": "'))
    for _ in range(100):
        assert not list(parser.feed(Appended("Köln </tool")))
    assert Appended.longest < 100
    found = [*parser.feed('"}}' + end[:5]), *parser.feed(end[5:]), *parser.end()]
    arguments = json.dumps({"place": 100 * "Köln </tool"}, ensure_ascii=False)
    assert found == [Call(0, "weather", arguments)]


@pytest.mark.parametrize("name", ["", "a b", "a\n", "<|im_end|>", "x" * 65])
def test_names_of_tools_are_those_of_openai(name: str) -> None:
    """Other names could not be generated, or would be parsed differently."""
    with pytest.raises(InvalidRequestError, match="letters, digits"):
        calling_of([Tool("function", Function(name))], "auto")


def test_few_ends_of_a_call_are_tried() -> None:
    """Each attempt parses the whole text again."""
    text = '<tool_call>{"name": "' + "</tool_call>" * 1000
    assert parsed(FREE, "hermes", [*text]) == (text, [])


def test_schemas_are_those_of_the_tools() -> None:
    required = calling_of(TOOLS, "required")
    assert required is not None
    assert [name for name, _ in required.forms()] == ["weather", "now"]
    assert required.forms()[0][1] == PLACE
    named = calling_of(TOOLS, NamedTool("function", NamedFunction("weather")))
    assert named is not None
    assert named.named_parameters == PLACE
    assert calling_of(TOOLS, "none") is None
    assert calling_of(None, None) is None
    free = calling_of(TOOLS, None)
    assert free is not None
    assert free.is_free


@given(st.integers(0, 200), st.lists(st.integers(0, 500), max_size=30))
def test_cut_list_of_calls_has_those_that_are_complete(
    count: int, at: list[int]
) -> None:
    calls = [{"name": "now", "parameters": {"a": '}]{\\"' * n}} for n in range(3)]
    text = json.dumps(calls)
    ends = [len(json.dumps(calls[: n + 1])) - 1 for n in range(3)]
    required = Calling(tuple(TOOLS), is_required=True)
    said, found = parsed(required, None, cut(text[:count], at))
    assert said == ""
    assert len(found) == sum(end <= count for end in ends)


@pytest.mark.parametrize(
    ("tools", "choice", "text"),
    [
        (None, "required", "needs tools"),
        (TOOLS, NamedTool("function", NamedFunction("x")), "names 'x'"),
        (TOOLS * 2, "auto", "different names"),
        (TOOLS, "sometimes", "must be none"),
    ],
)
def test_tools_that_do_not_fit_are_refused(
    tools: list[Tool] | None, choice: Any, text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        calling_of(tools, choice)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("null", {}),
        ('""', {}),
        ('{"a": "line\nline"}', {"a": "line\nline"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('"null"', {}),
    ],
)
def test_arguments_are_read_as_models_write_them(arguments: str, wanted: Any) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
    assert parsed(FREE, "hermes", [text]) == ("", [("now", wanted)])


@pytest.mark.parametrize(
    ("family", "before"),
    [
        ("llama3_json", ""),
        ("hermes", f"<tool_call>{CALL}</tool_call>"),
        ("hermes", ""),
    ],
)
def test_output_of_spaces_is_not_held_back_without_limit(
    family: Family, before: str
) -> None:
    """Each token would be joined with all tokens before it."""
    parser, space = CallParser(FREE, family), " " * 32
    found = [*parser.feed(before)]
    for _ in range(100):
        found += parser.feed(space)
    shown = "".join(part for part in found if isinstance(part, str))
    assert len(shown) > 100 * 32 - 2 * MAX_SPACE
    found += parser.end()
    calls = [part for part in found if isinstance(part, Call)]
    assert len(calls) == bool(before)


@pytest.mark.parametrize("end", ["", "<", "</tool", "</tool_call", "</tool_call>"])
def test_complete_call_whose_mark_is_cut_is_found(end: str) -> None:
    """``max_tokens`` may cut an answer anywhere."""
    text = f"<tool_call>\n{CALL}\n{end}"
    assert parsed(FREE, "hermes", [text]) == ("", WEATHER)
