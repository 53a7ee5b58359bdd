"""OpenAI's embeddings route."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
import orjson
from starlette.responses import Response
from torch import Tensor

from multiworld.backends.dtypes import memory_of, plain
from multiworld.errors import (
    InvalidRequestError,
    NoReplicaError,
    OverloadedError,
    wrong_field,
)
from multiworld.serve.gateway.http import http_responses as responses
from multiworld.serve.gateway.http import json_limits, request_body
from multiworld.serve.gateway.http.calls import AdmittedCall
from multiworld.serve.gateway.http.request_body import Body
from multiworld.serve.gateway.openai.request_fields import (
    FIELD_NAME,
    MAX_IGNORED,
    check_unknown,
    invalid,
)
from multiworld.serve.gateway.openai.request_lifecycle import with_ignored
from multiworld.serve.gateway.openinference import tensor_format
from multiworld.serve.gateway.openinference.tensor_format import NotFiniteError
from multiworld.serve.routing.refusals import OutdatedError
from multiworld.serve.spec.stage import Model, Tensors

MAX_TEXTS = 2048  # texts in one request; OpenAI's limit
MAX_TOKENS = 300_000  # token ids in one request; OpenAI's limit
WINDOW = 32  # maximum texts of one request in flight; more could fill the queue

Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


async def embeddings(call: AdmittedCall) -> Response:
    """Embed texts."""
    parse = partial(_embedding_request, is_strict=call.gateway.is_strict)
    asked = await call.parsed(parse)
    call.admitted.model = asked.model
    return with_ignored(await _embed_all(call, asked), asked.model, asked.ignored)


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: msgspec.Raw = msgspec.Raw(b"null")
    input: msgspec.Raw = msgspec.Raw()
    encoding_format: msgspec.Raw = msgspec.Raw(b'"float"')
    dimensions: msgspec.Raw = msgspec.Raw(b"null")
    user: msgspec.Raw = msgspec.Raw(b"null")


# Fields of other servers that would change the vectors: refused, while most unknown
# fields are ignored.
MEANINGFUL = frozenset(
    (
        *("truncate_prompt_tokens", "input_type", "output_dtype", "messages"),
        *("instruction", "prompt", "prompt_name"),
    )
)
MAX_FIELDS = 1024  # fields of a body, those of unknown objects included

# Inputs to encode in one job; other tenants' jobs may run between two jobs.
INPUTS_PER_JOB = 32

_bodies = msgspec.json.Decoder(_Body)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_strings = msgspec.json.Decoder(list[str])
_string = msgspec.json.Decoder(str)
_tokens = msgspec.json.Decoder(list[Token])
_token_lists = msgspec.json.Decoder(list[list[Token]])


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A parsed request; ``is_base64``: return vectors as Base64 of 32-bit floats."""

    model: str
    inputs: list[str] | list[list[int]]
    dimensions: int | None
    is_base64: bool
    ignored: tuple[str, ...] = ()  # unknown fields


def _decoded(body: Body, *, is_strict: bool) -> tuple[_Body, tuple[str, ...]]:
    """Return a body and its unknown fields, which are ignored, as for completions."""
    json_limits.check_objects(body)
    try:
        return _bodies.decode(body), ()
    except msgspec.ValidationError as error:  # a field is unknown, or it is no object
        too_many = json_limits.count_outside_strings(body, b":") > MAX_FIELDS
        if is_strict or too_many:
            raise invalid(error) from error
        fields = json_limits.decode(body, _fields)
    except json_limits.NOT_JSON as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}") from error
    known = _Body.__struct_fields__
    ignored = tuple(name for name in fields if name not in known)
    if len(ignored) > MAX_IGNORED or not all(map(FIELD_NAME.fullmatch, ignored)):
        raise InvalidRequestError("body has unknown fields with odd names, or too many")
    for name in ignored:
        is_small = len(bytes(fields[name])) <= json_limits.SMALL_BYTES
        value = json_limits.decode(bytes(fields[name]), _any) if is_small else ...
        check_unknown(name, value, known, MEANINGFUL)
    return _Body(**{name: fields[name] for name in fields.keys() & set(known)}), ignored


