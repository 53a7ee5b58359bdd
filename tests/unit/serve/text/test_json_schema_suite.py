"""Structures of JSON schemas, judged by the JSON Schema Test Suite."""

from __future__ import annotations

import functools
import itertools
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import validator_for
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from multiworld.errors import InvalidRequestError
from multiworld.serve.text import schema_drafts
from multiworld.serve.text.grammar import grammar_of_schema
from tests.tiers import some

SUITE = Path(__file__).parents[3] / "data" / "json_schema" / "suite.json.xz"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}

# Maximum number of valid instances that are rejected, and of schemas that are
# refused, as the documentation lists them. Fewer is better.
MOST = {"rejected": 12, "refused": 177}


@functools.cache
def tokenizer() -> Any:
    return LLTokenizer("byte")


@functools.cache
def suite() -> dict[str, dict[str, list[Any]]]:
    found: dict[str, dict[str, list[Any]]] = json.loads(
        lzma.decompress(SUITE.read_bytes())
    )
    return found


def matcher_of(schema: Any) -> Any:
    limits = LLParserLimits(
        step_max_items=3000, max_items_in_row=10_000, max_lexer_states=30_000
    )
    grammar = grammar_of_schema(schema, "schema")
    made = LLMatcher(tokenizer(), grammar, log_level=0, limits=limits)
    made.compute_bitmask()
    if made.is_error():
        raise InvalidRequestError(made.get_error())
    return made


def accepts(matcher: Any, text: str) -> bool:
    matcher = matcher.deep_copy()
    data = list(text.encode("utf-8", "surrogatepass"))
    return bool(
        matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
    )


