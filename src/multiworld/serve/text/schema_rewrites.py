"""Replacement of JSON Schema keywords that llguidance does not support. Pure.

This module replaces ``if``, ``not`` and ``oneOf`` over schemas that can be negated,
``uniqueItems`` over an enum, and rules about property names. Other unsupported keywords
stay unchanged, and are refused later.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any
from urllib.parse import unquote

from multiworld.serve.text import schema_patterns

TYPES = ("null", "boolean", "object", "array", "number", "string")
NOTES = {"title", "description", "default", "examples", "$comment", "deprecated"}

# Negation of a keyword: the type that the keyword applies to, the opposite keyword, and
# the amount to add to the bound.
LIMITS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
NEGATED = {
    *("type", "enum", "const", "required", "properties"),
    *("anyOf", "allOf", "not", *LIMITS, *NOTES),
}

MAX_EXCLUSIVE = 8  # maximum alternatives of a ``oneOf`` that is rewritten
MAX_CASES = 512  # maximum alternatives of a negation
MAX_ARRANGEMENTS = 512  # maximum arrays to list for a ``uniqueItems`` over an enum
MAX_CHARACTERS = 1024  # maximum total length of the strings that a value must not equal
# Maximum length of one such string. A pattern of all other strings nests three levels
# for each character of the string, and llguidance allows 250 levels.
MAX_WORD = 80

Schema = dict[str, Any]


def rewritten(node: Schema, root: Schema) -> Schema:
    """Rewrite a schema of 2020-12 without the keywords that this module can replace.

    Only references into ``root`` are followed; ``root`` is empty if an ``$id`` changes
    the meaning of references.
    """
    found = dict(node)
    every: list[Any] = []
    _drop_conditions(found, every)
    _drop_negation(found, every)
    _drop_tagged(found, every, root)
    _drop_exclusion(found, every)
    _drop_dependencies(found, every)
    _drop_names(found, every, root)
    _drop_uniqueness(found, root)
    if every:
        found["allOf"] = [*node.get("allOf", []), *every]
    return found


def _drop_conditions(node: Schema, every: list[Any]) -> None:
    """Replace ``if``, ``then`` and ``else`` by an ``anyOf`` of the two cases."""
    if "if" not in node or not {"then", "else"} & node.keys():
        for name in ("if", "then", "else"):
            node.pop(name, None)
        return
    condition, otherwise = node["if"], node.get("else", True)
    cases = negations(condition, node)
    if cases is None:
        return
    found = [{"allOf": [condition, node.get("then", True)]}]
    if cases:
        found.append({"allOf": [{"anyOf": cases}, otherwise]})
    every.append({"anyOf": found})
    for name in ("if", "then", "else"):
        node.pop(name, None)


def _drop_negation(node: Schema, every: list[Any]) -> None:
    if "not" not in node:
        return
    cases = negations(node["not"], node)
    if cases is not None:
        every.append({"anyOf": cases} if cases else False)
        del node["not"]


def _drop_tagged(node: Schema, every: list[Any], root: Schema) -> None:
    """Replace ``oneOf`` by ``anyOf`` where at most one alternative can hold.

    So they are written for tagged unions, with a string for each kind of object
    (pydantic's ``discriminator``).
    """
    choices = node.get("oneOf")
    if not isinstance(choices, list) or len(choices) < 2:
        return
    objects = [_object_of(each, root) for each in choices]
    tagged = [each for each in objects if each is not None]
    if len(tagged) < len(objects):
        return
    if not all(isinstance(each.get("properties"), dict) for each in tagged):
        return
    for name in tagged[0].get("required", []):
        if not all(name in each.get("required", []) for each in tagged):
            continue
        tags = [_values(each["properties"].get(name), root) for each in tagged]
        every_tag = [tag for some in tags for tag in some or ()]
        are_texts = None not in tags and all(isinstance(tag, str) for tag in every_tag)
        if are_texts and len(every_tag) == len({*every_tag}):
            # Not within ``allOf`` where that can be avoided: rules for schemas without
            # ``allOf`` still apply then.
            del node["oneOf"]
            node.pop("discriminator", None)
            if {"anyOf", "allOf"} & node.keys():
                every.append({"anyOf": choices})
            else:
                node["anyOf"] = choices
            return


def _object_of(schema: Any, root: Schema) -> Schema | None:
    """Return a schema of objects only, following ``$ref``; None for any other."""
    if isinstance(schema, dict) and "$ref" in schema:
        if schema.keys() - {"$ref"} - NOTES:
            return None
        schema = _referred(str(schema["$ref"]), root)
    is_one = isinstance(schema, dict) and schema.get("type") == "object"
    return schema if is_one else None


def _drop_exclusion(node: Schema, every: list[Any]) -> None:
    """Replace ``oneOf``: combine each alternative with the negations of the others."""
    choices = node.get("oneOf", [])
    if not 2 <= len(choices) <= MAX_EXCLUSIVE:
        return
    others = [negations(each, node) for each in choices]
    found = []
    for place, choice in enumerate(choices):
        parts = [choice]
        for negation in others[:place] + others[place + 1 :]:
            if negation is None:
                return
            parts.append({"anyOf": negation} if negation else False)
        if False not in parts:
            found.append({"allOf": parts})
    if found:
        every.append({"anyOf": found})
        del node["oneOf"]


def _drop_names(node: Schema, every: list[Any], root: Schema) -> None:
    """Replace a rule about property names by a list of the allowed properties."""
    rule = node.get("propertyNames")
    if not isinstance(rule, dict):
        return
    names, pattern = _values(rule, root), rule.get("pattern")
    if names is not None:
        allowed = {"properties": {name: True for name in names if type(name) is str}}
    elif pattern and not rule.keys() - {"type", "pattern"} - NOTES:
        if rule.get("type", "string") != "string":
            return
        allowed = {"patternProperties": {pattern: True}}
    else:
        return
    del node["propertyNames"]
    every.append({**allowed, "additionalProperties": False})


def _drop_dependencies(node: Schema, every: list[Any]) -> None:
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needed in node.pop(keyword, {}).items():
            needs = {"required": needed} if isinstance(needed, list) else needed
            present = {"allOf": [{"required": [name]}, needs]}
            every.append({"anyOf": [{"properties": {name: False}}, present]})


def _drop_uniqueness(node: Schema, root: Schema) -> None:
    """Replace ``uniqueItems`` by an enum of all possible arrays, if they are few."""
    if not node.get("uniqueItems") or node.get("type") != "array":
        return
    if node.get("maxItems", 2) <= 1:
        del node["uniqueItems"]
        return
    known = {"type", "items", "uniqueItems", "minItems", "maxItems"} | NOTES
    values = _values(node.get("items"), root)
    if values is None or node.keys() - known - {"$defs", "definitions"}:
        return
    most = min(node.get("maxItems", len(values)), len(values))
    lengths = range(node.get("minItems", 0), most + 1)
    if len(values) > MAX_ARRANGEMENTS or len(lengths) > MAX_ARRANGEMENTS:
        return
    if sum(math.perm(len(values), each) for each in lengths) > MAX_ARRANGEMENTS:
        return
    every_length = (itertools.permutations(values, each) for each in lengths)
    found = [list(each) for some in every_length for each in some]
    if found:
        for name in known - NOTES:
            node.pop(name, None)
        node["enum"] = found


def _values(schema: Any, root: Schema) -> list[Any] | None:
    """Return all values that a schema allows, following ``$ref``; None if unknown."""
    if not isinstance(schema, dict):
        return None
    if "$ref" in schema:
        if schema.keys() - {"$ref"} - NOTES:
            return None
        schema = _referred(str(schema["$ref"]), root)
        if not isinstance(schema, dict):
            return None
    if schema.get("type") == "boolean" and not schema.keys() - {"type"} - NOTES:
        return [False, True]
    if schema.keys() - {"enum", "const", "type"} - NOTES:
        return None
    if not isinstance(schema.get("type", ""), str) or schema.get("type") == "integer":
        return None
    if ("enum" in schema) == ("const" in schema):
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    kind = schema.get("type")
    return [each for each in _distinct(values) if kind in (None, _type_of(each))]


def _referred(reference: str, root: Schema) -> Any:
    """Return the schema that ``reference`` names in ``$defs`` of ``root``, or None."""
    path = unquote(reference).split("/")
    if path[:2] != ["#", "$defs"] or len(path) != 3:
        return None
    name = path[2].replace("~1", "/").replace("~0", "~")
    return root.get("$defs", {}).get(name)


def negations(schema: Any, beside: Any) -> list[Any] | None:
    """Return the negation of a schema, as alternatives of which at least one holds."""
    # ``beside`` is a schema that holds in any case; its enums limit the possible
    # values. Returns None if the negation cannot be written without ``not``, or has
    # more than ``MAX_CASES`` alternatives, and an empty list if ``schema`` always
    # holds.
    if isinstance(schema, bool):
        return [] if schema else [{}]
    if schema.keys() - NEGATED:
        return None
    found: list[Any] = [schema["not"]] if "not" in schema else []
    for name, (kind, opposite, more) in LIMITS.items():
        if name not in schema:
            continue
        bound = schema[name] + more
        if kind == "number" and _is_integer(beside):
            found.append({"type": "integer", **_integers_beyond(name, bound)})
        elif kind == "number" or bound >= 0:
            found.append({"type": kind, opposite: bound})
    groups = [[each] for each in schema.get("allOf", [])]
    for group in [*groups, *([schema["anyOf"]] if "anyOf" in schema else [])]:
        parts = [negations(each, beside) for each in group]
        if any(part is None for part in parts):
            return None
        if all(parts):
            found.append({"allOf": [{"anyOf": part} for part in parts]})
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if "integer" in kinds and "number" not in kinds:
            return None
        found.append({"type": [kind for kind in TYPES if kind not in kinds]})
    for name in ("enum", "const"):
        if name in schema:
            values = schema[name] if name == "enum" else [schema[name]]
            cases = _other_values(values, beside)
            if cases is None:
                return None
            found += cases
    required = schema.get("required", [])
    if len(required) > MAX_CASES:
        return None
    found += [{"type": "object", "properties": {name: False}} for name in required]
    properties = beside.get("properties", {}) if isinstance(beside, dict) else {}
    for name, each in schema.get("properties", {}).items():
        cases = negations(each, properties.get(name))
        if cases is None:
            return None
        found += [
            {"type": "object", "required": [name], "properties": {name: case}}
            for case in cases
        ]
        if len(found) > MAX_CASES:
            return None
    return [e for e in found if e is not False and (e is True or e.get("type") != [])]


def _is_integer(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "integer"


def _integers_beyond(name: str, bound: float) -> Schema:
    """Return an inclusive bound for the integers that the bound ``name`` excludes."""
    return {
        "minimum": {"maximum": math.ceil(bound) - 1},
        "exclusiveMinimum": {"maximum": math.floor(bound)},
        "maximum": {"minimum": math.floor(bound) + 1},
        "exclusiveMaximum": {"minimum": math.ceil(bound)},
    }[name]


def _other_values(values: list[Any], beside: Any) -> list[Schema] | None:
    """Return schemas of all values except ``values``; None if that is impossible."""
    excluded = {_text(each) for each in values}
    if isinstance(beside, dict) and {"enum", "const"} & beside.keys():
        left = beside.get("enum", [beside.get("const")])
        left = [each for each in left if _text(each) not in excluded]
        return [{"enum": left}] if left else []
    possible = beside.get("type", TYPES) if isinstance(beside, dict) else TYPES
    possible = [possible] if isinstance(possible, str) else possible
    possible = {"number" if kind == "integer" else kind for kind in possible}
    values = [each for each in values if _type_of(each) in possible]
    kinds = {_type_of(each) for each in values}
    if kinds & {"number", "object", "array"}:
        return None
    strings = [each for each in values if isinstance(each, str)]
    lengths = [len(each) for each in strings]
    if sum(lengths) > MAX_CHARACTERS or max(lengths, default=0) > MAX_WORD:
        return None
    found: list[Schema] = [{"type": [k for k in TYPES if k not in kinds]}]
    if strings:
        pattern = schema_patterns.of_others(strings)
        found.append({"type": "string", "pattern": pattern})
    if "boolean" in kinds and (left := [b for b in (False, True) if b not in values]):
        found.append({"enum": left})
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", str: "string", dict: "object", list: "array"}
    return names.get(type(value), "number")


def _text(value: Any) -> str:
    """Return a string that is equal for values that JSON Schema considers equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)}:{_text(value[key])}" for key in sorted(value))
        return f"{{{','.join(pairs)}}}"
    return json.dumps(value)


def _distinct(values: list[Any]) -> list[Any]:
    return list({_text(each): each for each in values}.values())