def _embedding_request(body: Body, *, is_strict: bool) -> EmbeddingRequest:
    payload, ignored = _decoded(body, is_strict=is_strict)
    model = _small("model", payload.model)
    encoding = _small("encoding_format", payload.encoding_format) or "float"
    dimensions = _small("dimensions", payload.dimensions)
    if not isinstance(model, str):
        raise InvalidRequestError(
            'body has no "model"; give the name of a model',
            param="model",
            code="missing_required_parameter",
        )
    inputs = _inputs(bytes(payload.input))
    if len(inputs) > MAX_TEXTS:
        raise wrong_field("input", f"has more than {MAX_TEXTS} texts; split it")
    if encoding not in ("float", "base64"):
        raise wrong_field("encoding_format", 'must be "float" or "base64"')
    if dimensions is not None and type(dimensions) is not int:
        raise wrong_field("dimensions", "must be an integer")
    is_base64 = encoding == "base64"
    return EmbeddingRequest(model, inputs, dimensions, is_base64, ignored)


def _small(name: str, part: msgspec.Raw) -> Any:
    try:
        return json_limits.small(part, name, _any)
    except InvalidRequestError:
        raise wrong_field(name, "is too long") from None


def _inputs(given: bytes) -> list[str] | list[list[int]]:
    """Check the number of inputs, and decode them."""
    try:
        if given.startswith(b'"'):
            return _not_empty([_string.decode(given)])
        first = given[1:].lstrip(b" \t\r\n")[:1]
        if first == b'"':
            json_limits.check_values(given)
            return _not_empty(_strings.decode(given))
        if given.count(b",") > MAX_TOKENS or given.count(b"[") > MAX_TEXTS + 1:
            raise wrong_field(
                "input", f"has more than {MAX_TOKENS} tokens or {MAX_TEXTS} arrays"
            )
        if first == b"[":
            return _not_empty(_token_lists.decode(given))
        return _not_empty([_tokens.decode(given)])
    except json_limits.NOT_JSON:
        raise wrong_field(
            "input", "must be a string, an array of token ids, or a list of either"
        ) from None


Input = TypeVar("Input", str, list[int])


def _not_empty(inputs: list[Input]) -> list[Input]:
    if not inputs or not all(inputs):
        raise wrong_field(
            "input", "must hold strings or arrays of token ids, none of them empty"
        )
    return inputs


def _check_dimensions(dimensions: int | None, model: Model) -> None:
    size = next((s.shape[-1] for s in model.outputs if s.name == model.embedding), -1)
    if dimensions is not None and dimensions != size:
        rule = f"is {dimensions}, but this model returns {size}; leave it out"
        raise wrong_field("dimensions", rule)


def _checked(
    frontend: Any, model: Model, inputs: list[str] | list[list[int]]
) -> list[Tensors]:
    """Return the tensors of the inputs; refuse inputs that the model does not take."""
    is_text = isinstance(inputs[0], str)
    encode = getattr(frontend, "encode" if is_text else "encode_tokens", None)
    if encode is None:
        raise wrong_field("input", "must be text: this model takes no arrays of tokens")
    found: list[Tensors] = [encode(each) for each in inputs]
    for tensors in found:
        tensor_format.check(tensors, model)
    return found


async def _embed_all(call: AdmittedCall, asked: EmbeddingRequest) -> Response:
    """Embed all texts with one version of a model."""
    authenticator = call.gateway.authenticator
    asked_at = authenticator.clock() - call.record.spent_s
    while True:
        version, model, inputs = await _prepared(call, asked)
        tokens = sum(next(iter(tensors.values())).numel() for tensors in inputs)
        is_refused = False
        try:
            with authenticator.tokens_held(call.admitted, tokens):
                answers = await _embed(call, asked, version, inputs, asked_at)
        except OutdatedError:  # an update has just made another version active
            is_refused = True
            continue
        except (OverloadedError, NoReplicaError):
            is_refused = True
            raise
        finally:
            # Another gateway that continues the request counts its tokens.
            if not is_refused and not call.record.is_abandoned():
                authenticator.count_prompt(call.admitted, tokens)
        vectors = [answer[model.embedding][0] for answer in answers]
        render = partial(
            _render, asked.model, vectors, tokens, is_base64=asked.is_base64
        )
        size = sum(vector.numel() for vector in vectors)
        if 4 * size >= responses.RENDER_BYTES:
            return await asyncio.to_thread(render)
        return render()