def texts_of(value: Any) -> Iterator[str]:
    """Yield JSON texts of a value, with other orders and other spellings of numbers."""
    if isinstance(value, dict):
        orders: Any = [list(value.items())]
        if len(value) <= 4:
            orders = itertools.permutations(value.items())
        for order in itertools.islice(orders, 24):
            parts = [list(itertools.islice(texts_of(v), 4)) for _, v in order]
            for each in itertools.islice(itertools.product(*parts), 8):
                pairs = list(zip(order, each, strict=True))
                names = [
                    f"{json.dumps(n, ensure_ascii=False)}: {t}" for (n, _), t in pairs
                ]
                yield "{" + ", ".join(names) + "}"
    elif isinstance(value, list):
        parts = [list(itertools.islice(texts_of(v), 4)) for v in value]
        for each in itertools.islice(itertools.product(*parts), 12):
            yield "[" + ", ".join(each) + "]"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        yield json.dumps(value, ensure_ascii=False)
        yield json.dumps(value)
    else:
        yield json.dumps(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e300:
            yield str(int(value))
        elif isinstance(value, int):
            yield f"{value}.0"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("draft", some([*DRAFTS], 2))
def test_no_invalid_instance_is_accepted(draft: str) -> None:
    counts: Counter[str] = Counter()
    for file, groups in suite()[draft].items():
        for group in groups:
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            try:
                matcher = matcher_of(schema)
            except InvalidRequestError:
                counts["refused"] += 1
                continue
            for test in group["tests"]:
                found = next(
                    (t for t in texts_of(test["data"]) if accepts(matcher, t)), None
                )
                what = f"{file}: {group['description']}: {test['description']}: {found}"
                assert found is None or test["valid"], what
                counts["rejected"] += found is None and test["valid"]
                counts["right"] += (found is not None) == test["valid"]
    assert counts["right"] > 300, counts
    assert all(counts[kind] <= most for kind, most in MOST.items()), counts


numbers = st.one_of(
    st.integers(-20, 20),
    st.floats(-20, 20, allow_nan=False).map(lambda x: round(x, 2)),
    st.sampled_from([2**53, 2**53 + 1, -(2**63), 1234567890123456789, 1e15, 0.1]),
)
leaves = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["number", "integer"])},
        optional={
            "minimum": numbers,
            "maximum": numbers,
            "exclusiveMinimum": numbers,
            "exclusiveMaximum": numbers,
        },
    ),
    st.fixed_dictionaries({"enum": st.lists(numbers, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"const": numbers}),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"minLength": st.integers(0, 3), "maxLength": st.integers(0, 5)},
    ),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.builds(
            lambda a, b: {
                "type": "object",
                "properties": {"a": a, "b": b},
                "required": ["a"],
            },
            inner,
            inner,
        ),
    ),
    max_leaves=4,
)
values = st.recursive(
    st.one_of(numbers, st.text(max_size=5), st.booleans(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(schemas, st.lists(values, min_size=1, max_size=8))
def test_what_is_accepted_is_valid(schema: Any, instances: list[Any]) -> None:
    """An independent validator judges it, with exact integers."""
    try:
        matcher = matcher_of(schema)
    except InvalidRequestError:
        return
    validator = validator_for(schema)
    for instance in instances:
        for text in itertools.islice(texts_of(instance), 12):
            if accepts(matcher, text):
                assert validator.is_valid(json.loads(text)), (schema, text)


atoms = st.one_of(
    st.fixed_dictionaries(
        {"enum": st.lists(st.sampled_from(["", "a", "ab", "b", True, None, 1, 2.5]))}
    ).filter(lambda schema: schema["enum"]),
    st.fixed_dictionaries({"const": st.sampled_from(["a", "ab", False, 1, [1]])}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", "boolean", "integer", "number", "array"])}
    ),
    st.fixed_dictionaries({"minimum": st.integers(0, 3)}),
    st.fixed_dictionaries({"maxLength": st.integers(0, 2)}),
)
names = st.lists(st.sampled_from("abc"), max_size=2, unique=True)
conditions = st.one_of(
    atoms,
    st.fixed_dictionaries({"required": names}),
    st.fixed_dictionaries(
        {"properties": st.dictionaries(st.sampled_from("abc"), atoms, max_size=2)},
        optional={"required": names},
    ),
)
rules = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("object"),
        "properties": st.dictionaries(st.sampled_from("abc"), atoms, max_size=3),
        "additionalProperties": st.just(False),
        "if": conditions,
        "then": conditions,
        "else": conditions,
        "not": st.recursive(
            conditions,
            lambda inner: st.one_of(
                st.fixed_dictionaries({"not": inner}),
                st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1)}),
                st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1)}),
            ),
            max_leaves=3,
        ),
        "oneOf": st.lists(conditions, min_size=1, max_size=3),
        "dependentRequired": st.dictionaries(st.sampled_from("abc"), names),
        "dependentSchemas": st.dictionaries(st.sampled_from("abc"), conditions),
        "propertyNames": st.sampled_from([{"enum": ["a", "c"]}, {"pattern": "^[ab]$"}]),
    },
).filter(lambda schema: len(schema) < 5)
lists = st.builds(
    lambda items, least, most: {
        "type": "array",
        "items": items,
        "uniqueItems": True,
        "minItems": least,
        **({} if most is None else {"maxItems": most}),
    },
    atoms,
    st.integers(0, 2),
    st.none() | st.integers(0, 3),
)
small = st.sampled_from(["", "a", "ab", "abc", "b", True, False, None, 0, 1, 2.5, [1]])
objects = st.dictionaries(st.sampled_from("abcd"), small, max_size=3)


@settings(max_examples=400, deadline=None)
@given(st.one_of(rules, lists), st.lists(st.one_of(objects, small, st.lists(small))))
def test_what_rewritten_rules_accept_is_valid(
    schema: Any, instances: list[Any]
) -> None:
    """Conditions, negations and dependencies are rewritten with other keywords."""
    try:
        matcher = matcher_of(schema)
    except InvalidRequestError:
        return
    validator = validator_for(schema)
    for instance in instances:
        for text in itertools.islice(texts_of(instance), 24):
            if accepts(matcher, text):
                assert validator.is_valid(json.loads(text)), (schema, text)


