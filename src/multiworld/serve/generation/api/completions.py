"""Requests for chat and text completions, as in OpenAI's API.

Fields that vLLM adds are supported as well. Unknown or unsupported fields are refused
by name.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from multiworld.errors import InvalidRequestError
from multiworld.serve.gateway.json_limits import NOT_JSON, check_values
from multiworld.serve.generation.api.chat_messages import for_template
from multiworld.serve.generation.api.tools import Calling, NamedTool, Tool, calling_of
from multiworld.serve.generation.grammar import (
    grammar_of_calls,
    grammar_of_choice,
    grammar_of_lark,
    grammar_of_marked_calls,
    grammar_of_regex,
    grammar_of_schema,
)
from multiworld.serve.transport.generation_messages import Sampling

MAX_CHOICES = 64
"""Maximum number of choices of one request, over all of its prompts."""

MAX_PROMPTS = 2048

MAX_STOPS = 16
"""Maximum number of stop strings."""

MAX_STOP_TOKENS = 1024
"""Maximum number of tokens that end a completion."""

MAX_STOP = 256
"""Maximum number of characters of a stop string; each token is searched for them."""

MAX_BIASES = 1024

GREEDY = 1e-5
"""Temperature below which the most likely token is taken, as in vLLM: the quotient
would overflow."""

MAX_LOGPROBS = 20
"""Maximum number of alternatives reported with each token."""

DEFAULT_TOKENS = 16
"""Output tokens of a text completion that gives no number, as in OpenAI's API."""


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema, in the form of OpenAI's API."""

    name: str
    schema: Any = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The structure of an answer, as vLLM names it; exactly one field is given."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class _Common(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    priority: Any = None
    length_penalty: Any = None
    use_beam_search: Any = None
    include_stop_str_in_output: Any = None
    spaces_between_special_tokens: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    timeout_s: float | None = None


