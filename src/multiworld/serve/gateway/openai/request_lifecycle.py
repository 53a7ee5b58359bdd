"""Life of a request for generated text, on the routes of every API."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from msgspec.structs import replace

from multiworld.errors import InvalidRequestError, RequestPoisonedError, ServeError
from multiworld.net.rare_log import RareLog
from multiworld.serve.gateway.admission.authenticator import AdmittedRequest
from multiworld.serve.gateway.http.body_budget import Reservation
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_responses import EventStream, respond
from multiworld.serve.gateway.http.request_body import (
    Body,
    model_named_in,
    while_connected,
)
from multiworld.serve.gateway.openai.choices import Piece, digest_of, generate
from multiworld.serve.gateway.openai.preparation import Ready
from multiworld.serve.gateway.streams.stream import for_no_deadline

# Reads a body, and prepares the request in it.
Reader = Callable[[Gateway, AdmittedRequest, Request, Body], Awaitable[Ready]]


LEAST_S = 0.001  # of a deadline, which then is over at once


IGNORED = "x-ignored-fields"  # header of a response: unknown fields of the request

rare_log = RareLog(logging.getLogger("multiworld.serve"))


@dataclass(frozen=True, slots=True)
class Form:
    whole: Callable[[Ready, AsyncGenerator[Piece]], Coroutine[Any, Any, Response]]
    events: Callable[[Ready, AsyncGenerator[Piece]], AsyncGenerator[bytes]]
    error: Callable[[ServeError], Response]
    event_stream: type[EventStream] = EventStream
    model: str = ""  # if the address names it, and not the body


async def answered(
    gateway: Gateway, request: Request, read: Reader, form: Form
) -> Response:
    """Answer a request. Cancelling ends its streams; it counts as ``CLIENT_CLOSED``."""

    async def answer(admitted: AdmittedRequest, reservation: Reservation) -> Response:
        body = await gateway.read_body(request, admitted, reservation)
        try:
            began = gateway.authenticator.clock()
            preparing = _prepared(gateway, admitted, request, read, body)
            ready = await while_connected(request, preparing)
        except ServeError as error:
            admitted.model = form.model or model_named_in(body)
            if isinstance(error, InvalidRequestError):
                gateway.check_known(admitted)
            raise
        del body
        admitted.model = ready.wanted.model
        reservation.release()  # a stream may take long
        timeout_s, limits = ready.wanted.timeout_s, ready.served.limits
        default_s = gateway.deadline_s(ready.wanted.model, admitted.tenant)
        if timeout_s is None and math.isinf(default_s):
            limits = for_no_deadline(limits, ready.served.wait_s)
        if ready.wanted.structure is not None:  # to compile it may have taken seconds
            timeout_s = default_s if timeout_s is None else timeout_s
            spent_s = gateway.authenticator.clock() - began
            timeout_s = max(LEAST_S, timeout_s - spent_s)
        # A refused request is not charged, and its status can still say so.
        share, count = admitted.tenant.share, len(ready.choices)
        places = gateway.streams.reserve(ready.served.name, share, count)
        sampling, n = ready.wanted.sampling, ready.wanted.n
        prompts = ready.choices[::n]
        gateway.authenticator.count_prompt(
            admitted, sum(len(choice.prompt) for choice in prompts)
        )
        stream = partial(
            gateway.streams.stream,
            ready.served.name,
            deadline_s=timeout_s,
            limits=limits,
            share=share,
            adapter=gateway.adapter(ready.wanted.model),
            session=ready.wanted.session,
            request=admitted.id,
            version=ready.served.version,
            has_place=True,
        )
        samplings = [replace(sampling, choice=one.index % n) for one in ready.choices]
        count_generated = partial(gateway.authenticator.count_generated, admitted)
        generated = generate(stream, ready.choices, samplings, places, count_generated)
        pieces = _watched(gateway, admitted, ready, generated)
        if ready.wanted.is_streamed:
            response: Response = form.event_stream(form.events(ready, pieces))
        else:
            response = await while_connected(request, form.whole(ready, pieces))
        if ignored := ", ".join(ready.wanted.ignored):
            response.headers[IGNORED] = ignored
            what = f"requests to model {ready.wanted.model} have unknown fields"
            rare_log.error(what, ignored, cause=what)
        return response

    return await respond(gateway, request, "", answer, form.error)


async def _prepared(
    gateway: Gateway,
    admitted: AdmittedRequest,
    request: Request,
    read: Reader,
    body: Body,
) -> Ready:
    """Prepare a request for the active version; again if an update is completed."""
    while True:
        ready = await read(gateway, admitted, request, body)
        model, tenant, served = ready.wanted.model, admitted.tenant, ready.served
        known = model, served.version
        await gateway.check_poison(admitted, known, partial(_digest, ready))
        version, _ = gateway.model(model, None, tenant)
        if (version, gateway.route(model, tenant)) == (served.version, served.name):
            return ready


async def _watched(
    gateway: Gateway,
    admitted: AdmittedRequest,
    ready: Ready,
    pieces: AsyncGenerator[Piece],
) -> AsyncGenerator[Piece]:
    """Yield pieces, and record poison."""
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
    except RequestPoisonedError:
        model_version = ready.wanted.model, ready.served.version
        gateway.found_poison(admitted.tenant, model_version, await _digest(ready))
        raise


async def _digest(ready: Ready) -> str:
    return digest_of(ready.choices, ready.wanted.sampling)