KIND = {"type": "string", "enum": ["car", "bike"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {
                "type": "object",
                "properties": {"kind": KIND, "doors": {"type": "integer"}},
                "required": ["kind"],
                "additionalProperties": False,
                "if": {"properties": {"kind": {"const": "car"}}},
                "then": {"required": ["doors"]},
                "else": {"properties": {"doors": False}},
            },
            ['{"kind": "car", "doors": 4}', '{"kind": "bike"}'],
            ['{"kind": "car"}', '{"kind": "bike", "doors": 4}'],
        ),
        (
            {"type": "string", "not": {"enum": ["", "no", "none"]}},
            ['"n"', '"non"', '"nones"', '"\\n"', '"x"'],
            ['""', '"no"', '"none"', "1"],
        ),
        ({"not": {"type": ["object", "array"]}}, ["1", '"a"', "null"], ["{}", "[]"]),
        (
            {
                "$defs": {
                    kind: {
                        "type": "object",
                        "properties": {
                            "kind": {"const": kind, "type": "string", "title": "Kind"},
                            kind: {"type": "boolean"},
                        },
                        "required": ["kind", kind],
                        "additionalProperties": False,
                    }
                    for kind in ("cat", "dog")
                },
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                "discriminator": {
                    "propertyName": "kind",
                    "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"},
                },
            },
            ['{"kind": "cat", "cat": true}', '{"kind": "dog", "dog": true}'],
            ['{"kind": "cat", "dog": true}', '{"cat": true}', "{}", "1"],
        ),
        (
            {"anyOf": [{"not": {}}, {"type": "string"}]},
            ['"a"'],
            ["1", "null"],
        ),
        (
            {
                "type": "array",
                "items": {"$ref": "#/$defs/Colour"},
                "uniqueItems": True,
                "minItems": 1,
                "$defs": {"Colour": {"type": "string", "enum": ["red", "blue"]}},
            },
            ['["red"]', '["blue", "red"]'],
            ["[]", '["red", "red"]', '["green"]'],
        ),
        (
            {
                "type": "object",
                "properties": {"card": {"type": "integer"}, "street": {}},
                "dependentRequired": {"card": ["street"]},
                "additionalProperties": False,
            },
            ["{}", '{"street": 1}', '{"card": 1, "street": 1}'],
            ['{"card": 1}'],
        ),
        (
            {"oneOf": [{"type": "number"}, {"maxLength": 2}]},
            ['"ab"', "null"],
            ["3", "2.5", '"abc"'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
                "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            ['{"a": true}', '{"b": true}'],
            ["{}", '{"a": true, "b": true}'],
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
            ['{"a": 1, "b": 2}', "{}"],
            ['{"c": 1}'],
        ),
    ],
)
def test_keywords_rewritten_as_others_are_enforced(
    schema: Any, good: list[str], bad: list[str]
) -> None:
    matcher = matcher_of(schema)
    assert [text for text in good if not accepts(matcher, text)] == []
    assert [text for text in bad if accepts(matcher, text)] == []


def test_conditions_in_conditions_stay_small() -> None:
    """Each part is written a fixed number of times, at any depth."""
    schema: Any = {"type": "integer"}
    for _ in range(40):
        condition = {"required": ["a", "b"], "properties": {"a": {"const": "x"}}}
        schema = {"if": condition, "then": {"required": ["c"]}, "else": schema}
    found = schema_drafts.enforceable(schema, schema_drafts.LATEST)
    assert len(json.dumps(found)) < 20 * len(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"enum": [1234567890123456789]}, r"beyond 2\^53"),
        ({"const": 2**53 + 1}, r"beyond 2\^53"),
        ({"type": "integer", "minimum": 2**60}, r"beyond 2\^53"),
        ({"type": "integer", "exclusiveMaximum": -(2**63)}, r"beyond 2\^53"),
        ({"properties": {"a": {"items": {"const": [2**70]}}}}, r"beyond 2\^53"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "inclusive bounds"),
        ({"type": "string", "pattern": "^[a&&b]$"}, "ECMA 262"),
        ({"type": "string", "pattern": "(?i)a"}, "ECMA 262"),
        ({"type": "object", "minProperties": 2}, "duplicate keys"),
        ({"const": "\u0001"}, "control character"),
        ({"$schema": "http://example.com/mine"}, "not a known draft"),
    ],
)
def test_what_would_be_enforced_wrongly_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        grammar_of_schema(schema, "schema")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number"}, ["0.25", "-3", "12.5"], ["1" * 16, "0.1234567"]),
        ({"type": "integer"}, ["999999999999999"], ["1" * 16, "1.5"]),
        ({"type": "number", "minimum": 0}, ["5"], ["-1", "9" * 16]),
        (
            {"type": "object", "properties": {"ab": {"type": "integer"}}},
            ['{"ab": 1}'],
            ['{"\\u0061b": "x"}'],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "type": "integer",
                "minimum": 3,
                "exclusiveMinimum": True,
            },
            ["4"],
            ["3"],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "items": [{"type": "integer"}, {"type": "string"}],
                "additionalItems": False,
                "type": "array",
            },
            ['[1, "a"]'],
            ['["a", 1]', '[1, "a", 2]'],
        ),
    ],
)
def test_numbers_end_and_drafts_are_heeded(
    schema: Any, good: list[str], bad: list[str]
) -> None:
    """A number without bounds has fifteen digits at most."""
    matcher = matcher_of(schema)
    assert [text for text in good if not accepts(matcher, text)] == []
    assert [text for text in bad if accepts(matcher, text)] == []


