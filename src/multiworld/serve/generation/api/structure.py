"""The structure that an answer must have: a schema, a grammar, or tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from multiworld.serve.core.refusals import wrong_field
from multiworld.serve.generation import grammar as grammars
from multiworld.serve.generation.api.request_fields import (
    ResponseFormat,
    StructuredOutputs,
)
from multiworld.serve.generation.api.tools import Calling


@dataclass(frozen=True, slots=True)
class Structure:
    """The required structure of an answer, not checked yet."""

    kind: str  # selects the function that makes the grammar
    value: Any
    param: str  # field of the request that has it

    def grammar(self) -> str:
        """Check the structure and return its grammar; this may take a second."""
        makers: dict[str, Callable[[Any, str], str]] = {
            "json": grammars.grammar_of_schema,
            "regex": grammars.grammar_of_regex,
            "choice": grammars.grammar_of_choice,
            "grammar": grammars.grammar_of_lark,
            "calls": _grammar_of_calls,
            "marked calls": _grammar_of_marked_calls,
        }
        return makers[self.kind](self.value, self.param)


def _grammar_of_calls(calling: Calling, param: str) -> str:
    return grammars.grammar_of_calls(calling.forms(), is_single=calling.is_single)


def _grammar_of_marked_calls(
    given: tuple[list[tuple[str, Any]], int, int, tuple[int, ...]], param: str
) -> str:
    return grammars.grammar_of_marked_calls(*given)


def structure_of(
    form: ResponseFormat | None, outputs: StructuredOutputs | None
) -> Structure | None:
    """Return the structure that a request requires; None: any."""
    found: list[Structure] = []
    if form is not None and form.type == "json_object":
        found.append(Structure("json", {"type": "object"}, "response_format"))
    elif form is not None and form.type == "json_schema":
        schema = None if form.json_schema is None else form.json_schema.schema
        if schema is None:
            raise wrong_field("response_format", "needs json_schema with a schema")
        found.append(Structure("json", schema, "response_format"))
    if outputs is not None:
        fields = msgspec.structs.asdict(outputs)
        if fields.pop("json_object"):
            fields["json"] = {"type": "object"}
        given = {kind: value for kind, value in fields.items() if value is not None}
        if len(given) != 1:
            rule = "must have exactly one of json, regex, choice, grammar, json_object"
            raise wrong_field("structured_outputs", rule)
        found += [Structure(k, v, "structured_outputs") for k, v in given.items()]
    if len(found) > 1:
        raise wrong_field("structured_outputs", "cannot be given with response_format")
    return found[0] if found else None
