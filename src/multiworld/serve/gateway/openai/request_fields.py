"""Fields of requests for chat and text completions, as in OpenAI's API and vLLM.

Unsupported fields are refused by name; most unknown fields are ignored and reported.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec

from multiworld.errors import InvalidRequestError, wrong_field
from multiworld.serve.gateway.http.json_limits import NOT_JSON, check_values
from multiworld.serve.gateway.openai.tool_calls import NamedTool, Tool


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    schema: Any = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The structure of an answer, with vLLM's names; exactly one field is given."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False


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
    detach_s: float | None = None


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
    include_reasoning: bool | None = None
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


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    tokens: list[int]


class GenerateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of Triton's generate extension."""

    text_input: str
    id: str = ""
    parameters: dict[str, Any] = {}  # fields of a text completion
    stream: bool | None = None  # ignored: the route decides


CHAT = msgspec.json.Decoder(ChatBody)
COMPLETION = msgspec.json.Decoder(CompletionBody)

MAX_CHOICES = 64  # maximum choices of one request, over all of its prompts
MAX_STOPS = 16  # maximum number of stop strings
MAX_STOP = 256  # maximum characters of a stop string; checking each token costs time
# Maximum pairs of ``metadata``, and maximum characters of their names and values, as in
# OpenAI's API.
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_SESSION = 256  # maximum characters of ``prompt_cache_key``
MAX_LOGPROBS = 20  # maximum alternatives reported with each token

RANGES: dict[str, tuple[float, float]] = {
    "n": (1, MAX_CHOICES),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "min_tokens": (0, 2**31),
    "max_tokens": (1, 2**31),
    "max_completion_tokens": (1, 2**31),
    "logprobs": (0, MAX_LOGPROBS),
    "top_logprobs": (0, MAX_LOGPROBS),
    "logit_bias": (-100.0, 100.0),  # range of each bias
}
"""Minimum and maximum of each number, by field."""

# Fields of OpenAI's API and of vLLM that this server refuses.
UNSUPPORTED = (
    "chat_template",  # a client's template could run forever
    *("functions", "function_call", "modalities"),
    *("audio", "prediction", "web_search_options", "suffix"),
    *("store", "service_tier", "verbosity", "moderation", "prompt_cache_options"),
    *("prompt_cache_retention", "best_of", "priority", "length_penalty"),
    *("use_beam_search", "include_stop_str_in_output"),
    *("spaces_between_special_tokens", "continue_final_message", "bad_words"),
    *("documents", "allowed_token_ids", "truncate_prompt_tokens"),
)

NOT_IN_CHATS = "echo", "add_special_tokens"

# Values that have no effect, and are accepted, by unsupported field. For other fields,
# ``DEFAULTS`` has these values.
NOTHING: dict[str, Any] = {
    "function_call": "none",
    "web_search_options": None,  # {} requests a search
    "service_tier": ("auto", "default"),
    "modalities": ["text"],
    "verbosity": "medium",
    "best_of": 1,
    "priority": 0,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "echo": False,
    "add_special_tokens": False,
}

# Values that have no effect, and are accepted, for fields not in ``NOTHING``.
DEFAULTS: tuple[Any, ...] = (*(None, False, [], {}, ""),)


