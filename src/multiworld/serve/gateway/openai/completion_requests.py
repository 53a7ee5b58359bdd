"""Parsed parameters of requests for chat and text completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from multiworld.errors import InvalidRequestError, wrong_field
from multiworld.serve.gateway.openai.chat_messages import for_template
from multiworld.serve.gateway.openai.request_fields import (
    CHAT,
    COMPLETION,
    EFFORTS,
    MAX_KEY,
    MAX_METADATA,
    MAX_SESSION,
    MAX_STOP,
    MAX_STOPS,
    MAX_VALUE,
    RANGES,
    ChatBody,
    CompletionBody,
    ResponseFormat,
    StructuredOutputs,
    check_supported,
    decoded_with_ignored,
)
from multiworld.serve.gateway.openai.tool_calls import Calling, calling_of
from multiworld.serve.text import grammar as grammars
from multiworld.serve.wire.generation_messages import Sampling

MAX_PROMPTS = 2048
MAX_STOP_TOKENS = 1024  # maximum number of tokens that may end a completion
MAX_BIASES = 1024
# Lower temperatures count as 0, as in vLLM, because logits / temperature may overflow.
GREEDY = 1e-5
DEFAULT_TOKENS = 16  # ``max_tokens`` of a text completion, as in OpenAI's API
# Fields whose default is in the model's ``generation_config.json``.
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# Function that returns the grammar of an answer, after passing the grammar to ``trial``
# (``grammars.Trial``). A call may take a second.
Structure = Callable[..., str]

# Functions that make a grammar, by field of ``structured_outputs``.
MAKERS: dict[str, Callable[[Any, str], str]] = {
    "json": grammars.grammar_of_schema,
    "regex": grammars.grammar_of_regex,
    "choice": grammars.grammar_of_choice,
    "grammar": grammars.grammar_of_lark,
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parameters of a request, without the prompts."""

    model: str
    sampling: Sampling  # ``max_tokens`` is 0 if the request gives none
    n: int  # choices per prompt
    stop: tuple[str, ...]
    is_streamed: bool
    has_usage: bool  # a streamed answer ends with its usage
    has_usage_so_far: bool  # with ``has_usage``: each chunk has the usage so far
    skips_special: bool
    echo: bool = False  # the answer begins with the prompt
    is_prompt_only: bool = False  # the answer has no output, but one token is computed
    timeout_s: float | None = None  # to the deadline; None: the model's default
    # Seconds for which a stream without a client is kept; None: the default.
    detach_s: float | None = None
    has_ids: bool = False  # the answer includes token ids
    structure: Structure | None = None
    # JSON schema that the structure follows; None: it follows none, or there is no
    # structure.
    schema: Any = None
    calling: Calling | None = None
    has_reasoning: bool = True  # the answer includes the reasoning
    session: str = ""  # requests of a tenant's session prefer the same replicas
    ignored: tuple[str, ...] = ()  # unknown fields of the request
    given: frozenset[str] = frozenset()  # fields of ``DEFAULTED`` that the request sets
    has_seed: bool = False  # False: the gateway draws a seed


