"""The structure that an answer must have: a schema, a grammar, or tool calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from multiworld.serve.core.refusals import wrong_field
from multiworld.serve.generation import grammar as grammars
from multiworld.serve.generation.api.request_fields import (
    ResponseFormat,
    StructuredOutputs,
)

# Checks the required structure of an answer, and returns its grammar: in a second.
Structure = Callable[[], str]

# By field of ``structured_outputs``.
MAKERS: dict[str, Callable[[Any, str], str]] = {
    "json": grammars.grammar_of_schema,
    "regex": grammars.grammar_of_regex,
    "choice": grammars.grammar_of_choice,
    "grammar": grammars.grammar_of_lark,
}


def structure_of(
    form: ResponseFormat | None, outputs: StructuredOutputs | None
) -> Structure | None:
    """Return the structure that a request requires; None: any."""
    found: list[Structure] = []
    of_schema = grammars.grammar_of_schema
    if form is not None and form.type == "json_object":
        found.append(partial(of_schema, {"type": "object"}, "response_format"))
    elif form is not None and form.type == "json_schema":
        schema = None if form.json_schema is None else form.json_schema.schema
        if schema is None:
            raise wrong_field("response_format", "needs json_schema with a schema")
        found.append(partial(of_schema, schema, "response_format"))
    if outputs is not None:
        fields = msgspec.structs.asdict(outputs)
        if fields.pop("json_object"):
            fields["json"] = {"type": "object"}
        given = {kind: value for kind, value in fields.items() if value is not None}
        if len(given) != 1:
            rule = "must have exactly one of json, regex, choice, grammar, json_object"
            raise wrong_field("structured_outputs", rule)
        param = "structured_outputs"
        found += [partial(MAKERS[kind], v, param) for kind, v in given.items()]
    if len(found) > 1:
        raise wrong_field("structured_outputs", "cannot be given with response_format")
    return found[0] if found else None