# Fields of other servers that would change the answer: refused, while most unknown
# fields are ignored.
MEANINGFUL = frozenset(
    (
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("guided_decoding_backend", "grammar", "json_schema", "logits_processors"),
        *("typical_p", "top_a", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta"),
        *("mirostat_mode", "dry_multiplier", "dry_base", "dry_allowed_length"),
        *("dry_sequence_breakers", "xtc_probability", "xtc_threshold", "num_beams"),
        *("do_sample", "max_new_tokens", "max_output_tokens", "n_predict"),
        *("min_length", "max_length", "guided", "watermark"),
        *("num_predict", "thinking", "enable_thinking", "stop_sequences", "system"),
        *("repeat_penalty", "return_tokens_as_token_ids", "mm_processor_kwargs"),
        *("prompt_logprobs", "input", "instructions", "lora", "adapter"),
    )
)
# Fields of other servers that resemble a known field: ignored, not refused as misspelt.
OTHERS = frozenset({"models"})

# Fields within which an unknown field is refused, because it may change the answer.
NEVER_IGNORED = ("response_format", "structured_outputs", "tool_choice")

MAX_IGNORED = 16  # maximum number of ignored fields of a request

FIELD_NAME = re.compile(r"[\w.-]{1,64}")  # names of unknown fields that are ignored
_FIELD = re.compile(r"unknown field `([\w.-]{1,64})`(?: - at `\$\.?(.*)`)?$")
_STEP = re.compile(r"([\w-]+)|\[(\d+)\]")


def decoded_with_ignored(
    body: bytes | bytearray,
    decoder: msgspec.json.Decoder[Any],
    *,
    is_strict: bool,
) -> tuple[Any, tuple[str, ...]]:
    """Return a request without its unknown fields, and their names.

    Raise InvalidRequestError if the body is invalid, or if an unknown field would
    change the answer or is a misspelt known field; with ``is_strict``, for any field.
    """
    check_values(body)
    ignored: list[str] = []
    data: Any = None
    while True:
        try:
            return decoder.decode(body), tuple(ignored)
        except msgspec.ValidationError as error:
            found = _FIELD.search(str(error))
            if is_strict or found is None or len(ignored) >= MAX_IGNORED:
                raise invalid(error) from error
            name, at = found[1], found[2] or ""
            data = _any_json(body) if data is None else data
            try:
                place = _at(data, at)
                _check_ignorable(name, at, place[name], error)
                del place[name]
            except (KeyError, IndexError, TypeError):
                # A key occurs twice, or a name looks like the end of the message.
                raise invalid(error) from error
            ignored.append(f"{at}.{name}" if at else name)
            body = msgspec.json.encode(data)
        except NOT_JSON as error:
            raise InvalidRequestError(f"body is not valid JSON: {error}") from error


def _any_json(body: bytes | bytearray) -> Any:
    """Decode a body in which an unknown field came before what may be wrong."""
    try:
        return msgspec.json.decode(body)
    except NOT_JSON as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}") from error


def _at(data: Any, path: str) -> Any:
    for step in _STEP.finditer(path):
        data = data[int(step[2]) if step[2] else step[1]]
    return data


def _check_ignorable(
    name: str, at: str, value: Any, error: msgspec.ValidationError
) -> None:
    if at.startswith(NEVER_IGNORED):
        raise invalid(error) from error
    if not at:
        known = ChatBody.__struct_fields__ + CompletionBody.__struct_fields__
        check_unknown(name, value, known, MEANINGFUL)


def check_unknown(
    name: str, value: Any, known: Sequence[str], meaningful: Collection[str]
) -> None:
    """Refuse an unknown field that would change the answer, or seems misspelt."""
    is_known = name in known  # at another route
    if value is None or value is False or (is_known and _requests_nothing(name, value)):
        return
    if name in meaningful:
        rule = "is not supported by this server, and would change the answer"
        raise wrong_field(name, rule, "unsupported_value")
    if is_known:
        raise wrong_field(name, "is not a field of this route", "unsupported_value")
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    if close and name not in OTHERS:
        raise wrong_field(name, f"is not known; did you mean {close[0]!r}?")


def decoded(body: bytes | bytearray, decoder: msgspec.json.Decoder[Any]) -> Any:
    check_values(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(error) from error
    except NOT_JSON as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}") from error


def invalid(error: msgspec.ValidationError) -> InvalidRequestError:
    """Return the error for a body that does not match the declared fields."""
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


def check_supported(asked: ChatBody | CompletionBody) -> None:
    """Refuse fields that are not supported, unless their values have no effect."""
    is_chat = isinstance(asked, ChatBody)
    for name in UNSUPPORTED + (NOT_IN_CHATS if is_chat else ()):
        value = getattr(asked, name, None)
        if not _requests_nothing(name, value):
            rule = "is not supported by this server"
            raise wrong_field(name, rule, "unsupported_value")


def _requests_nothing(name: str, value: Any) -> bool:
    given = NOTHING.get(name)
    nothing = given if isinstance(given, tuple) else (given,)
    if name not in NOTHING or value is None:
        nothing = DEFAULTS
    is_bool = isinstance(value, bool)
    return any(isinstance(one, bool) is is_bool and value == one for one in nothing)
