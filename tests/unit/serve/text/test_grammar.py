"""Structured output of a model with random logits."""

from __future__ import annotations

import functools
import json
import random
import re
import string
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from multiworld.errors import InvalidRequestError, ModelFailedError
from multiworld.serve.engine.compute.sampler import TokenHistory, sample
from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.spec.stage import Generation
from multiworld.serve.text import grammar as grammars
from multiworld.serve.text import grammar_trial_process
from multiworld.serve.text.grammar import (
    MAX_CHARACTERS,
    Matcher,
    Matchers,
    grammar_of_choice,
    grammar_of_lark,
    grammar_of_regex,
    grammar_of_schema,
)
from multiworld.serve.text.tokenizer import Tokenizer
from multiworld.serve.wire.generation_messages import Sampling
from tests.lines import lines_of
from tests.tiny_decoder import VOCABULARY, save_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "ä", "😀"]}, "maxItems": 3},
    },
    "required": ["color", "count", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer with one token per byte."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def matchers(tokenizer: Tokenizer) -> Matchers:
    return Matchers(
        Generation(
            tokenizer=lambda: tokenizer,
            end_tokens=(0,),
            vocabulary=VOCABULARY,
            max_tokens=1000,
            kv_bytes=[1],
        )
    )


def choose(
    logits: torch.Tensor,
    sampling: Sampling,
    tokens: Sequence[int],
    mask: torch.Tensor,
    ends: Sequence[int] = (0,),
) -> int:
    history = TokenHistory(sampling, tokens, 0, ends)
    (found,) = sample(logits[None].clone(), [history], [mask])
    assert not isinstance(found, ValueError), found
    return found.token


def allows(mask: torch.Tensor, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


def generated(matcher: Matcher, seed: int, count: int = 200) -> list[int]:
    chance = torch.Generator().manual_seed(seed)
    sampling = Sampling(seed=seed, max_tokens=count)
    tokens: list[int] = []
    while len(tokens) < count:
        logits = torch.randn(VOCABULARY, generator=chance)
        allowed = matcher.allowed(tokens)
        token = choose(logits, sampling, tokens, allowed)
        if token == 0:
            return tokens
        tokens.append(token)
    raise AssertionError("it has no end")


@pytest.mark.parametrize("seed", range(12))
def test_text_is_json_of_the_schema(
    matchers: Matchers, tokenizer: Tokenizer, seed: int
) -> None:
    matcher = matchers.begin(grammar_of_schema(SCHEMA, "response_format"))
    found = json.loads(tokenizer.decode(generated(matcher, seed)))
    assert found["color"] in ("red", "green", "blue")
    assert 0 <= found["count"] <= 999
    assert len(found["tags"]) <= 3


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (functools.partial(grammar_of_regex, "[0-9]{4}-[0-9]{2}"), r"\d{4}-\d\d"),
        (
            functools.partial(grammar_of_choice, ["yes", 'no "really"']),
            'yes|no "really"',
        ),
        (functools.partial(grammar_of_lark, 'start: "a" b\nb: /x{1,3}/'), "ax{1,3}"),
    ],
)
def test_text_has_the_structure(
    matchers: Matchers,
    tokenizer: Tokenizer,
    grammar: Callable[[str], str],
    pattern: str,
) -> None:
    for seed in range(5):
        matcher = matchers.begin(grammar("structured_outputs"))
        assert re.fullmatch(pattern, tokenizer.decode(generated(matcher, seed)))


