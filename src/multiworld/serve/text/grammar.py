"""Structured output: grammars, and the tokens that they allow next.

llguidance turns a JSON schema, a regular expression or a Lark grammar into a matcher.
The last stage keeps the matcher of each sequence. A replica that takes over a sequence
makes a new matcher, and feeds it the output tokens so far.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from multiworld.errors import (
    InvalidRequestError,
    ModelFailedError,
    ServeError,
    wrong_field,
)
from multiworld.serve.queueing.fair_pool import FairPool
from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.spec.stage import Generation
from multiworld.serve.text import grammar_trial_process, schema_drafts
from multiworld.serve.text.grammar_trial_process import TokenizerData
from multiworld.serve.text.schema_patterns import SchemaError

logger = logging.getLogger("multiworld.serve")

MAX_CHARACTERS = 64 * 1024  # maximum length of a schema or a grammar
MAX_TOOLS = 512 * 1024  # maximum total characters of the schemas of all tools
# Maximum least common multiple of all ``multipleOf`` values of a schema, scaled to
# integers. llguidance builds an automaton with this many states, which its own limits
# do not prevent: 10^6 states take 6 s, 10^7 three minutes.
MAX_MULTIPLES = 5_000
# Number of compiled grammars to keep. All choices of a request, and often all requests
# of an agent, have the same grammar. Copying one takes 10 µs, compiling one at least
# 50 ms.
KEPT_GRAMMARS = 32
KEPT_FAILURES = 256  # grammars to remember as too complex, and not to try again
REASON = re.compile(r"^error: (.+)$", re.MULTILINE)  # why a regular expression failed
PLACE = re.compile(r"^(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?")
MAX_ERROR = 300  # maximum characters to report of an error of llguidance

# Formats that llguidance enforces.
FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
    *("uuid", "uri"),
}
# Pairs of a keyword and a value that do not restrict anything.
NO_RULES: list[tuple[str, Any]] = [
    ("uniqueItems", False),
    ("propertyNames", {"type": "string"}),
]
# Fixes the whitespace in JSON to what Python writes. With free whitespace, small models
# may write whitespace forever.
SPACES: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # Without ``\\u``, because llguidance does not match an escaped key to its schema.
    "json_allowed_escapes": 'nrbtf\\"',
}

ANY_OBJECT: dict[str, Any] = {"type": "object"}

NO_TEXT = "NoExtensionBias"  # llguidance's error if no text completes a grammar

MISSING = (
    "structured output is not available: llguidance or jsonschema-rs is not installed"
)

NO_FORCING = '%llguidance {"no_forcing": true}'  # see ``_unforced``
# Part of llguidance's error about a token that a structure does not allow; all other
# errors are about the structure.
NO_SUCH_TOKEN = "doesn't satisfy the grammar"


Trial = Callable[[str], str | None]
"""Function that returns why a grammar cannot be enforced; None if it can."""


class NoStructureError(ServeError):
    """The packages for structured output are not installed on this server."""

    status = 501


def import_grammars() -> None:
    """Import optional dependencies early, so that no request waits for the import."""
    for name in ("llguidance", "jsonschema_rs"):
        try:
            importlib.import_module(name)
        except ImportError:
            logger.info("%s is not installed: structured output is not available", name)


def arguments_of(tokenizer: Any, model: Generation) -> TokenizerData:
    """Return the data from which llguidance builds its tokenizer."""
    text = text_of_tokenizer(tokenizer, model.vocabulary)
    return TokenizerData(text, model.vocabulary, list(model.end_tokens))


def text_of_tokenizer(tokenizer: Any, vocabulary: int) -> str:
    """Return a tokenizer as JSON, without added tokens that the model does not have."""
    text: str = tokenizer.to_str()
    if tokenizer.get_vocab_size() <= vocabulary:
        return text
    found = json.loads(text)
    added = found.get("added_tokens", [])
    found["added_tokens"] = [each for each in added if each["id"] < vocabulary]
    return json.dumps(found)


# Clients' grammars need a ``trial`` in another process (``GrammarTrials.why_not``).


def grammar_of_schema(schema: Any, param: str, trial: Trial | None = None) -> str:
    """Return a grammar of the JSON that a schema allows; ``param`` is for errors."""
    schema = _checked_schema(schema, param)
    try:
        grammar = _matcher().grammar_from_json_schema(
            json.dumps(schema), overrides=SPACES
        )
    except ValueError as error:
        raise wrong_field(param, f"cannot be enforced: {_short(error)}") from None
    return _checked(grammar, param, trial)


def _checked_schema(schema: Any, param: str) -> Any:
    """Check a schema without compiling it; return the schema to enforce."""
    if not isinstance(schema, dict):
        raise wrong_field(param, "is not an object")
    _matcher()
    try:
        _check_length(json.dumps(schema), param)
    except RecursionError:
        raise wrong_field(param, "is nested too deeply") from None
    _check_multiples(schema, param)
    try:
        from jsonschema_rs import ValidationError
    except ImportError as error:
        raise NoStructureError(MISSING) from error
    try:
        draft = schema_drafts.draft_of(schema)
        _schemas(draft).validate(schema)
        found = schema_drafts.enforceable(schema, draft)
        return schema_drafts.mapped(found, _without_idle)
    except SchemaError as error:
        raise wrong_field(param, str(error)) from None
    except ValidationError as error:
        names = ("[%d]" if type(n) is int else ".%s" for n in error.instance_path)
        place = "".join(names) % tuple(error.instance_path) or "it"
        why = _short(error.message)
        raise wrong_field(param, f"is not a JSON schema: {place}: {why}") from None
    except (AttributeError, TypeError):
        raise wrong_field(
            param, "has a keyword with a value of the wrong type"
        ) from None
    except (ValueError, RecursionError):
        raise wrong_field(param, "is nested too deeply") from None


def _without_idle(node: dict[str, Any]) -> dict[str, Any]:
    """Drop keywords without effect, because llguidance would refuse the schema."""
    # An unknown ``format`` has no effect: JSON Schema treats it as an annotation.
    return {
        name: value
        for name, value in node.items()
        if (name, value) not in NO_RULES
        and not (name == "format" and isinstance(value, str) and value not in FORMATS)
    }


def grammar_of_regex(regex: str, param: str, trial: Trial | None = None) -> str:
    """Return a grammar of a regular expression, which must not have look-around."""
    matcher = _matcher()
    _check_length(regex, param)
    return _checked(matcher.grammar_from_regex(regex), param, trial)


def grammar_of_lark(grammar: str, param: str, trial: Trial | None = None) -> str:
    """Return a grammar given in Lark's syntax, without embedded JSON schemas."""
    matcher = _matcher()
    _check_length(grammar, param)
    if "%json" in grammar or grammar.lstrip().startswith("{"):
        raise wrong_field(param, 'has a JSON schema; give that as "json"')
    return _checked(matcher.grammar_from_lark(grammar), param, trial)


