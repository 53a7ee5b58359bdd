"""Tools that a model may call, as in OpenAI's API. Pure.

With ``tool_choice: auto``, the model writes tool calls in the format of its template
family, and ``CallParser`` finds them. With a named tool, the output is constrained to
the arguments of the call; with ``required``, to a list of calls. Both work with any
model.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from multiworld.errors import InvalidRequestError

# Not strict, because models write unescaped line breaks in strings.
DECODER = json.JSONDecoder(strict=False)

MAX_TOOLS = 128  # maximum tools of a request, as in OpenAI's API
# Tags around a tool call in the format of Hermes and Qwen.
BEGIN, END = "<tool_call>", "</tool_call>"
NAME = re.compile("[a-zA-Z0-9_-]{1,64}")  # name of a tool, as in OpenAI's API
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_SPACE = 1000  # maximum characters of white space to hold back before a call
MAX_MARKS = 8  # maximum end marks to try for a call; each try parses the call
# Start of a text that may be a call in Llama 3's format, and the separator before each
# further call.
CALL_BEGUN = re.compile(r'\s*(\[\s*)?(\{\s*("|$)|$)')
NEXT_CALL = re.compile(r"[\s;]*(?=[{\[])")
# Families of chat templates, named like vLLM's tool parsers.
Family = Literal["hermes", "llama3_json"]


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


# Functions are the only supported tools.
class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True, slots=True)
class Calling:
    """The tool calls that a model may make in one answer."""

    tools: tuple[Tool, ...]
    named: str = ""  # the tool that the model must call; empty: the model chooses
    is_required: bool = False  # the model must make at least one call
    is_single: bool = False  # the model may make at most one call

    @property
    def is_free(self) -> bool:
        """True if the model may answer with text."""
        return not self.named and not self.is_required

    @property
    def is_strict(self) -> bool:
        """True if the model may answer with text, but calls must fit their schemas."""
        return self.is_free and any(tool.function.strict for tool in self.tools)

    @property
    def named_parameters(self) -> Any:
        (tool,) = [t for t in self.tools if t.function.name == self.named]
        return _parameters(tool)

    def forms(self, *, is_strict: bool = False) -> list[tuple[str, Any]]:
        """Return the name of each tool, and the JSON schema of its parameters."""
        return [
            (
                tool.function.name,
                {"type": "object"}  # any object
                if is_strict and not tool.function.strict
                else _parameters(tool),
            )
            for tool in self.tools
        ]


def calling_of(
    tools: Sequence[Tool] | None, choice: str | NamedTool | None
) -> Calling | None:
    """Return the tool calls that a request allows; None if it allows no calls."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError('"tool_choice" needs tools', param="tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    fit = all(map(NAME.fullmatch, names))
    if len(tools) > MAX_TOOLS or len(set(names)) < len(names) or not fit:
        rule = (
            f"must be at most {MAX_TOOLS} functions with different names of up to 64 "
            "letters, digits, _ and -"
        )
        raise InvalidRequestError(f'"tools" {rule}', param="tools")
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        named = choice.function.name
        if named not in names:
            known = ", ".join(names)
            text = f'"tool_choice" names {named!r}; the tools are {known}'
            raise InvalidRequestError(text, param="tool_choice")
        return Calling(tuple(tools), named)
    if choice not in (None, "auto", "required"):
        rule = "must be none, auto, required or the name of a tool"
        raise InvalidRequestError(f'"tool_choice" {rule}', param="tool_choice")
    return Calling(tuple(tools), is_required=choice == "required")