async def _prepared(
    call: AdmittedCall, asked: EmbeddingRequest
) -> tuple[str, Model, list[Tensors]]:
    """Return the active version, its model, and the tensors of all inputs."""
    gateway, name, tenant = call.gateway, asked.model, call.tenant
    version, model = gateway.model(name, None, tenant)
    _check_dimensions(asked.dimensions, model)
    if model.generation is not None:
        raise wrong_field("model", "names a model that generates text and cannot embed")
    served = gateway.route(name, tenant)
    frontend = await gateway.text(served, version, model)
    size = sum(map(len, asked.inputs))
    # Encoding is 16 times as slow as parsing.
    if 16 * size < request_body.OFFLOAD_BYTES:
        return version, model, _checked(frontend, model, asked.inputs)
    inputs: list[Tensors] = []
    # Encoding all inputs may take seconds.
    for begin in range(0, len(asked.inputs), INPUTS_PER_JOB):
        some = asked.inputs[begin : begin + INPUTS_PER_JOB]
        encode = partial(_checked, frontend, model, some)
        inputs += await gateway.encoded(tenant.share, sum(map(len, some)), encode)
    return version, model, inputs


async def _embed(
    call: AdmittedCall,
    asked: EmbeddingRequest,
    version: str,
    inputs: list[Tensors],
    asked_at: float,
) -> list[Tensors]:
    gateway, admitted, name = call.gateway, call.admitted, asked.model
    admitted.rows = 0
    deadline_s = responses.timeout_of(call.request)
    if deadline_s is None:
        deadline_s = gateway.deadline_s(name, call.tenant)
    clock = gateway.authenticator.clock
    deadline_at = asked_at + deadline_s
    routes = gateway.dispatcher.table.routes
    served = gateway.route(name, call.tenant)
    if served not in routes:  # the model has just been removed
        raise OutdatedError(f"{served!r} is no longer served")
    room = routes[served].max_queued_requests
    window = asyncio.Semaphore(max(1, min(WINDOW, room)))

    async def one(tensors: Tensors) -> Tensors:
        async with window:
            left_s = max(0.001, deadline_at - clock())
            return await gateway.infer(admitted, name, version, tensors, left_s)

    if len(inputs) == 1:
        return [await one(inputs[0])]
    return await _all(map(one, inputs))


async def _all(parts: Iterable[Coroutine[Any, Any, Tensors]]) -> list[Tensors]:
    """Return all answers; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _render(
    name: str, vectors: list[Tensor], tokens: int, *, is_base64: bool
) -> Response:
    # In pieces, so as not to hold the GIL for long: see ``json_limits.pieces``.
    parts: list[bytes] = [b'{"object":"list","data":[']
    for number, given in enumerate(vectors):
        vector = plain(given.float())
        parts.append(
            b'%b{"object":"embedding","index":%d,"embedding":'
            % (b"," if number else b"", number)
        )
        if is_base64:
            parts.append(b'"%b"' % base64.b64encode(bytes(memory_of(vector))))
        elif bool(vector.isfinite().all()):
            parts += tensor_format.listed(vector)
        else:
            raise NotFiniteError(
                f"embedding {number} has NaN or an infinity, which JSON cannot carry; "
                'use encoding_format "base64"'
            )
        parts.append(b"}")
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    parts += b"],", orjson.dumps({"model": name, "usage": usage})[1:]
    return Response(b"".join(parts), media_type="application/json")
