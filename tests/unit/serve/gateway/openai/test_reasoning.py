"""Reasoning before an answer, in output that is cut into pieces anywhere."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.gateway.openai.reasoning import (
    MAX_SPACE,
    AnswerParser,
    Reasoning,
    Thought,
    marks_of,
    reasoning_after,
)
from multiworld.serve.gateway.openai.tool_calls import Call, Calling, CallParser
from tests.unit.serve.gateway.openai.test_tool_calls import FREE, TOOLS, WEATHER, cut

THINK = ("<think>", "</think>")
OPEN, BEGUN = Reasoning(*THINK), Reasoning(*THINK, is_begun=True)


def parsed(
    form: Reasoning, pieces: list[str], calling: Calling | None = None
) -> tuple[str, str, list[Any]]:
    """Return the reasoning, the text and the calls of output that comes in pieces."""
    calls = None if calling is None else CallParser(calling, "hermes")
    parser = AnswerParser(form, calls)
    found = [part for piece in pieces for part in parser.feed(piece, 5)]
    found += parser.end()
    assert all(part.text for part in found if isinstance(part, Thought))
    return (
        "".join(part.text for part in found if isinstance(part, Thought)),
        "".join(part for part in found if isinstance(part, str)),
        [part for part in found if isinstance(part, Call)],
    )


@pytest.mark.parametrize(
    ("form", "output", "thought", "text"),
    [
        (OPEN, "<think>\nHm. Well.\n</think>\n\nYes.\n", "Hm. Well.", "Yes.\n"),
        (OPEN, "\n<think>a</think>b", "a", "b"),
        (OPEN, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        (OPEN, "<thin", "", "<thin"),
        (OPEN, " ", "", " "),
        (OPEN, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (BEGUN, "Hm </thin </think>Yes </think>", "Hm </thin", "Yes </think>"),
        (BEGUN, "\nHm </thin", "Hm </thin", ""),
        (BEGUN, "a <think> b</think>", "a <think> b", ""),
        (BEGUN, "</think> a", "", "a"),
        (BEGUN, "", "", ""),
    ],
)
@given(places=st.lists(st.integers(0, 40), max_size=8))
def test_reasoning_is_apart_from_the_answer(
    form: Reasoning, output: str, thought: str, text: str, places: list[int]
) -> None:
    """Whitespace around the reasoning belongs to neither."""
    assert parsed(form, cut(output, places)) == (thought, text, [])


@given(places=st.lists(st.integers(0, 200), max_size=8))
def test_calls_are_those_of_the_answer(places: list[int]) -> None:
    """A call that the model only reasons about is none."""
    call = '<tool_call>{"name": "weather", "arguments": {"place": "%s"}}</tool_call>'
    place = WEATHER[0][1]["place"]
    output = f"<think>{call % 'here'}</think>\nSo:{call % place}"
    thought, text, calls = parsed(OPEN, cut(output, places), FREE)
    assert (thought, text) == (call % "here", "So:")
    assert [(each.name, each.number) for each in calls] == [("weather", 0)]


def test_required_call_comes_after_the_reasoning() -> None:
    named = Calling(tuple(TOOLS), "now")
    thought, text, calls = parsed(BEGUN, ["Hm.", "</think>\n", "{}"], named)
    assert (thought, text) == ("Hm.", "")
    assert "".join(call.arguments for call in calls) == "{}"


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        (["<think>", "a", "b", "</think>", "c", "d"], 4),
        (["\n", "<think>", "</think>", "c"], 3),
        (["c", "<think>", "d"], 0),
    ],
)
def test_tokens_of_the_reasoning_are_counted(pieces: list[str], count: int) -> None:
    parser = AnswerParser(OPEN, None)
    for piece in pieces:
        assert list(parser.feed(piece, 5)) is not None
    assert parser.thought_tokens == count


@pytest.mark.parametrize("form", [OPEN, BEGUN])
def test_endless_space_is_not_held_back(form: Reasoning) -> None:
    """Otherwise each further token would scan all of it."""
    parser = AnswerParser(form, None)
    first = "" if form is OPEN else "a"
    found = [
        part for piece in (first, *["\n"] * 1000) for part in parser.feed(piece, 5)
    ]
    shown = "".join(part if isinstance(part, str) else part.text for part in found)  # type: ignore[union-attr]
    assert len(shown) >= 1000 - MAX_SPACE - 1


def test_letters_of_a_mark_that_is_a_token_end_nothing() -> None:
    """A model may spell the mark out before it ends its reasoning."""
    form = Reasoning(*THINK, is_begun=True, begin_token=7, end_token=8)
    pieces = [("The mark", 5), (" </think", 5), ("> and </thi", 5), ("</think>", 8)]
    parser = AnswerParser(form, None)
    found = [part for piece in [*pieces, ("Yes.", 5)] for part in parser.feed(*piece)]
    found += parser.end()
    thought = "".join(part.text for part in found if isinstance(part, Thought))
    assert thought == "The mark </think> and </thi"
    assert found[-1] == "Yes."
    assert (parser.thought_tokens, form.marks) == (4, (7, 8))


def test_marks_follow_from_the_template_unless_a_spec_gives_them() -> None:
    """A template may contain only one of the two marks."""
    template = "{{ content.split('</think>')[-1] }}"
    assert marks_of(None, [template]) == THINK
    assert marks_of(None, ["", "[/THINK]"]) == ("[THINK]", "[/THINK]")
    assert marks_of(None, ["{{ content }}<think>"]) == THINK
    assert marks_of(None, ["{{ content }}"]) is None
    assert marks_of([], [template]) is None
    assert marks_of(["<a>", "<b>"], [template]) == ("<a>", "<b>")


@pytest.mark.parametrize(
    ("prompt", "form"),
    [
        ("<|assistant|>\n", OPEN),
        ("<|assistant|>\n<think>\n", BEGUN),
        ("<|assistant|>\n<think>\n\n</think>\n\n", None),
        ("<|assistant|></think>", None),
        ("<think>a</think>b<|end|>\n<|assistant|>", OPEN),
    ],
)
def test_prompt_may_begin_the_reasoning_or_leave_it_out(
    prompt: str, form: Reasoning | None
) -> None:
    """Templates do either: for models that always reason, or if a client wants none."""
    assert reasoning_after(THINK, prompt) == form
