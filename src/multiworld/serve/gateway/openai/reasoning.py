"""Reasoning that a model writes before its answer, between two marks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from multiworld.serve.gateway.openai.tool_calls import Call, CallParser, overlap

# Marks of model families, in the order in which chat templates are searched for marks:
# DeepSeek, GLM, Kimi, Qwen and others; Mistral; Seed.
KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)
LAST = 128  # number of last prompt tokens in which to look for a mark
NO_TOKEN = -1  # the token of text that belongs to earlier tokens
MAX_SPACE = 64  # maximum characters of space held back because a mark may follow


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning with which the output of a model may begin."""

    begin: str
    end: str
    # The prompt already ends with ``begin``, so the output starts inside the reasoning.
    is_begun: bool = False
    # The marks as tokens; None: the mark is plain text for the model.
    begin_token: int | None = None
    end_token: int | None = None

    @property
    def marks(self) -> tuple[int | str, int | str]:
        """The marks as the model writes them: tokens, or text."""
        return (
            self.begin if self.begin_token is None else self.begin_token,
            self.end if self.end_token is None else self.end_token,
        )


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of the reasoning."""

    text: str


def marks_of(
    given: Sequence[str] | None, templates: Iterable[str]
) -> tuple[str, str] | None:
    """Return the marks around a model's reasoning; None if it has none.

    ``given``: the marks in the model's spec; None: find them in its chat templates.
    """
    if given is not None:
        return (given[0], given[1]) if given else None
    text = "".join(templates)
    return next((m for m in KNOWN if m[0] in text or m[1] in text), None)


def reasoning_after(marks: tuple[str, str], prompt: str) -> Reasoning | None:
    """Return the reasoning with which the output after a prompt may begin.

    None if the prompt ends with the end mark: a template writes it there for an answer
    without reasoning.
    """
    begin, end = marks
    before = prompt.rstrip()
    if before.endswith(end):
        return None
    return Reasoning(begin, end, is_begun=before.endswith(begin))


class ReasoningParser:
    """Splits the growing output of one choice into reasoning and the rest.

    Space around the reasoning is dropped. If the end mark is a token, its characters as
    plain text do not end the reasoning, because a model may write about the mark.
    """

    def __init__(self, form: Reasoning) -> None:
        self._form = form
        self._held = ""
        self.is_thinking = form.is_begun
        # ``_held`` may have the end mark: the mark is text, or its token has arrived.
        self._is_marked = form.end_token is None
        self._is_over = self._has_thought = self._has_answered = False

    def feed(self, text: str, token: int) -> Iterator[str | Thought]:
        self._held += text
        self._is_marked |= token == self._form.end_token
        if not self.is_thinking and not self._is_over:
            begun = self._held.lstrip()
            if begun.startswith(self._form.begin):
                self.is_thinking = True
                self._held = begun.removeprefix(self._form.begin)
            elif not self._form.begin.startswith(begun) or len(begun) < (
                len(self._held) - MAX_SPACE
            ):
                self._is_over = self._has_answered = True
        if self.is_thinking:
            yield from self._thoughts()
        if self._is_over:
            yield from self._answer()

    def end(self) -> Iterator[str | Thought]:
        """Yield the rest, after the last output."""
        if not self.is_thinking:
            yield from self._answer()
        elif thought := self._held.rstrip():
            yield Thought(thought)

    def _thoughts(self) -> Iterator[Thought]:
        if not self._has_thought:
            self._held = self._held.lstrip()
        thought, mark, rest = self._held, "", ""
        if self._is_marked:
            thought, mark, rest = self._held.partition(self._form.end)
        if mark:
            self.is_thinking, self._is_over = False, True
            thought, self._held = thought.rstrip(), rest
        else:
            cut = len(thought) - overlap(thought, self._form.end)
            cut = max(len(thought[:cut].rstrip()), cut - MAX_SPACE)
            thought, self._held = thought[:cut], thought[cut:]
        if thought:
            self._has_thought = True
            yield Thought(thought)

    def _answer(self) -> Iterator[str]:
        text, self._held = self._held, ""
        if self._is_over and not self._has_answered:
            text = text.lstrip()
        if text:
            self._has_answered = True
            yield text


class AnswerParser:
    """Splits the growing output of one choice into reasoning, text and tool calls."""

    def __init__(self, form: Reasoning | None, calls: CallParser | None) -> None:
        self._thinking = None if form is None else ReasoningParser(form)
        self._calls = calls
        self._tokens = 0
        self.thought_tokens = 0  # number of tokens up to the end of the reasoning

    @property
    def may_be_text(self) -> bool:
        """False if the whole answer consists of tool calls."""
        return self._calls is None or self._calls.calling.is_free

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.calls > 0

    def feed(self, text: str, token: int) -> Iterator[str | Call | Thought]:
        """Parse the text of one more token; yield the parts that can be sent.

        ``token``: ``NO_TOKEN`` for text of earlier tokens.
        """
        if self._thinking is None:
            yield from self._said(text)
            return
        self._tokens += token != NO_TOKEN
        was_thinking = self._thinking.is_thinking
        for part in self._thinking.feed(text, token):
            yield from self._said(part)
        if was_thinking or self._thinking.is_thinking:
            self.thought_tokens = self._tokens

    def end(self) -> Iterator[str | Call | Thought]:
        """Yield the rest, after the last token."""
        if self._thinking is not None:
            for part in self._thinking.end():
                yield from self._said(part)
        if self._calls is not None:
            yield from self._calls.end()

    def _said(self, part: str | Thought) -> Iterator[str | Call | Thought]:
        if self._calls is not None and isinstance(part, str):
            yield from self._calls.feed(part)
        elif part:
            yield part
