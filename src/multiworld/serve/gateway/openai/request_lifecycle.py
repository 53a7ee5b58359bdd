"""Generation of a prepared request's output and answer, for all APIs."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.responses import Response

from multiworld.errors import RequestPoisonedError
from multiworld.net.rare_log import RareLog
from multiworld.serve.gateway.http.calls import AdmittedCall
from multiworld.serve.gateway.http.http_responses import EventStream
from multiworld.serve.gateway.openai.choices import Pieces, digest_of, generate
from multiworld.serve.gateway.openai.preparation import Ready
from multiworld.serve.gateway.streams.stream import for_no_deadline

# Response header that lists the unknown fields of the request.
IGNORED = "x-ignored-fields"

rare_log = RareLog(logging.getLogger("multiworld.serve"))


@dataclass(frozen=True, slots=True)
class Form:
    """The format of an API's answers, whole and as events."""

    whole: Callable[[Ready, Pieces], Coroutine[Any, Any, Response]]
    events: Callable[[Ready, Pieces], AsyncGenerator[bytes]]
    event_stream: type[EventStream] = EventStream
    stream_path: str = ""  # path of kept streams, up to the id; empty: none are kept


def begin_generation(call: AdmittedCall, ready: Ready) -> Pieces:
    """Reserve places in the queue, charge the prompts, and return the output.

    No replica is chosen before the first piece is read. Raise OverloadedError, and
    charge nothing, if the queue has no room for all choices, or if the tenant's tokens
    are used up.
    """
    gateway, admitted, wanted = call.gateway, call.admitted, ready.wanted
    call.reservation.release()  # frees the body's memory, as a stream may take long
    limits, record = ready.served.limits, call.record
    deadline_s = wanted.timeout_s
    if deadline_s is None:
        deadline_s = gateway.deadline_s(wanted.model, call.tenant)
    if math.isinf(deadline_s):
        limits = for_no_deadline(limits, ready.served.wait_s)
    share, n = call.tenant.share, wanted.n
    reserve = gateway.streams.resume if record.is_resumed else gateway.streams.reserve
    places = reserve(ready.served.name, share, len(ready.choices))
    call.held.enter_context(places)
    if record.drawn.deadline_at is None:  # no other gateway has begun this request
        prompts = ready.choices[::n]
        size = sum(len(choice.prompt) for choice in prompts)
        gateway.authenticator.check_tokens(admitted)
        gateway.authenticator.count_prompt(admitted, size)
        record.drawn.deadline_at = gateway.authenticator.clock() + deadline_s
        name, version = ready.served.name, ready.served.version
        record.drawn.version = version
        record.drawn.identity = gateway.identity(name, version)
        record.keep()
    stream = partial(
        gateway.streams.open,
        ready.served.name,
        deadline_s=record.drawn.deadline_at - gateway.authenticator.clock(),
        limits=limits,
        share=share,
        adapter=gateway.adapter(wanted.model),
        session=wanted.session,
        origin=admitted.origin,
        version=ready.served.version,
    )
    samplings = [
        replace(wanted.sampling, choice=one.index % n) for one in ready.choices
    ]
    count_generated = partial(gateway.authenticator.count_generated, admitted)
    pieces = generate(stream, ready.choices, samplings, places, count_generated, record)
    return _watched(call, ready, pieces)


async def answered(
    call: AdmittedCall, ready: Ready, pieces: Pieces, form: Form
) -> Response:
    """Answer with the output, as a whole or as a stream of events."""
    response: Response
    if ready.wanted.is_streamed:
        response = streamed = form.event_stream(form.events(ready, pieces))
        if form.stream_path and ready.wanted.detach_s:
            begin = call.gateway.event_logs.begin
            name, keep_s = ready.id, ready.wanted.detach_s
            count = partial(call.gateway.authenticator.count_sent, call.admitted)
            streamed.begin_log = partial(
                begin, name, call.tenant.name, keep_s, on_read=count
            )
            streamed.headers["Content-Location"] = form.stream_path + name
    else:
        response = await form.whole(ready, pieces)
    return with_ignored(response, ready.wanted.model, ready.wanted.ignored)


def with_ignored(response: Response, model: str, ignored: tuple[str, ...]) -> Response:
    """Name the ignored fields of a request to ``model`` in its answer's headers."""
    if names := ", ".join(ignored):
        # Headers cannot have all characters of a field's name.
        response.headers[IGNORED] = names.encode("ascii", "backslashreplace").decode()
        what = f"requests to model {model} have unknown fields"
        rare_log.error(what, names, cause=what)
    return response


async def _watched(call: AdmittedCall, ready: Ready, pieces: Pieces) -> Pieces:
    """Yield pieces; record the request if it turns out to be a poison request."""
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
    except RequestPoisonedError:
        model_version = ready.wanted.model, ready.served.version
        digest = digest_of(ready.choices, ready.wanted.sampling)
        call.gateway.found_poison(call.tenant, model_version, digest)
        raise