def test_data_is_not_taken_for_schemas() -> None:
    """A constant may look like a schema, and a property like a keyword."""
    schema = {
        "type": "object",
        "properties": {"$ref": {"const": {"minimum": 3}}, "type": {"type": "integer"}},
    }
    found = schema_drafts.enforceable(schema, schema_drafts.LATEST)
    assert found["properties"]["$ref"] == {"const": {"minimum": 3}}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "array"},
        {"type": "object", "properties": {"a": {}}},
        {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
        {"type": ["object", "array"], "items": {"title": "X"}},
        {"anyOf": [{"type": "object"}, {"type": "array"}], "title": "T"},
        {"$ref": "#/$defs/X", "$defs": {"X": {"type": "object"}}},
        {"minItems": 1},
    ],
)
def test_numbers_of_no_named_type_end_too(schema: Any) -> None:
    matcher = matcher_of(schema)
    for text in ('{"a": %s}', '{"b": 1, "c": [%s]}', "[%s]", '[{"d": %s}]'):
        assert not accepts(matcher, text % ("1" * 16)), text
    good = [text % "12.5" for text in ('{"b": 1, "c": [%s]}', '[{"d": %s}]')]
    assert any(accepts(matcher, text) for text in good)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "pattern": '^[^"]*$'}, '"a\\"b"'),
        ({"type": "string", "pattern": "^[^\\\\]$"}, '"\\\\"'),
        ({"type": "string", "pattern": '^[^<>"]+$'}, '"\\""'),
        ({"type": "string", "pattern": "^[^\\u0022]$"}, '"\\""'),
        ({"type": "string", "pattern": "^[^\\[-\\]]$"}, '"\\\\"'),
        ({"type": "string", "not": {"enum": ['"']}}, '"\\""'),
        ({"type": "string", "not": {"enum": ["\\"]}}, '"\\\\"'),
        ({"oneOf": [{"const": '"'}, {"type": "string"}]}, '"\\""'),
        (
            {
                "type": "object",
                "patternProperties": {'^[^"]+$': {"type": "integer"}},
                "additionalProperties": False,
            },
            '{"\\"": 1}',
        ),
        ({"type": "object", "propertyNames": {"pattern": "^[^\\\\]+$"}}, '{"\\\\": 1}'),
        ({"type": "string", "not": {"enum": ["b", "\x7f"]}}, '"b"'),
        ({"type": "string", "not": {"enum": ["b", "\x01"]}}, '"b"'),
        ({"type": "string", "not": {"enum": ["a", "\x7fb"]}}, '"a"'),
        ({"type": "string", "pattern": "^\\x7f[\\s\\S]+$"}, '"ab"'),
        ({"type": "string", "pattern": "^(?:\\x01[\\s\\S]+|b)$"}, '"a"'),
        (
            {
                "type": "array",
                "items": {"$ref": "#/$defs/C", "maxLength": 3},
                "uniqueItems": True,
                "$defs": {"C": {"enum": ["red", "blue"]}},
            },
            '["blue"]',
        ),
        (
            {
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/C", "maxLength": 3},
                "$defs": {"C": {"enum": ["red", "blue"]}},
            },
            '{"blue": 1}',
        ),
        (
            {
                "type": "array",
                "items": {"enum": ["a", "b"], "const": "a"},
                "uniqueItems": True,
            },
            '["b"]',
        ),
        (
            {
                "type": "array",
                "items": {"$ref": "#/$defs/a~1b"},
                "uniqueItems": True,
                "$defs": {"a~1b": {"enum": ["x"]}, "a/b": {"enum": ["y"]}},
            },
            '["x"]',
        ),
        (
            {
                "$defs": {"E": {"enum": ["red"]}},
                "type": "object",
                "properties": {
                    "a": {
                        "$id": "http://x/y",
                        "$defs": {"E": {"enum": ["x"]}},
                        "properties": {
                            "b": {
                                "type": "array",
                                "items": {"$ref": "#/$defs/E"},
                                "uniqueItems": True,
                            }
                        },
                    }
                },
            },
            '{"a": {"b": ["red"]}}',
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "type": "object",
                "properties": {
                    "a": {
                        "id": "http://x/y",
                        "definitions": {"E": {"type": "string"}},
                        "properties": {"b": {"$ref": "#/definitions/E"}},
                    }
                },
                "definitions": {"E": {"type": "integer"}},
            },
            '{"a": {"b": 1}}',
        ),
    ],
)
def test_invalid_text_is_not_accepted(schema: Any, text: str) -> None:
    """Quotes in classes, control characters, and references that resolve elsewhere."""
    try:
        matcher = matcher_of(schema)
    except InvalidRequestError:
        return
    assert not accepts(matcher, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "pattern": '^[^"]*$'}, '"ab\\n"'),
        ({"type": "string", "not": {"enum": ['"']}}, '"x\\""'),
        ({"type": "string", "pattern": "^[^\\s,]+$"}, '"ab"'),
        ({"type": "string", "pattern": "^[\\w.-]+@[a-z]+\\.com$"}, '"a.b@c.com"'),
        ({"type": "object", "errorMessage": {"minProperties": "one"}}, "{}"),
        ({"type": "object", "x-examples": {"oneOf": ["a", "b"]}}, "{}"),
        ({"type": "object", "discriminator": {"mapping": {"not": "#/x"}}}, "{}"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                "if": {"properties": {"a": {"minimum": -1}}, "required": ["a"]},
                "then": {"required": ["b"]},
            },
            '{"a": -2}',
        ),
    ],
)
def test_valid_text_is_accepted(schema: Any, text: str) -> None:
    assert accepts(matcher_of(schema), text)