def grammar_of_choice(
    choices: Sequence[str], param: str, trial: Trial | None = None
) -> str:
    """Return a grammar that accepts exactly one of ``choices``."""
    if not choices or not all(choices):
        raise wrong_field(param, "must be a list of non-empty strings")
    lines = " | ".join(json.dumps(choice) for choice in choices)
    return grammar_of_lark(f"start: {lines}", param, trial)


def grammar_of_calls(
    tools: Sequence[tuple[str, Any]], *, is_single: bool, trial: Trial | None = None
) -> str:
    """Return a grammar of a JSON list of tool calls."""
    more = "" if is_single else '(", " call)* '
    # The closing bracket is optional: a small model may end the output after any call
    # instead of inventing more calls.
    forms = _forms_of(tools, "parameters")
    text = f'start: "[" call {more}"]"?\ncall: {forms}\n'
    return _checked(_matcher().grammar_from_lark(text), "tools", trial)


def grammar_of_marked_calls(
    tools: Sequence[tuple[str, Any]],
    begin: int,
    end: int,
    ends: Sequence[int],
    trial: Trial | None = None,
) -> str:
    """Return a grammar of free text with tool calls, each between two tokens."""
    others = ",".join(map(str, sorted({begin, *ends})))
    forms = _forms_of(tools, "arguments")
    text = (
        f"start: free (call free)*\nfree: (<[^{others}]>)*\n"
        f'call: <[{begin}]> "\\n" inside "\\n" <[{end}]>\ninside: {forms}\n'
    )
    return _checked(_matcher().grammar_from_lark(text), "tools", trial)


def grammar_of_answer_or_calls(
    schema: Any,
    tools: Sequence[tuple[str, Any]],
    marks: tuple[int | str, int | str],
    *,
    is_single: bool,
    trial: Trial | None = None,
) -> str:
    """Return a grammar of either a schema's JSON, or tool calls between two marks."""
    schema = _checked_schema(schema, "response_format")
    _check_multiples([schema, *(each for _, each in tools)], "tools")
    begin, end = map(_mark, marks)
    more = "" if is_single else ' ("\\n" call)*'
    text = (
        f"start: answer | call{more}\n"
        f"answer: %json {json.dumps({'x-guidance': SPACES, **schema})}\n"
        f'call: {begin} "\\n" inside "\\n" {end}\n'
        f"inside: {_forms_of(tools, 'arguments')}\n"
    )
    return _checked(_matcher().grammar_from_lark(text), "tools", trial)


