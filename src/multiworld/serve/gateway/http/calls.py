"""The arguments of route handlers: a request and its sender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from multiworld.errors import InvalidRequestError, ServeError
from multiworld.serve.gateway.admission.authenticator import AdmittedRequest
from multiworld.serve.gateway.http.answer_record import AnswerRecord, unrecorded
from multiworld.serve.gateway.http.body_limits import Reservation
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_request import AnyRequest
from multiworld.serve.gateway.http.request_body import (
    Body,
    model_named_in,
    off_loop,
    read_body,
)
from multiworld.serve.tenants.directory import Tenant

T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """A request to a route."""

    gateway: Gateway
    request: AnyRequest
    path: Mapping[str, str]  # path parameters, by name
    tenant: Tenant  # the sender; anonymous if the route needs no tenant
    # Record from which another gateway can continue the answer.
    record: AnswerRecord = field(default_factory=unrecorded, kw_only=True)

    @property
    def name(self) -> str:
        """The model in the path; empty if the body names the model."""
        return self.path.get("name", "")

    @property
    def version(self) -> str | None:
        """The version in the path; None: the active one."""
        return self.path.get("version")


@dataclass(slots=True)
class AdmittedCall(Call):
    """An admitted request, which may have a body."""

    admitted: AdmittedRequest  # counts towards the tenant's limits
    reservation: Reservation  # memory reserved for the body
    # Resources to release when the answer ends, whether or not it succeeds.
    held: ExitStack = field(default_factory=ExitStack)

    async def read_body(self, *, may_be_binary: bool = False) -> Body:
        authenticator = self.gateway.authenticator
        return await read_body(
            self.request,
            self.gateway.limits,
            self.reservation,
            partial(
                authenticator.count_bytes,
                self.admitted,
                is_resumed=self.record.is_resumed,
            ),
            # Charges the tenant for the bytes that decompression adds.
            partial(authenticator.limiter.spend, self.tenant),
            may_be_binary=may_be_binary,
        )

    async def parsed(self, parse: Callable[[Body], T]) -> T:
        """Read the body and return ``parse(body)``.

        An invalid body that also names an unknown model raises UnknownModelError: the
        client must correct the model first.
        """
        body = await self.read_body()
        try:
            return await off_loop(len(body), partial(parse, body))
        except ServeError as error:
            self.admitted.model = self.name or model_named_in(body)
            if isinstance(error, InvalidRequestError) and self.admitted.model:
                self.gateway.check_known(self.admitted.model, self.tenant)
            raise