def test_matcher_that_begins_elsewhere_allows_the_same(matchers: Matchers) -> None:
    """A replacement gets the tokens so far; a matcher that was ahead goes back."""
    grammar = grammar_of_schema(SCHEMA, "response_format")
    whole = matchers.begin(grammar)
    tokens = generated(whole, 1)
    whole.truncate(0)
    masks = [whole.allowed(tokens[:count]) for count in range(len(tokens))]
    for count in (0, 3, len(tokens) - 1):
        fresh = matchers.begin(grammar)
        assert torch.equal(fresh.allowed(tokens[:count]), masks[count])
    whole.truncate(2)
    assert torch.equal(whole.allowed(tokens[:2]), masks[2])


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"type": "objct"}}}, "properties.a"),
        ({"type": "object", "properties": {"a": 5}}, "properties.a"),
        ([], "not an object"),
        (True, "not an object"),
        ({"$ref": "#/nowhere"}, "/nowhere"),
        ({"type": "string", "pattern": "(?=x)"}, "look-around"),
        ({"enum": ["x" * MAX_CHARACTERS]}, "longer than"),
        ({"type": "integer", "multipleOf": 10_000_019}, "multipleOf"),
        ({"type": "number", "multipleOf": 7000.3}, "multipleOf"),
        ({"type": "integer", "multipleOf": int("9" * 401)}, "multipleOf"),
        ({"anyOf": [{"multipleOf": 9000 + n} for n in range(3)]}, "multipleOf"),
        ({"allOf": [{"multipleOf": n} for n in (7, 11, 13, 17, 19)]}, "multipleOf"),
        ({"multipleOf": 0.01, "allOf": [{"multipleOf": 701}]}, "multipleOf"),
        ({"$schema": "http://127.0.0.1:9/x", "type": 5}, "not a known draft"),
        ({"type": "number", "multipleOf": True}, ".multipleOf"),
        ({"$ref": "#/%64efault", "default": {"minimum": 2**60}}, "$ref into 'default'"),
    ],
)
def test_invalid_schema_is_refused_with_the_position(schema: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(text)) as found:
        grammar_of_schema(schema, "response_format")
    assert found.value.param == "response_format"


def test_multiples_that_are_small_are_enforced(
    matchers: Matchers, tokenizer: Tokenizer
) -> None:
    schema = {"type": "number", "multipleOf": 0.25, "minimum": 1, "maximum": 2}
    matcher = matchers.begin(grammar_of_schema(schema, "response_format"))
    allowed = matcher.allowed(tokenizer.encode("1.2", has_special=False))
    five, six = (tokenizer.encode(d, has_special=False)[0] for d in "56")
    assert allows(allowed, five)
    assert not allows(allowed, six)


def test_grammar_of_many_sequences_is_compiled_once(
    matchers: Matchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = grammar_of_regex("[a-c]{2,9}", "structured_outputs")
    compiled = []
    make = grammar_trial_process.compiled

    def counted(*args: Any, **options: Any) -> Any:
        compiled.append(args)
        return make(*args, **options)

    monkeypatch.setattr(grammar_trial_process, "compiled", counted)
    first, *others = [matchers.begin(grammar) for _ in range(8)]
    before = first.allowed([])
    tokens = generated(first, 1)
    for other in others:
        assert torch.equal(other.allowed([]), before)
        assert generated(other, 1) == tokens
    assert len(compiled) == 1


def test_grammars_that_are_not_valid_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        grammar_of_regex("a(b", "structured_outputs")
    with pytest.raises(InvalidRequestError, match="foo"):
        grammar_of_lark("start: foo", "structured_outputs")
    for grammar in ('start: %json {"type": "integer"}', ' {"grammars": []}'):
        with pytest.raises(InvalidRequestError, match="JSON schema"):
            grammar_of_lark(grammar, "structured_outputs")
    with pytest.raises(InvalidRequestError, match="non-empty"):
        grammar_of_choice([], "structured_outputs")


def test_deep_schema_is_refused_and_not_unfolded() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(900):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequestError, match=r"nested|longer|deep|limit|large"):
        grammar_of_schema(schema, "response_format")


AMBIGUOUS = 'start: e\ne: e e | e e e | /[a-z]/ | ""'


