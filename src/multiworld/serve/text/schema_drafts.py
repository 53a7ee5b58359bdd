"""Conversion of JSON schemas of all drafts to what llguidance enforces exactly. Pure.

This module reads a schema by the rules of the draft that the schema declares (default:
2020-12), and rewrites it to 2020-12. It refuses schemas that cannot be enforced. It
adds bounds to numbers that have none, because without bounds a model may write digits
forever.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from multiworld.serve.text import schema_patterns
from multiworld.serve.text.schema_patterns import SchemaError
from multiworld.serve.text.schema_rewrites import NOTES, rewritten

# Keywords whose values map names to schemas, and keywords whose values are data.
MAPS = {
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentSchemas", "dependencies"),
}
DATA = {
    *("enum", "const", "default", "example", "examples", "required"),
    "dependentRequired",
}

LATEST = "2020-12"
DRAFTS = {
    "json-schema.org/draft-04/schema": "4",
    "json-schema.org/draft-06/schema": "6",
    "json-schema.org/draft-07/schema": "7",
    "json-schema.org/draft/2019-09/schema": "2019-09",
    "json-schema.org/draft/2020-12/schema": LATEST,
}
BEFORE_2019 = ("4", "6", "7")

# Keywords that a draft does not define and therefore ignores.
UNKNOWN_TO: dict[str, set[str]] = {
    "4": {"const", "contains", "propertyNames", "$id", "if", "then", "else"},
    "6": {"if", "then", "else"},
    "7": set(),
    "2019-09": {"prefixItems", "$dynamicRef", "$dynamicAnchor"},
    LATEST: set(),
}
SINCE_2019 = {
    *("unevaluatedProperties", "unevaluatedItems", "dependentRequired"),
    *("dependentSchemas", "minContains", "maxContains", "prefixItems", "$anchor"),
    *("$recursiveRef", "$recursiveAnchor", "$dynamicRef", "$dynamicAnchor"),
}
# Drafts before 2019-09 ignore all keywords beside ``$ref`` except these.
BESIDE_REF = ("$ref", "definitions", "$defs")

COUNTS = {
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties"),
    *("maxProperties", "minContains", "maxContains"),
}
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")

EXACT = 2**53  # largest integer that llguidance does not round
DIGITS = 15  # maximum digits of a number that has no bounds of its own
LARGEST = 10**DIGITS - 1
# The smallest step of a number without ``multipleOf``: six digits after the point.
STEP = 1e-6


# A schema that allows any JSON, but bounds its numbers at any depth.
ANY_NAME = "multiworld-any"
ANY = {"$ref": f"#/$defs/{ANY_NAME}"}
ANY_JSON: dict[str, Any] = {
    "anyOf": [
        {"type": ["null", "boolean", "string"]},
        {"type": "number", "minimum": -LARGEST, "maximum": LARGEST},
        {"type": "array", "items": ANY},
        {"type": "object", "additionalProperties": ANY},
    ]
}
ALTERNATIVES = {"$ref", "anyOf", "oneOf"}


KEYWORDS = frozenset(
    (
        *("$schema", "$id", "$anchor", "$ref", "$dynamicRef", "$dynamicAnchor"),
        *("$recursiveRef", "$recursiveAnchor", "$defs", "definitions", *NOTES),
        *("type", "enum", "const", "multipleOf", *BOUNDS, *COUNTS, "pattern", "format"),
        *("items", "prefixItems", "additionalItems", "uniqueItems", "contains"),
        *("unevaluatedItems", "required", "properties", "patternProperties"),
        *("additionalProperties", "dependentRequired", "dependentSchemas"),
        *("dependencies", "propertyNames", "unevaluatedProperties"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    )
)
# Maximum nodes, and maximum characters of all enums, of a schema after ``rewritten``.
MAX_NODES, MAX_ENUMS = 20_000, 256 * 1024


def draft_of(schema: dict[str, Any]) -> str:
    declared = schema.get("$schema", "https://json-schema.org/draft/2020-12/schema")
    name = str(declared).removesuffix("#").partition("://")[2]
    if name not in DRAFTS:
        raise SchemaError(
            f"declares {str(declared)[:80]!r}, which is not a known draft"
        )
    return DRAFTS[name]


def enforceable(schema: dict[str, Any], draft: str) -> dict[str, Any]:
    """Convert a schema of any draft to a schema of 2020-12 that can be enforced."""
    latest: dict[str, Any] = mapped(schema, lambda node: _as_latest(node, draft))
    has_ids = any("$id" in node for node in nodes(latest))
    root = {} if has_ids else latest
    budget = _Budget()

    def written(node: dict[str, Any]) -> dict[str, Any]:
        made = rewritten(node, root)
        budget.spend(made)
        return made

    found: dict[str, Any] = mapped(latest, written)
    for node in nodes(found):
        _check_reference(node)
        _check_data(node)
        if node.get("minProperties", 0) > 1:
            raise SchemaError(
                "has minProperties above 1, which cannot be enforced: duplicate keys "
                "would count"
            )
    _check_bounds(found)
    has_steps = any("multipleOf" in node for node in nodes(found))
    bounded: dict[str, Any] = mapped(
        found, lambda node: _bounded(node, has_steps=has_steps)
    )
    return _with_bounded_rest(bounded, has_steps=has_steps)


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all schemas within a schema, itself included."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            yield part
            for name, value in part.items():
                if name in MAPS and isinstance(value, dict):
                    left += value.values()
                elif name not in DATA:
                    left.append(value)


def parts_of(*values: Any) -> Iterator[Any]:
    """Yield values and everything within them: items, names and their values."""
    left = [*values]
    while left:
        yield (part := left.pop())
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += (*part, *part.values())


class _Budget:
    """Limits the growth of a schema while ``rewritten`` expands its rules."""

    def __init__(self) -> None:
        self._nodes = self._characters = 0

    def spend(self, node: dict[str, Any]) -> None:
        maps = (node.get(name) for name in MAPS)
        pattern, named = node.get("pattern"), node.get("patternProperties")
        self._characters += len(pattern) if isinstance(pattern, str) else 0
        self._characters += sum(map(len, named)) if isinstance(named, dict) else 0
        self._nodes += 1 + sum(len(each) for each in maps if isinstance(each, dict))
        for part in parts_of(node.get("enum")):
            self._characters += len(part) if isinstance(part, str) else 1
            if self._characters > MAX_ENUMS:
                break
        if self._nodes > MAX_NODES or self._characters > MAX_ENUMS:
            raise SchemaError(
                f"has rules that expand to more than {MAX_NODES} schemas, or to enums "
                f"and patterns of more than {MAX_ENUMS} characters"
            )


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Apply ``change`` to a schema and all schemas within it, outermost first."""
    if isinstance(schema, list):
        return [mapped(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in change(schema).items():
        if name in MAPS and isinstance(value, dict):
            found[name] = {key: mapped(each, change) for key, each in value.items()}
        else:
            found[name] = value if name in DATA else mapped(value, change)
    return found


def _as_latest(node: dict[str, Any], draft: str) -> dict[str, Any]:
    is_old = draft in BEFORE_2019
    unknown = UNKNOWN_TO[draft] | (SINCE_2019 if is_old else set()) | {"$schema"}
    known = KEYWORDS - unknown  # other keywords are annotations
    found = {name: value for name, value in node.items() if name in known}
    if draft == "4" and isinstance(node.get("id"), str):
        found["$id"] = node["id"]
    found = _with_patterns(found)
    if is_old and "$ref" in found:
        return {name: found[name] for name in BESIDE_REF if name in found}
    for name in COUNTS & found.keys():
        if isinstance(found[name], float) and found[name].is_integer():
            found[name] = int(found[name])
    if draft == LATEST:
        return found
    rest = found.pop("additionalItems", None)
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        if rest is not None:
            found["items"] = rest
        if not found["prefixItems"]:
            del found["prefixItems"]
    if draft == "4":
        for bound in ("minimum", "maximum"):
            name = f"exclusive{bound.title()}"
            is_exclusive = found.pop(name, False)
            if is_exclusive and bound in found:
                found[name] = found.pop(bound)
    return found


def _check_reference(node: dict[str, Any]) -> None:
    """Refuse a reference to data, because data is not checked as a schema."""
    pointer = str(node.get("$ref", "")).partition("#")[2]
    is_name = False
    for part in unquote(pointer).split("/"):
        if part in DATA and not is_name:
            raise SchemaError(f"has a $ref into {part!r}, which is not a schema")
        is_name = part in MAPS and not is_name


def _check_data(node: dict[str, Any]) -> None:
    """Refuse numbers that llguidance would round, and strings that it cannot write."""
    given = [node[name] for name in (*BOUNDS, "multipleOf") if name in node]
    given += [node.get("const"), node.get("enum")]
    given += [[*names] for name in MAPS if isinstance(names := node.get(name), dict)]
    for part in parts_of(*given):
        if isinstance(part, str):
            if not schema_patterns.can_be_written(part):
                raise SchemaError(
                    "has a string with a control character that cannot be enforced"
                )
        elif isinstance(part, int | float) and not abs(part) <= EXACT:  # true for NaN
            raise SchemaError(
                f"has the number {part}, which cannot be enforced: numbers beyond 2^53 "
                "are rounded; use a string"
            )


def _check_bounds(schema: Any) -> None:
    """Refuse an exclusive bound with the same integer part as an opposite bound.

    For such bounds, llguidance allows the excluded value: for example, it allows 0 if
    ``exclusiveMinimum`` is 0 and ``maximum`` is 0.5.
    """
    # Compare all bounds of the schema, because ``allOf`` and ``$ref`` combine them.
    every = [
        (name, float(node[name]), node.get("type") == "integer")
        for node in nodes(schema)
        for name in BOUNDS
        if name in node
    ]
    # A bound of each direction for each integer part, rounded either way.
    known: dict[tuple[bool, object], tuple[str, float]] = {}
    for name, bound, _ in every:
        for part in _integer_parts(bound):
            known.setdefault((_is_lower(name), part), (name, bound))
    for name, bound, is_integer in every:
        if not name.startswith("exclusive") or is_integer:
            continue
        for part in _integer_parts(bound):
            found = known.get((not _is_lower(name), part))
            if found is not None:
                other_name, other = found
                raise SchemaError(
                    f"has {name} {bound:g} beside {other_name} {other:g}, which cannot "
                    "be enforced exactly; give inclusive bounds"
                )


def _is_lower(bound: str) -> bool:
    return bound in ("minimum", "exclusiveMinimum")


def _integer_parts(bound: float) -> tuple[object, object]:
    return ("floor", math.floor(bound)), ("whole", int(bound))


def _with_patterns(node: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with patterns that llguidance enforces exactly."""
    found = dict(node)
    if isinstance(node.get("pattern"), str):
        found["pattern"] = schema_patterns.enforceable(node["pattern"])
    if isinstance(named := node.get("patternProperties"), dict):
        found["patternProperties"] = {
            schema_patterns.enforceable(name): each for name, each in named.items()
        }
    return found


def _with_bounded_rest(schema: dict[str, Any], *, has_steps: bool) -> dict[str, Any]:
    """Return a schema that bounds numbers even where the schema does not name a type.

    A schema that combines other schemas is returned unchanged, because the added bounds
    would become part of the combination.
    """
    every = [*nodes(schema)]
    for node in every:
        rules = node.keys() - NOTES - {"$defs", "definitions", "$schema"}
        if {"allOf", "$id", "patternProperties"} & rules:
            return schema
        if len(rules) > 1 and ALTERNATIVES & rules:
            return schema
    if any(ANY_NAME in node.get("$defs", {}) for node in every):
        return schema
    found: dict[str, Any] = _filled(schema, has_steps=has_steps)
    if found == schema:
        return schema
    return {**found, "$defs": {**found.get("$defs", {}), ANY_NAME: ANY_JSON}}


def _filled(schema: Any, *, has_steps: bool) -> Any:
    """Return a schema that bounds numbers wherever the original allows any value."""
    fill = functools.partial(_filled, has_steps=has_steps)
    if schema is True or (isinstance(schema, dict) and not schema.keys() - NOTES):
        return dict(ANY)
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in MAPS and isinstance(value, dict):
            found[name] = {key: fill(each) for key, each in value.items()}
        elif name in ("anyOf", "oneOf", "prefixItems"):
            found[name] = [fill(each) for each in value]
        elif name in ("items", "additionalProperties"):
            found[name] = fill(value)
    if {"enum", "const", *ALTERNATIVES} & found.keys():
        return found
    if "type" not in found:
        found = _bounded({**found, "type": "number"}, has_steps=has_steps)
        del found["type"]
    kinds = found.get("type", ("object", "array"))
    if "object" in kinds:
        found.setdefault("additionalProperties", dict(ANY))
    if "array" in kinds:
        found.setdefault("items", dict(ANY))
    return found


def _bounded(node: dict[str, Any], *, has_steps: bool) -> dict[str, Any]:
    """Add the bounds and the step that a number's schema lacks."""
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    is_number = "number" in kinds
    if not is_number and "integer" not in kinds:
        return node
    if {"enum", "const", "$ref"} & node.keys():
        return node
    found = dict(node)
    least = max((node[n] for n in BOUNDS[:2] if n in node), default=-LARGEST)
    most = min((node[n] for n in BOUNDS[2:] if n in node), default=LARGEST)
    if least == -LARGEST and not {*BOUNDS[:2]} & node.keys() and most > -LARGEST:
        found["minimum"] = -LARGEST
    if most == LARGEST and not {*BOUNDS[2:]} & node.keys() and least < LARGEST:
        found["maximum"] = LARGEST
    if is_number and not has_steps:
        found["multipleOf"] = STEP
    return found