def _parameters(tool: Tool) -> Any:
    given = tool.function.parameters
    if given is None:
        return NO_PARAMETERS
    # Clients expect an object, even if the schema has no ``type``.
    return {"type": "object", **given} if isinstance(given, dict) else given


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call, or a part of its JSON arguments; only the first part has a name."""

    number: int
    name: str
    arguments: str


class CallParser:
    """Finds the tool calls in the growing output of one choice."""

    def __init__(self, calling: Calling, family: Family | None) -> None:
        self.calling, self._family = calling, family
        self._held = ""
        # Further text of an incomplete call; ``_join`` adds it to ``_held`` once the
        # call may be complete.
        self._later: list[str] = []
        self._tail = ""
        self._is_open = self._is_free = False
        self._listed = ListedCalls()
        self.calls = 0

    def feed(self, text: str) -> Iterator[str | Call]:
        """Parse more output; yield text and calls to send."""
        self._later.append(text)
        if self._is_open:
            self._tail = self._tail[1 - len(END) :] + text
            if self._family != "hermes" or END not in self._tail:
                return  # the call is not complete yet
        self._join()
        if self.calling.named:
            yield from self._named()
        elif self.calling.is_required:
            yield from self._required()
        elif self._family == "hermes":
            yield from self._marked()
        elif self._is_not_a_call():
            yield from self._rest()
        else:
            self._is_open = bool(self._held.strip())

    def _join(self) -> None:
        self._held = "".join([self._held, *self._later])
        self._later.clear()
        self._is_open = False

    def end(self) -> Iterator[str | Call]:
        """Yield the rest, after the last output."""
        if not self.calling.is_free:
            return  # the rest is a truncated call
        self._join()
        if self._family == "hermes":
            text = self._held.removeprefix(BEGIN)
            text = text[: len(text) - overlap(text, END)].removesuffix(END)
            found, rest = self._parsed(text), ""
        else:
            found, rest = self._leading(self._held)
        if found is not None:
            yield from self._calls(found)
            self._held = rest
        if self.calls and not self._held.strip():
            return
        yield from self._rest()

    def _required(self) -> Iterator[Call]:
        """Yield each call of a list once the call is complete."""
        text, self._held = self._held, ""
        for call in self._listed.feed(text):
            yield from self._calls(self._parsed(call) or [])

    def _named(self) -> Iterator[Call]:
        """Yield the arguments of the only call as they arrive."""
        if self._held or not self.calls:
            name = "" if self.calls else self.calling.named
            yield Call(0, name, self._held)
            self._held, self.calls = "", 1

    def _marked(self) -> Iterator[str | Call]:
        while True:
            before, mark, rest = self._held.partition(BEGIN)
            if not mark:
                safe = len(self._held) - overlap(self._held, BEGIN)
                is_space = not self._held[:safe].strip()
                if self.calls and is_space and safe <= MAX_SPACE:
                    return  # space between calls is not part of the text
                text, self._held = self._held[:safe], self._held[safe:]
                if text:
                    yield text
                return
            if before.strip():
                yield before
            self._held = mark + rest
            found, end = self._closed(rest)
            if end < 0:
                self._is_open, self._tail = True, rest
                return  # the call is not complete yet
            self._held = rest[end + len(END) :]
            if found is None:
                yield mark + rest[: end + len(END)]
            else:
                yield from self._calls(found)

    def _closed(self, text: str) -> tuple[list[tuple[str, str]] | None, int]:
        """Return the calls before the end mark (None: invalid), and its position.

        Position -1: the call is incomplete. A mark within a JSON string is skipped.
        """
        end = -1
        for _ in range(MAX_MARKS):
            end = text.find(END, end + 1)
            if end < 0:
                return None, end
            found = self._parsed(text[:end])
            if found is not None:
                return found, end
            if not _ends_in_string(text[:end]):
                break
        return None, text.find(END)

    def _is_not_a_call(self) -> bool:
        """Return whether the output is certainly not a call in Llama 3's format."""
        is_call = self._family is not None and CALL_BEGUN.match(self._held)
        is_space = len(self._held) > MAX_SPACE and not self._held.strip()
        return self._is_free or is_space or not is_call

    def _rest(self) -> Iterator[str]:
        self._is_free = True
        text, self._held = self._held, ""
        if text:
            yield text

    def _leading(self, text: str) -> tuple[list[tuple[str, str]] | None, str]:
        """Return the calls in Llama 3's format at the start of a text, and the rest."""
        calls, at = list[tuple[str, str]](), 0
        while begun := NEXT_CALL.match(text, at):
            try:
                found, end = DECODER.raw_decode(text, begun.end())
                listed = found if isinstance(found, list) else [found]
                calls += [self._call(call) for call in listed]
            except (ValueError, RecursionError):
                break
            at = end
        return calls or None, text[at:].lstrip("; \t\r\n") if calls else text

    def _parsed(self, text: str) -> list[tuple[str, str]] | None:
        try:
            found = json.loads(text, strict=False)
            calls = found if isinstance(found, list) else [found]
            return [self._call(call) for call in calls] or None
        except (ValueError, RecursionError):
            return None

    def _call(self, call: Any) -> tuple[str, str]:
        """Return the tool and arguments of a call; raise ``ValueError`` if invalid."""
        names = [tool.function.name for tool in self.calling.tools]
        if not isinstance(call, dict) or call.get("name") not in names:
            raise ValueError("not a call of a known tool")
        given = call.get("arguments", call.get("parameters"))
        if isinstance(given, str):  # JSON in a string, or other text
            with contextlib.suppress(ValueError, RecursionError):
                given = json.loads(given or "null", strict=False)
        given = {} if given is None else given
        text = (
            given
            if isinstance(given, str)
            else json.dumps(given, allow_nan=False, ensure_ascii=False)
        )
        text.encode()  # fails for a lone surrogate
        return call["name"], text

    def _calls(self, found: list[tuple[str, str]]) -> Iterator[Call]:
        for name, text in found:
            if not (self.calling.is_single and self.calls):
                yield Call(self.calls, name, text)
                self.calls += 1


class ListedCalls:
    """Finds the objects of a JSON list in a growing text."""

    def __init__(self) -> None:
        self._object: list[str] = []
        self._depth = 0
        self._is_quoted = self._is_escaped = False

    def feed(self, text: str) -> Iterator[str]:
        for letter in text:
            if self._depth or letter == "{":
                self._object.append(letter)
            if self._is_quoted:
                self._is_quoted = letter != '"' or self._is_escaped
                self._is_escaped = letter == "\\" and not self._is_escaped
                continue
            self._is_quoted = letter == '"' and self._depth > 0
            self._depth += (letter == "{") - (letter == "}" and self._depth > 0)
            if not self._depth and self._object:
                yield "".join(self._object)
                self._object.clear()


def _ends_in_string(text: str) -> bool:
    """Return whether truncated JSON ends within a string."""
    try:
        json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        pass
    return False


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of ``text`` that may begin ``mark``."""
    for count in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-count:]):
            return count
    return 0