@pytest.mark.parametrize(
    "grammar",
    [
        AMBIGUOUS,
        "start: start",
        "start: <|nosuch|>",
        "start: <[99999999]>",
        grammar_of_schema({"$ref": "#"}, "x"),
        grammar_of_regex(r"[^\s\S]", "x"),
    ],
)
def test_unsatisfiable_structure_is_a_client_error(
    matchers: Matchers,
    tokenizer: Tokenizer,
    grammar: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not retried, because each attempt delays all sequences of a step."""
    monkeypatch.setattr(
        grammar_trial_process, "MAX_ITEMS", 100
    )  # the vocabulary is small, too
    matcher = matchers.begin(grammar)
    letter = list(tokenizer.encode("a", has_special=False))

    def write() -> None:
        for count in range(60):
            matcher.allowed(letter * count)

    with pytest.raises(InvalidRequestError, match="structured output failed"):
        write()
    with pytest.raises(InvalidRequestError, match="structured output failed"):
        matchers.begin(grammar).allowed([])


@pytest.mark.parametrize(
    "grammar",
    [
        grammar_of_choice(["ab<end>cd"], "x"),
        grammar_of_schema({"const": "ab<end>cd"}, "x"),
        grammar_of_regex("ab<end>cd", "x"),
    ],
)
def test_structure_with_the_text_of_a_control_token_is_that_text(
    matchers: Matchers, tokenizer: Tokenizer, grammar: str
) -> None:
    """The token itself would end the text, or show nothing."""
    text = "ab<end>cd" if "const" not in grammar else '"ab<end>cd"'
    tokens = [tokenizer.encode(one, has_special=False)[0] for one in text]
    matcher = matchers.begin(grammar)
    for count, token in enumerate(tokens):
        allowed = matcher.allowed(tokens[:count])
        found = {n for n in range(300) if allowed[n // 8] >> (n % 8) & 1}
        assert token in found
        assert not found & tokenizer.special


def test_endless_structure_is_a_client_error(
    matchers: Matchers, tokenizer: Tokenizer
) -> None:
    """Each token satisfies the structure, which then needs another one."""
    matcher = matchers.begin('start: "a" start')
    (token,) = tokenizer.encode("a", has_special=False)

    def write() -> None:
        for count in range(20_000):
            matcher.allowed([token] * count)

    with pytest.raises(InvalidRequestError, match="structured output failed"):
        write()


def test_tokens_without_the_structure_fail_by_name(matchers: Matchers) -> None:
    matcher = matchers.begin(grammar_of_regex("[0-9]+", "structured_outputs"))
    with pytest.raises(ModelFailedError, match="structured output failed"):
        matcher.allowed([50, 51, 52])


def test_min_tokens_gives_way_to_a_structure_that_ends() -> None:
    allowed = torch.tensor([1 << 4], dtype=torch.uint8)
    sampling = Sampling(temperature=0.0, min_tokens=9)
    logits = torch.zeros(6)
    assert choose(logits, sampling, [], allowed, (4,)) == 4


TOOLS: list[tuple[str, Any]] = [("f", SCHEMA), ("g", {"type": "object"})]


def accepted(matcher: Matcher, tokenizer: Tokenizer, text: str) -> list[bool]:
    """Check that all of a text is allowed; return after which tokens it may end."""
    tokens: list[int] = []
    may_end: list[bool] = []
    for token in tokenizer.encode(text, has_special=False):
        allowed = matcher.allowed(tokens)
        assert allows(allowed, token), (text, len(tokens))
        may_end.append(allows(allowed, 0))
        tokens.append(token)
    return [*may_end, allows(matcher.allowed(tokens), 0)]


def test_text_may_end_after_each_required_call(
    matchers: Matchers, tokenizer: Tokenizer
) -> None:
    """A small model need not invent more calls."""
    call = '{"name": "g", "parameters": {"a": 1}}'
    text = f"[{call}, {call}]"
    grammar = grammars.grammar_of_calls(TOOLS, is_single=False)
    ends = accepted(matchers.begin(grammar), tokenizer, text)
    assert [n for n, end in enumerate(ends) if end] == [38, 77, 78]
    single = matchers.begin(grammars.grammar_of_calls(TOOLS, is_single=True))
    tokens = tokenizer.encode(f"[{call}", has_special=False)
    after = single.allowed(tokens)
    assert not allows(after, tokenizer.encode(",", has_special=False)[0])


@pytest.mark.parametrize("kind", ["calls", "marked"])
def test_schema_of_a_tool_refers_to_its_own_root(
    matchers: Matchers, tokenizer: Tokenizer, kind: str
) -> None:
    """Pydantic refers to definitions, and a schema may refer to itself."""
    node = {
        "type": "object",
        "properties": {
            "v": {"$ref": "#/$defs/Value"},
            "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "required": ["v"],
        "additionalProperties": False,
        "$defs": {"Value": {"type": "integer"}},
    }
    tools = [("f", node), ("g", {"type": "object", "additionalProperties": False})]
    call = '[{"name": "f", "parameters": {"v": 1, "child": {"v": 2}}}]'
    if kind == "calls":
        grammar = grammars.grammar_of_calls(tools, is_single=False)
        accepted(matchers.begin(grammar), tokenizer, call)
        wrong = '[{"name": "f", "parameters": {"v": 1, "child": {"n'
        tokens = tokenizer.encode(wrong, has_special=False)
        allowed = matchers.begin(grammar).allowed(tokens[:-1])
        assert not allows(allowed, tokens[-1])
    else:
        assert grammars.grammar_of_marked_calls(tools, 1, 2, [0])


def test_answer_is_json_of_a_schema_or_calls(
    matchers: Matchers, tokenizer: Tokenizer
) -> None:
    """The marks are text for this tokenizer."""
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    of = grammars.grammar_of_answer_or_calls
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    marks = "<tool_call>", "</tool_call>"
    marked = of(schema, TOOLS, marks, is_single=False)
    for text in ('{"x": 1}', call, f"{call}\n{call}"):
        assert accepted(matchers.begin(marked), tokenizer, text)[-1]
    with pytest.raises(AssertionError):
        accepted(matchers.begin(marked), tokenizer, f'{{"x": 1}}\n{call}')
    single = of(schema, TOOLS, marks, is_single=True)
    with pytest.raises(AssertionError):
        accepted(matchers.begin(single), tokenizer, f"{call}\n{call}")


@pytest.mark.parametrize("is_begun", [True, False])
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_structure_is_that_of_the_answer_after_any_reasoning(
    tmp_path: Path, special: tuple[str, ...], is_begun: bool
) -> None:
    """A model may leave out reasoning that the prompt did not begin."""
    save_tokenizer(tmp_path, *special)
    thinking = Tokenizer(tmp_path)
    facts = Generation(
        tokenizer=lambda: thinking,
        end_tokens=(0,),
        vocabulary=thinking.fast.get_vocab_size(),
        max_tokens=1000,
        kv_bytes=[1],
    )
    ids = thinking.fast.get_vocab()
    marks = ids.get("<think>", "<think>"), ids.get("</think>", "</think>")
    matchers = Matchers(facts)
    # A client's own grammar may have any names, and refer to its start.
    lark = 'start: "{" (start | answer)? "}"\nanswer: thought\nthought: "x" SPACE\n'
    inner = grammar_of_lark(lark + "SPACE: / /", "structured_outputs")
    whole = grammars.after_reasoning(inner, marks, [0], is_begun=is_begun)
    for text in ('hm {"x" <thi\né</think>\n\n{{x }}', "</think>{}"):
        thought = text if is_begun else f"<think>{text}"
        assert accepted(matchers.begin(whole), thinking, thought)[-1], thought
    if not is_begun:
        assert accepted(matchers.begin(whole), thinking, "{{}}")[-1]
        with pytest.raises(AssertionError):
            accepted(matchers.begin(whole), thinking, "hm")
    thought = "a</think>b" if is_begun else "<think>a</think>b"
    with pytest.raises(AssertionError):
        accepted(matchers.begin(whole), thinking, thought)
    with pytest.raises(AssertionError):  # endless space is no way around it
        accepted(matchers.begin(whole), thinking, f"{thought[:-1]}{' ' * 5}{{}}")
    begun = thinking.encode("a" if is_begun else "<think>a", has_special=False)
    matcher = matchers.begin(whole)
    assert not allows(matcher.allowed(begun), 0) or not special


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"format": "password"}, '"x"'),
        ({"example": {"format": {"x": 1}}}, '"x"'),
        ({"type": "array", "uniqueItems": False}, "[1, 1]"),
        ({"type": "object", "propertyNames": {"type": "string"}}, '{"a": 1}'),
        (
            {"type": "object", "properties": {"format": {"const": {"format": "x"}}}},
            '{"format": {"format": "x"}}',
        ),
    ],
)
def test_keywords_that_require_nothing_are_left_out(
    more: dict[str, Any], text: str, matchers: Matchers, tokenizer: Tokenizer
) -> None:
    """Libraries write them; values and names of properties are no keywords."""
    grammar = grammar_of_schema({"type": "string"} | more, "response_format")
    assert accepted(matchers.begin(grammar), tokenizer, text)[-1]


def test_marked_calls_have_their_schema_and_the_rest_is_free(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "<tool_call>", "</tool_call>")
    marked = Tokenizer(tmp_path)
    vocabulary = marked.fast.get_vocab_size()
    facts = Generation(
        tokenizer=lambda: marked,
        end_tokens=(0,),
        vocabulary=vocabulary,
        max_tokens=1000,
        kv_bytes=[1],
    )
    ids = marked.fast.get_vocab()
    begin, end = ids["<tool_call>"], ids["</tool_call>"]
    grammar = grammars.grammar_of_marked_calls(TOOLS, begin, end, [0])
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    accepted(Matchers(facts).begin(grammar), marked, f"say é {call} and {call}")
    wrong = marked.encode('<tool_call>\n{"name": "h', has_special=False)
    matcher = Matchers(facts).begin(grammar)
    assert not allows(matcher.allowed(wrong[:-1]), wrong[-1])


def test_grammar_of_many_alternatives_is_taken(
    matchers: Matchers, tokenizer: Tokenizer
) -> None:
    lines = " | ".join(f'"a{number}"' for number in range(6000))
    matcher = matchers.begin(grammar_of_lark(f"start: {lines}", "grammar"))
    assert re.fullmatch(r"a\d{1,4}", tokenizer.decode(generated(matcher, 3)))


def test_missing_library_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client cannot fix it."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(grammars.NoStructureError, match="not installed") as found:
        grammar_of_regex("a+", "structured_outputs")
    assert found.value.status == 501
    grammars.import_grammars()


def test_limits_of_a_schema_are_those_of_all_tools_together() -> None:
    """One grammar contains all of them."""
    schemas = [
        {"type": "object", "properties": {"a": {"multipleOf": n}}}
        for n in (1_009, 2_003)
    ]
    tools = [(f"f{number}", schema) for number, schema in enumerate(schemas)]
    for tool in tools:
        assert grammars.grammar_of_calls([tool], is_single=True)
    with pytest.raises(InvalidRequestError, match="multipleOf"):
        grammars.grammar_of_calls(tools, is_single=True)
    long = {"type": "object", "properties": {"x" * (MAX_CHARACTERS - 100): {}}}
    with pytest.raises(InvalidRequestError, match="longer than"):
        grammars.grammar_of_calls([(f"f{n}", long) for n in range(9)], is_single=True)


def test_refusal_does_not_show_our_own_grammar() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        grammar_of_schema({"not": {"pattern": "^a$"}}, "x")
    assert str(refused.value) == '"x" cannot be enforced: Unimplemented keys: ["not"]'
    for length in (81, 1000):  # llguidance allows few levels of nesting
        with pytest.raises(InvalidRequestError, match="Unimplemented keys"):
            grammar_of_schema({"type": "string", "not": {"const": "x" * length}}, "x")
    with pytest.raises(InvalidRequestError, match=r"unclosed group$"):
        grammar_of_regex("(a", "x")


def test_rules_that_expand_to_long_patterns_are_refused() -> None:
    """Each alternative of a ``oneOf`` excludes the values of all others."""

    def words(seed: str) -> dict[str, Any]:
        return {"enum": [(f"{seed}{n:02}" * 80)[:78] for n in range(13)]}

    one = [{"oneOf": [words(f"{n}{k}") for k in range(8)]} for n in range(6)]
    with pytest.raises(InvalidRequestError, match="patterns of more than"):
        grammar_of_schema({"type": "array", "items": {"anyOf": one}}, "x")


@pytest.mark.parametrize("depth", [2, 100])
def test_negation_of_many_required_properties_is_refused(depth: int) -> None:
    """Each level would repeat each of the cases."""
    negated: dict[str, Any] = {"required": [f"p{n}" for n in range(5000)]}
    for _ in range(depth):
        negated = {"properties": {"a": negated}}
    tracemalloc.start()
    with pytest.raises(InvalidRequestError):
        grammar_of_schema({"type": "object", "not": negated}, "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000


def test_bounds_are_compared_in_linear_time() -> None:
    def lines(count: int) -> int:
        parts = [{"exclusiveMinimum": -2 * n - 1} for n in range(count)]
        parts += [{"exclusiveMaximum": 2 * n + 1} for n in range(count)]
        schema = {"anyOf": [{"type": "number", **part} for part in parts]}
        return lines_of(lambda: grammar_of_schema(schema, "x"))

    assert lines(400) < 5 * lines(100)


def test_failure_by_one_tenants_output_is_no_other_tenants(
    matchers: Matchers, tokenizer: Tokenizer
) -> None:
    """Nor does it end a sequence that continues after a loss."""
    letters = string.ascii_lowercase
    ends = "|".join(f"{c}[a-z]{{300}}{ord(c)}" for c in letters)
    grammar = grammar_of_regex(f"[0-9]{{1,4}}|x[a-z]*({ends})", "structured_outputs")
    one, other = Share("one", 1.0), Share("other", 1.0)
    chance = random.Random(1)
    output = "x" + "".join(chance.choice(letters) for _ in range(2500))
    tokens = tokenizer.encode(output, has_special=False)
    with pytest.raises(InvalidRequestError, match="too many"):
        matchers.begin(grammar, one).allowed(tokens)
    with pytest.raises(InvalidRequestError, match="too many"):
        matchers.begin(grammar, one).allowed([])
    matchers.begin(grammar, one, has_output=True).allowed([])
    matchers.begin(grammar, other).allowed([])