def nested(count: int, kind: str) -> Any:
    found: Any = {"type": "string"}
    for _ in range(count):
        more = [{"type": "string", "minLength": n + 2} for n in range(7)]
        found = {
            "oneOf": {"oneOf": [{"not": found}, *more]},
            "if": {"if": {"not": found}, "then": {"type": "string"}},
        }[kind]
    return found


def shared(values: list[str], use: Any, count: int) -> Any:
    return {"$defs": {"E": {"enum": values}}, "prefixItems": [use] * count}


UNIQUE = {"type": "array", "items": {"$ref": "#/$defs/E"}, "uniqueItems": True}


@pytest.mark.parametrize(
    "schema",
    [
        nested(8, "oneOf"),
        nested(40, "if"),
        shared([c * 8000 for c in "abcd"], UNIQUE, 40),
        shared(list("abcde"), UNIQUE, 700),
        shared(
            [f"n{n}" for n in range(3000)],
            {"propertyNames": {"$ref": "#/$defs/E"}},
            800,
        ),
    ],
)
def test_rules_that_would_fill_the_memory_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequestError, match="expand to more than"):
        grammar_of_schema(schema, "schema")


atoms_of_classes = st.sampled_from(
    ["a", "b", "-", '"', "\\\\", "\\]", "!-#", "A-~", "\\u0022", "\\x5c", "\\n", "\\d"]
)
classes = st.builds(
    lambda mark, parts, times: f"[{mark}{''.join(parts)}]{times}",
    st.sampled_from(["", "^"]),
    st.lists(atoms_of_classes, min_size=1, max_size=3),
    st.sampled_from(["", "+", "*"]),
)
patterns = st.lists(
    st.one_of(classes, st.sampled_from(["a", "b?", '"', "\\\\", "(?:a|-)", "."])),
    min_size=1,
    max_size=3,
).map(lambda parts: f"^{''.join(parts)}$")
pattern_texts = st.text('ab-"\\]\n!#1', max_size=4)


@settings(max_examples=400, deadline=None)
@given(patterns, st.lists(pattern_texts, min_size=1, max_size=8))
def test_patterns_accept_what_matches(pattern: str, texts: list[str]) -> None:
    """Python's engine judges what matches."""
    schema = {"type": "string", "pattern": pattern}
    try:
        matcher = matcher_of(schema)
    except InvalidRequestError:  # such as ``a--`` in a class
        return
    try:
        judge = re.compile(pattern)
    except re.error:  # such as a range that begins with a set
        return
    for text in texts:
        is_valid = judge.fullmatch(text) is not None
        assert accepts(matcher, json.dumps(text)) == is_valid, text