def after_reasoning(
    grammar: str,
    marks: tuple[int | str, int | str],  # each is a token or a string
    ends: Sequence[int],  # tokens that end the output
    *,
    # Whether the prompt has the first mark; otherwise, the reasoning is optional.
    is_begun: bool,
) -> str:
    """Return a grammar of reasoning between two marks, followed by ``grammar``."""
    begin, end = map(_mark, marks)
    if isinstance(marks[1], str):
        free = f"thought[stop={end}]: /(?s:.*)/"
    else:
        others = ",".join(map(str, sorted({marks[1], *ends})))
        free = f"thought: (<[^{others}]>)* {end}"
    lines = (
        NO_FORCING,
        "start: whole" if is_begun else f"start: @answer | {begin} whole",
        "whole: thought SPACE @answer",
        free,
        r"SPACE: /\s{0,4}/",  # bounded, or a model might write spaces forever
    )
    parts = [
        {"lark_grammar": "\n".join(lines)},
        {"name": "answer", "lark_grammar": grammar},
    ]
    return json.dumps({"grammars": parts})


def _forms_of(tools: Sequence[tuple[str, Any]], key: str) -> str:
    """Return the right-hand side of a rule that allows a call of any tool, as JSON."""
    # Limits also apply to all schemas together, because one grammar has all of them.
    schemas = [parameters for _, parameters in tools]
    _check_length(json.dumps(schemas), "tools", MAX_TOOLS)
    _check_multiples(schemas, "tools")
    # These checks do not compile; ``_checked`` compiles all schemas together.
    enforced = [(name, _checked_schema(each, "tools")) for name, each in tools]
    # Each schema is embedded separately, so its references (``#/$defs/…``) still start
    # at its own root.
    return "\n    | ".join(
        f'"{{\\"name\\": {_quoted(name)}, \\"{key}\\": " '
        f"%json {json.dumps({'x-guidance': SPACES, **parameters})} "
        '"}"'
        for name, parameters in enforced
    )


def _mark(mark: int | str) -> str:
    """Return a token or a string in Lark's syntax."""
    return json.dumps(mark) if isinstance(mark, str) else f"<[{mark}]>"


def _quoted(name: str) -> str:
    """Return a name as JSON inside a Lark string."""
    return json.dumps(json.dumps(name))[1:-1]


def _are_few_multiples(schema: Any) -> bool:
    """Return whether the least common multiple of all ``multipleOf`` is small."""
    # ``allOf`` or ``$ref`` may apply several of them to the same number.
    scale = multiple = 1
    for part in schema_drafts.parts_of(schema):
        if isinstance(part, dict):
            given = part.get("multipleOf")
            is_number = isinstance(given, int | float) and not isinstance(given, bool)
            if is_number and given and (isinstance(given, int) or math.isfinite(given)):
                each = Fraction(str(given))
                factor = math.lcm(scale, each.denominator) // scale
                scale, multiple = scale * factor, multiple * factor
                multiple = math.lcm(multiple, int(each * scale))
                if multiple > MAX_MULTIPLES:
                    return False
    return True


@functools.cache
def _schemas(draft: str) -> Any:
    import jsonschema_rs

    kinds = {
        "4": jsonschema_rs.Draft4Validator,
        "6": jsonschema_rs.Draft6Validator,
        "7": jsonschema_rs.Draft7Validator,
        "2019-09": jsonschema_rs.Draft201909Validator,
        schema_drafts.LATEST: jsonschema_rs.Draft202012Validator,
    }
    place = next(n for n, known in schema_drafts.DRAFTS.items() if known == draft)
    is_old = draft in schema_drafts.BEFORE_2019
    # Name a metaschema that the library contains, so that the library fetches none.
    uri = f"http://{place}#" if is_old else f"https://{place}"
    return kinds[draft]({"$ref": uri})


def _matcher() -> Any:
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise NoStructureError(MISSING) from error
    return LLMatcher


def _checked(grammar: str, param: str, trial: Trial | None) -> str:
    grammar = _unforced(grammar)
    why = (trial or _matcher().validate_grammar)(grammar)
    if why and not why.startswith("WARNING"):
        raise wrong_field(param, f"cannot be enforced: {_short(why)}")
    return grammar


def _unforced(grammar: str) -> str:
    """Return a grammar that allows every token that fits.

    By default, where only one string can follow, llguidance allows only the first token
    of the string's encoding. If the string spells a control token, that is the control
    token.
    """
    if grammar.startswith("{"):
        (part,) = json.loads(grammar)["grammars"]
        if (schema := part["json_schema"]) is not None:
            grammar = f"start: %json {json.dumps(schema)}"
        else:
            grammar = part["lark_grammar"]
    return f"{NO_FORCING}\n{grammar}"