class ChatBody(_Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    add_generation_prompt: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    best_of: Any = None
    include_reasoning: Any = None
    continue_final_message: Any = None
    documents: Any = None
    echo: Any = None
    add_special_tokens: Any = None
    parallel_tool_calls: bool | None = None
    service_tier: Any = None
    web_search_options: Any = None


class CompletionBody(_Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[Any] = "<|endoftext|>"
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


_chat = msgspec.json.Decoder(ChatBody)
_completion = msgspec.json.Decoder(CompletionBody)

UNSUPPORTED = (
    "chat_template",  # a client's template could run forever
    *("functions", "function_call", "modalities"),
    *("audio", "prediction", "web_search_options", "suffix"),
    *("store", "service_tier", "verbosity", "moderation", "prompt_cache_options"),
    *("prompt_cache_retention", "best_of", "priority", "length_penalty"),
    *("use_beam_search", "include_reasoning", "include_stop_str_in_output"),
    *("spaces_between_special_tokens", "continue_final_message", "bad_words"),
    *("documents", "allowed_token_ids", "truncate_prompt_tokens"),
)
"""Fields of OpenAI's API and of vLLM's that are not supported."""

NOTHING: dict[str, Any] = {
    "verbosity": "medium",
    "best_of": 1,
    "priority": 0,
    "length_penalty": 1.0,
    "include_reasoning": True,
    "spaces_between_special_tokens": True,
    "echo": False,
    "add_special_tokens": False,
}
"""Values of some of them that request nothing, besides ``DEFAULTS``."""

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Maximum pairs of ``metadata``, and characters of names and values, as in OpenAI's."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

DEFAULTS: tuple[Any, ...] = (
    *(None, False, [], {}, "", "auto", "default"),
    *(["text"], {"type": "text"}),
)
"""Values of unsupported fields that request nothing."""

MAX_SESSION = 256
"""Maximum number of characters of the name of a session."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The required structure of an answer, not checked yet.

    ``kind`` selects the function that makes the grammar from ``value``; ``param`` is
    the field of the request that has it.
    """

    kind: str
    value: Any
    param: str

    def grammar(self) -> str:
        """Check the structure and return its grammar; this may take a second."""
        makers: dict[str, Callable[[Any, str], str]] = {
            "json": grammar_of_schema,
            "regex": grammar_of_regex,
            "choice": grammar_of_choice,
            "grammar": grammar_of_lark,
            "calls": _grammar_of_calls,
            "marked calls": _grammar_of_marked_calls,
        }
        return makers[self.kind](self.value, self.param)


def _grammar_of_calls(calling: Calling, param: str) -> str:
    return grammar_of_calls(calling.forms(), is_single=calling.is_single)


def _grammar_of_marked_calls(
    given: tuple[list[tuple[str, Any]], int, int, tuple[int, ...]], param: str
) -> str:
    return grammar_of_marked_calls(*given)


DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields whose default is in the model's ``generation_config.json``."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request without its prompts.

    Attributes:
        sampling: ``max_tokens`` is 0 if the request gives none.
        n: Number of choices per prompt.
        has_usage: Whether a streamed answer ends with the usage.
        echo: Whether the answer begins with the prompt.
        is_prompt_only: The answer is only the prompt; one token is computed all the
            same.
        timeout_s: Seconds until the deadline; None: the model's default.
        has_ids: Whether the answer includes the token ids.
        session: Requests of a tenant with the same session prefer the same replicas.
        given: Fields of ``DEFAULTED`` that the request gives.
    """

    model: str
    sampling: Sampling
    n: int
    stop: tuple[str, ...]
    is_streamed: bool
    has_usage: bool
    skips_special: bool
    echo: bool = False
    is_prompt_only: bool = False
    timeout_s: float | None = None
    has_ids: bool = False
    structure: Structure | None = None
    calling: Calling | None = None
    session: str = ""
    given: frozenset[str] = frozenset()


def chat_of(body: bytes | bytearray) -> tuple[ChatBody, Wanted]:
    """Parse a request for a chat completion; convert its messages for templates."""
    asked = decoded(body, _chat)
    if not asked.messages:
        raise _wrong("messages", "must hold a message")
    messages = for_template(asked.messages)
    asked = msgspec.structs.replace(asked, messages=messages)
    tokens = asked.max_tokens
    if asked.max_completion_tokens is not None:
        tokens = asked.max_completion_tokens
    if asked.reasoning_effort not in (None, *EFFORTS):
        raise _wrong("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
    logprobs = None
    if asked.logprobs:
        logprobs = _between("top_logprobs", asked.top_logprobs, 0, MAX_LOGPROBS, 0)
    elif asked.top_logprobs:
        raise _wrong("top_logprobs", "needs logprobs: true")
    return asked, _with_tools(asked, _wanted(asked, tokens, logprobs))


def _with_tools(asked: ChatBody, wanted: Wanted) -> Wanted:
    """Add the tools of a request to its parameters."""
    calling = calling_of(asked.tools, asked.tool_choice)
    if calling is None:
        return wanted
    calling = replace(calling, is_single=asked.parallel_tool_calls is False)
    structure = wanted.structure
    if not calling.is_free:
        if structure is not None or asked.ignore_eos:
            rule = "cannot be given with a structure or with ignore_eos"
            raise _wrong("tool_choice", rule)
        structure = Structure("calls", calling, "tools")
        if calling.named:
            structure = Structure("json", calling.named_parameters, "tools")
    return replace(wanted, calling=calling, structure=structure)


def completion_of(body: bytes | bytearray) -> tuple[CompletionBody, Wanted]:
    asked = decoded(body, _completion)
    return asked, wanted_of(asked)


def wanted_of(asked: CompletionBody) -> Wanted:
    """Return the parameters of a text completion."""
    logprobs = asked.logprobs
    if logprobs is not None:
        logprobs = int(_between("logprobs", logprobs, 0, MAX_LOGPROBS, 0))
    if asked.best_of == (asked.n or 1):
        asked = msgspec.structs.replace(asked, best_of=None)
    tokens = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
    is_prompt_only = bool(asked.echo) and asked.max_tokens == 0
    wanted = _wanted(asked, 1 if is_prompt_only else tokens, logprobs)
    if asked.echo:
        if logprobs is not None and wanted.is_streamed:
            raise _wrong("echo", "with logprobs cannot be streamed")
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
        raise _wrong("prompt", f"has more than {MAX_PROMPTS} prompts; split it")
    if prompt and all(isinstance(one, str) for one in prompt):
        return list(prompt)
    is_lists = prompt and all(isinstance(one, list) and one for one in prompt)
    if is_lists and all(type(t) is int for one in prompt for t in one):
        return [list(one) for one in prompt]
    raise _wrong("prompt", "must be a text, token ids, or a list of either")


def decoded(body: bytes | bytearray, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Decode a body; the error names the invalid field."""
    check_values(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(error) from error
    except NOT_JSON as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}") from error


def invalid(error: msgspec.ValidationError) -> InvalidRequestError:
    """Return the error for a request that does not have the declared fields."""
    text = str(error)
    return InvalidRequestError(
        f"body is not a valid request: {text}", param=_named(text), code="invalid_value"
    )


def _named(text: str) -> str:
    """Return the field named in an error of msgspec; empty if it names none."""
    for mark, end in (("`$.", "`"), ("field `", "`")):
        _, found, rest = text.partition(mark)
        if found:
            return rest.partition(end)[0].partition("[")[0]
    return ""


def _wanted(asked: Any, max_tokens: int | None, logprobs: int | None) -> Wanted:
    for name in UNSUPPORTED:
        value = getattr(asked, name, None)
        if value not in DEFAULTS and value != NOTHING.get(name):
            raise _wrong(name, "is not supported by this server", "unsupported_value")
    _check_metadata(asked.metadata)
    n = int(_between("n", asked.n, 1, MAX_CHOICES, 1))
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    is_long = any(len(one) > MAX_STOP for one in stop)
    if len(stop) > MAX_STOPS or not all(stop) or is_long:
        raise _wrong(
            "stop",
            f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP} characters",
        )
    temperature = _between("temperature", asked.temperature, 0.0, 100.0, 1.0)
    sampling = Sampling(
        temperature=temperature if temperature >= GREEDY else 0.0,
        top_p=_between("top_p", asked.top_p, 0.0, 1.0, 1.0),
        top_k=max(0, int(_between("top_k", asked.top_k, -1, 2**31, 0))),
        min_p=_between("min_p", asked.min_p, 0.0, 1.0, 0.0),
        seed=secrets.randbits(63) if asked.seed is None else asked.seed % 2**63,
        presence_penalty=_between(
            "presence_penalty", asked.presence_penalty, -2.0, 2.0, 0.0
        ),
        frequency_penalty=_between(
            "frequency_penalty", asked.frequency_penalty, -2.0, 2.0, 0.0
        ),
        repetition_penalty=_between(
            "repetition_penalty", asked.repetition_penalty, 0.01, 100.0, 1.0
        ),
        logit_bias=_biases(asked.logit_bias),
        stop_token_ids=_stop_tokens(asked.stop_token_ids or []),
        min_tokens=int(_between("min_tokens", asked.min_tokens, 0, 2**31, 0)),
        max_tokens=int(_between("max_tokens", max_tokens, 1, 2**31, 0)),
        ignore_eos=bool(asked.ignore_eos),
        logprobs=None if logprobs is None else int(logprobs),
    )
    if asked.ignore_eos and (asked.response_format or asked.structured_outputs):
        raise _wrong("ignore_eos", "cannot be given with a structure, which ends")
    options = asked.stream_options
    for name in ("continuous_usage_stats", "include_obfuscation"):
        if options is not None and getattr(options, name):
            rule = f"with {name} is not supported"
            raise _wrong("stream_options", rule, "unsupported_value")
    if options is not None and not asked.stream:
        raise _wrong("stream_options", "needs stream: true")
    session = asked.prompt_cache_key or ""
    if len(session) > MAX_SESSION:
        raise _wrong("prompt_cache_key", f"has more than {MAX_SESSION} characters")
    return Wanted(
        model=asked.model,
        sampling=sampling,
        n=n,
        stop=tuple(stop),
        is_streamed=bool(asked.stream),
        has_usage=options is not None and options.include_usage,
        skips_special=asked.skip_special_tokens is not False,
        timeout_s=asked.timeout_s,
        has_ids=bool(asked.return_token_ids),
        structure=structure_of(asked.response_format, asked.structured_outputs),
        session=session,
        given=frozenset(n for n in DEFAULTED if getattr(asked, n) is not None),
    )


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
            raise _wrong("response_format", "needs json_schema with a schema")
        found.append(Structure("json", schema, "response_format"))
    if outputs is not None:
        fields = msgspec.structs.asdict(outputs)
        if fields.pop("json_object"):
            fields["json"] = {"type": "object"}
        given = {kind: value for kind, value in fields.items() if value is not None}
        if len(given) != 1:
            rule = "must have exactly one of json, regex, choice, grammar, json_object"
            raise _wrong("structured_outputs", rule)
        found += [Structure(k, v, "structured_outputs") for k, v in given.items()]
    if len(found) > 1:
        raise _wrong("structured_outputs", "cannot be given with response_format")
    return found[0] if found else None


def _check_metadata(given: dict[str, str] | None) -> None:
    """Refuse metadata beyond OpenAI's limits; it has no other effect."""
    found = given or {}
    is_long = any(len(k) > MAX_KEY or len(v) > MAX_VALUE for k, v in found.items())
    if len(found) > MAX_METADATA or is_long:
        rule = f"must be at most {MAX_METADATA} pairs of names of {MAX_KEY} characters "
        raise _wrong("metadata", rule + f"and values of {MAX_VALUE}")


def _stop_tokens(given: list[int]) -> tuple[int, ...]:
    found = tuple(dict.fromkeys(given))
    if len(found) > MAX_STOP_TOKENS:
        raise _wrong("stop_token_ids", f"has more than {MAX_STOP_TOKENS} tokens")
    return found


def _biases(given: dict[str, float] | None) -> dict[int, float]:
    found = given or {}
    if len(found) > MAX_BIASES:
        raise _wrong("logit_bias", f"has more than {MAX_BIASES} tokens")
    for token, bias in found.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise _wrong("logit_bias", "must have token ids as names")
        _between("logit_bias", bias, -100.0, 100.0, 0.0)
    return {int(token): bias for token, bias in found.items()}


def _between(
    name: str, value: float | None, low: float, high: float, default: float
) -> Any:
    if value is None:
        return default
    if not low <= value <= high:
        raise _wrong(name, f"must be from {low} to {high}, not {value}")
    return value


def _wrong(param: str, rule: str, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(f'"{param}" {rule}', param=param, code=code)


def check_fits(
    prompt: int, wanted: Sampling, longest: int, vocabulary: int, param: str
) -> Sampling:
    """Check that a sequence fits, and return its sampling with ``max_tokens`` set.

    ``prompt`` and ``longest`` (the maximum of the sequence) are numbers of tokens.
    """
    if not prompt:
        raise _wrong(param, "must have a token")
    room = longest - prompt
    if room < max(1, wanted.max_tokens):
        raise InvalidRequestError(
            f"this model takes at most {longest} tokens; the prompt has {prompt} and "
            f"the answer may have {max(1, wanted.max_tokens)}",
            param=param,
            code="context_length_exceeded",
        )
    named = {*wanted.logit_bias, *wanted.stop_token_ids}
    for token in named:
        if not 0 <= token < vocabulary:
            name = "logit_bias" if token in wanted.logit_bias else "stop_token_ids"
            raise _wrong(name, f"has token {token}; there are 0 to {vocabulary - 1}")
    if wanted.min_tokens > (wanted.max_tokens or room):
        raise _wrong("min_tokens", "is more than max_tokens")
    if wanted.max_tokens:
        return wanted
    return msgspec.structs.replace(wanted, max_tokens=room)