def chat_of(
    body: bytes | bytearray, *, is_strict: bool = True
) -> tuple[ChatBody, Wanted]:
    """Parse a request for a chat completion; convert its messages for templates."""
    asked, ignored = decoded_with_ignored(body, CHAT, is_strict=is_strict)
    if not asked.messages:
        raise wrong_field("messages", "must contain at least one message")
    messages = for_template(asked.messages)
    asked = msgspec.structs.replace(asked, messages=messages)
    tokens = asked.max_tokens
    if asked.max_completion_tokens is not None:
        tokens = asked.max_completion_tokens
    if asked.reasoning_effort not in (None, *EFFORTS):
        raise wrong_field("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
    logprobs = None
    if asked.logprobs:
        logprobs = _between("top_logprobs", asked.top_logprobs, 0)
    elif asked.top_logprobs:
        raise wrong_field("top_logprobs", "needs logprobs: true")
    wanted = _with_tools(asked, _wanted(asked, tokens, logprobs))
    has_reasoning = asked.include_reasoning is not False
    return asked, replace(wanted, has_reasoning=has_reasoning, ignored=ignored)


def _with_tools(asked: ChatBody, wanted: Wanted) -> Wanted:
    calling = calling_of(asked.tools, asked.tool_choice)
    if calling is None:
        return wanted
    calling = replace(calling, is_single=asked.parallel_tool_calls is False)
    structure = wanted.structure
    if not calling.is_free:
        if asked.structured_outputs is not None or asked.ignore_eos:
            rule = "cannot be given with structured_outputs or with ignore_eos"
            raise wrong_field("tool_choice", rule)
        # As in OpenAI's API, ``response_format`` applies to text, not to forced calls.
        if calling.named:
            named = calling.named_parameters
            structure = partial(grammars.grammar_of_schema, named, "tools")
        else:
            forms, is_single = calling.forms(), calling.is_single
            structure = partial(grammars.grammar_of_calls, forms, is_single=is_single)
    return replace(wanted, calling=calling, structure=structure)


def completion_of(
    body: bytes | bytearray, *, is_strict: bool = True
) -> tuple[CompletionBody, Wanted]:
    asked, ignored = decoded_with_ignored(body, COMPLETION, is_strict=is_strict)
    return asked, replace(wanted_of(asked), ignored=ignored)


def wanted_of(asked: CompletionBody) -> Wanted:
    logprobs = asked.logprobs
    if logprobs is not None:
        logprobs = int(_between("logprobs", logprobs, 0))
    if asked.best_of == (asked.n or 1):
        asked = msgspec.structs.replace(asked, best_of=None)
    tokens = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
    is_prompt_only = bool(asked.echo) and asked.max_tokens == 0
    wanted = _wanted(asked, 1 if is_prompt_only else tokens, logprobs)
    if asked.echo:
        if logprobs is not None and wanted.is_streamed:
            raise wrong_field("echo", "with logprobs cannot be streamed")
        sampling = msgspec.structs.replace(wanted.sampling, prompt_logprobs=logprobs)
        wanted = replace(
            wanted, sampling=sampling, echo=True, is_prompt_only=is_prompt_only
        )
    return wanted


def prompts_of(prompt: Any) -> list[str] | list[list[int]]:
    """Return the prompts of a text completion: all strings, or all token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(type(one) is int for one in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise wrong_field("prompt", f"has more than {MAX_PROMPTS} prompts; split it")
    if prompt and all(isinstance(one, str) for one in prompt):
        return list(prompt)
    is_lists = prompt and all(isinstance(one, list) and one for one in prompt)
    if is_lists and all(type(t) is int for one in prompt for t in one):
        return [list(one) for one in prompt]
    raise wrong_field("prompt", "must be a string, token ids, or a list of either")


def _wanted(asked: Any, max_tokens: int | None, logprobs: int | None) -> Wanted:
    def number(name: str, default: float) -> Any:
        return _between(name, getattr(asked, name), default)

    check_supported(asked)
    _check_metadata(asked.metadata)
    n = number("n", 1)
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    is_long = any(len(one) > MAX_STOP for one in stop)
    if len(stop) > MAX_STOPS or not all(stop) or is_long:
        raise wrong_field(
            "stop", f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP} characters"
        )
    is_new = getattr(asked, "max_completion_tokens", None) is not None
    limit = "max_completion_tokens" if is_new else "max_tokens"
    temperature = number("temperature", 1.0)
    sampling = Sampling(
        temperature=temperature if temperature >= GREEDY else 0.0,
        top_p=number("top_p", 1.0),
        top_k=max(0, number("top_k", 0)),
        min_p=number("min_p", 0.0),
        seed=0 if asked.seed is None else asked.seed % 2**63,
        presence_penalty=number("presence_penalty", 0.0),
        frequency_penalty=number("frequency_penalty", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
        logit_bias=_biases(asked.logit_bias),
        stop_token_ids=_stop_tokens(asked.stop_token_ids or []),
        min_tokens=number("min_tokens", 0),
        max_tokens=int(_between(limit, max_tokens, 0)),
        ignore_eos=bool(asked.ignore_eos),
        logprobs=None if logprobs is None else int(logprobs),
    )
    structure, schema = structure_of(asked.response_format, asked.structured_outputs)
    if asked.ignore_eos and structure is not None:
        rule = (
            "cannot be combined with structured output, which decides when the answer "
            "ends"
        )
        raise wrong_field("ignore_eos", rule)
    options = asked.stream_options
    if options is not None and options.include_obfuscation:
        rule = "with include_obfuscation is not supported"
        raise wrong_field("stream_options", rule, "unsupported_value")
    if options is not None and not asked.stream:
        raise wrong_field("stream_options", "needs stream: true")
    if asked.detach_s is not None and not asked.stream:
        raise wrong_field("detach_s", "needs stream: true")
    session = asked.prompt_cache_key or ""
    if len(session) > MAX_SESSION:
        raise wrong_field("prompt_cache_key", f"has more than {MAX_SESSION} characters")
    return Wanted(
        model=asked.model,
        sampling=sampling,
        n=n,
        stop=tuple(stop),
        is_streamed=bool(asked.stream),
        has_usage=options is not None and bool(options.include_usage),
        has_usage_so_far=options is not None and bool(options.continuous_usage_stats),
        skips_special=asked.skip_special_tokens is not False,
        timeout_s=asked.timeout_s,
        detach_s=asked.detach_s,
        has_ids=bool(asked.return_token_ids),
        structure=structure,
        schema=schema,
        session=session,
        given=frozenset(n for n in DEFAULTED if getattr(asked, n) is not None),
        has_seed=asked.seed is not None,
    )


def structure_of(
    form: ResponseFormat | None, outputs: StructuredOutputs | None
) -> tuple[Structure | None, Any]:
    """Return the structure that a request requires, and its schema; None if absent."""
    found: list[tuple[Structure, Any]] = []
    of_schema, param = grammars.grammar_of_schema, "response_format"
    if form is not None and form.type != "text":
        schema: Any = grammars.ANY_OBJECT
        if form.type == "json_schema":
            schema = None if form.json_schema is None else form.json_schema.schema
        if schema is None:
            raise wrong_field(param, "needs json_schema with a schema")
        found.append((partial(of_schema, schema, param), schema))
    if outputs is not None:
        fields, param = msgspec.structs.asdict(outputs), "structured_outputs"
        if fields.pop("json_object"):
            fields["json"] = grammars.ANY_OBJECT
        given = {kind: value for kind, value in fields.items() if value is not None}
        if len(given) != 1:
            rule = "must have exactly one of json, regex, choice, grammar, json_object"
            raise wrong_field(param, rule)
        kind, value = given.popitem()
        found.append((partial(MAKERS[kind], value, param), fields["json"]))
    if len(found) > 1:
        raise wrong_field("structured_outputs", "cannot be given with response_format")
    return found[0] if found else (None, None)


def _check_metadata(given: dict[str, str] | None) -> None:
    """Refuse metadata beyond OpenAI's limits; metadata has no other effect."""
    found = given or {}
    is_long = any(len(k) > MAX_KEY or len(v) > MAX_VALUE for k, v in found.items())
    if len(found) > MAX_METADATA or is_long:
        rule = f"must be at most {MAX_METADATA} pairs of names of {MAX_KEY} characters "
        raise wrong_field("metadata", rule + f"and values of {MAX_VALUE}")


def _stop_tokens(given: list[int]) -> tuple[int, ...]:
    found = tuple(dict.fromkeys(given))
    if len(found) > MAX_STOP_TOKENS:
        raise wrong_field("stop_token_ids", f"has more than {MAX_STOP_TOKENS} tokens")
    return found


def _biases(given: dict[str, float] | None) -> dict[int, float]:
    found = given or {}
    if len(found) > MAX_BIASES:
        raise wrong_field("logit_bias", f"has more than {MAX_BIASES} tokens")
    for token, bias in found.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise wrong_field("logit_bias", "must have token ids as keys")
        _between("logit_bias", bias, 0.0)
    return {int(token): bias for token, bias in found.items()}


def _between(name: str, value: float | None, default: float) -> Any:
    if value is None:
        return default
    low, high = RANGES[name]
    if not low <= value <= high:
        raise wrong_field(name, f"must be from {low} to {high}, not {value}")
    return value


def check_fits(
    prompt: int, wanted: Sampling, longest: int, vocabulary: int, param: str
) -> Sampling:
    """Check that a sequence fits; return its sampling with ``max_tokens`` set."""
    if not prompt:
        raise wrong_field(param, "must contain at least one token")
    room = longest - prompt
    if room < max(1, wanted.max_tokens):
        raise InvalidRequestError(
            # The text begins with OpenAI's wording, which some front ends look for.
            f"This model's maximum context length is {longest} tokens. However, the "
            f"prompt has {prompt} and the answer may have {max(1, wanted.max_tokens)}; "
            "shorten the prompt, or lower max_tokens",
            param=param,
            code="context_length_exceeded",
        )
    named = {*wanted.logit_bias, *wanted.stop_token_ids}
    for token in named:
        if not 0 <= token < vocabulary:
            name = "logit_bias" if token in wanted.logit_bias else "stop_token_ids"
            raise wrong_field(
                name, f"has token {token}; tokens are from 0 to {vocabulary - 1}"
            )
    if wanted.min_tokens > (wanted.max_tokens or room):
        raise wrong_field("min_tokens", "is more than max_tokens")
    if wanted.max_tokens:
        return wanted
    return msgspec.structs.replace(wanted, max_tokens=room)