def _short(why: object) -> str:
    # Drop llguidance's copy of the grammar, and positions in the grammar.
    whole = str(why).partition("<non-verbose/>")[0]
    text = PLACE.sub("", whole.partition("\n")[0]).strip()
    if reason := REASON.search(whole):
        text = f"{text.rstrip(':')}: {reason[1]}"
    if text == NO_TEXT:
        return "no output satisfies this structure"
    if text.startswith("panic"):
        return "it is too complex"
    return text if len(text) <= MAX_ERROR else text[:MAX_ERROR] + " …"


def _check_multiples(schema: Any, param: str) -> None:
    if not _are_few_multiples(schema):
        rule = (
            f"has multipleOf values whose least common multiple exceeds {MAX_MULTIPLES}"
        )
        raise wrong_field(param, rule)


def _check_length(text: str, param: str, limit: int = MAX_CHARACTERS) -> None:
    if len(text) > limit:
        raise wrong_field(param, f"is longer than {limit} characters")


class Matchers:
    """Makes matchers for one model; its tokenizer must have the attribute ``fast``."""

    def __init__(self, model: Generation) -> None:
        self._model = model
        # llguidance compiles without the GIL, in parallel to other sequences' steps.
        self._pool = FairPool("multiworld grammar")
        self._tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        # By tenant and grammar: an output of one tenant may fail where others do not.
        self._failures: OrderedDict[tuple[str, str], str] = OrderedDict()

    def begin(
        self, grammar: str, share: Share = DEFAULT_SHARE, *, has_output: bool = False
    ) -> Matcher:
        """Start to compile a grammar that a function of this module returned.

        ``has_output``: the sequence continues, so it is tried whatever failed before.
        """
        call = functools.partial(self._made, grammar, share.tenant, has_output)
        made = self._pool.submit(share, float(len(grammar)), call)
        failed = functools.partial(self._failed, grammar, share.tenant)
        return Matcher(made, failed)

    def _failed(self, grammar: str, tenant: str, why: str) -> None:
        """Remember a failed grammar, because a new try would delay all sequences."""
        self._failures[tenant, grammar] = why
        self._compiled.pop(grammar, None)  # frees the grammar's states
        while len(self._failures) > KEPT_FAILURES:
            self._failures.popitem(last=False)

    def _made(self, grammar: str, tenant: str, has_output: bool) -> Any:
        why = self._failures.get((tenant, grammar))
        if why is not None and not has_output:
            raise InvalidRequestError(why, code="invalid_value")
        compiled = self._compiled.pop(grammar, None) or self._compile(grammar)
        self._compiled[grammar] = compiled
        while len(self._compiled) > KEPT_GRAMMARS:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def _compile(self, grammar: str) -> Any:
        if self._tokenizer is None:
            made_of = arguments_of(self._model.tokenizer().fast, self._model)
            self._tokenizer = grammar_trial_process.tokenizer_of(made_of)
        return grammar_trial_process.compiled(self._tokenizer, grammar)


class Matcher:
    """Enforces one sequence's structure; does not block once ``made`` is done."""

    def __init__(self, made: Future[Any], failed: Callable[[str], None]) -> None:
        self.made, self._failed = made, failed
        self._consumed = 0

    def truncate(self, count: int) -> None:
        """Go back to the first ``count`` output tokens."""
        if count < self._consumed:
            self.made.result().reset()
            self._consumed = 0

    def allowed(self, tokens: Sequence[int], prompt: int = 0) -> Tensor:
        """Return the tokens that may come next, as bits: [vocabulary / 8], uint8."""
        matcher = self.made.result()
        # The matcher has already consumed the earlier tokens.
        for place in range(prompt + self._consumed, len(tokens)):
            if not matcher.consume_token(tokens[place]):
                if NO_SUCH_TOKEN not in matcher.get_error():
                    self._check(matcher)
                why = _short(matcher.get_error())
                raise ModelFailedError(f"structured output failed: {why}")
            self._consumed += 1
        found = torch.frombuffer(
            bytearray(matcher.compute_bitmask()), dtype=torch.uint8
        )
        self._check(matcher)
        if not bool(found.any()):
            raise ModelFailedError("structured output allows no further token")
        return found

    def _check(self, matcher: Any) -> None:
        if matcher.is_error():
            why = f"structured output failed: {_short(matcher.get_error())}"
            self._failed(why)
            raise InvalidRequestError(why, code="invalid_value")
