"""Routes of the admin interface for tenants, usage and the audit log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from multiworld.errors import ServeError
from multiworld.serve.controller import answers
from multiworld.serve.controller.client import WHO
from multiworld.serve.controller.tenant_manager import TenantManager
from multiworld.serve.tenants.directory import Tenant
from multiworld.serve.tenants.keys import KEY_ID, KEY_PATTERN, PREFIX, known_as

logger = logging.getLogger("multiworld.serve")

SHOWN = 400  # maximum characters of a value in the audit log

# Seconds for which a key is valid, at most 100 years.
ValidS = Annotated[float, Field(gt=0, le=3_153_600_000)]


class AdminRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TenantSettings(AdminRequest):
    """Limits and rights of a tenant; omitted fields stay unchanged."""

    models: list[Annotated[str, Field(min_length=1, max_length=200)]] | None = None
    rpm_limit: Annotated[int, Field(ge=1)] | None = None
    max_parallel_requests: Annotated[int, Field(ge=1)] | None = None
    bytes_per_s: Annotated[float, Field(gt=0, le=1e15)] | None = None
    tpm_limit: Annotated[int, Field(ge=1)] | None = None
    tokens_per_day: Annotated[int, Field(ge=1)] | None = None
    tokens_per_month: Annotated[int, Field(ge=1)] | None = None
    weight: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    is_operator: bool = False
    is_suspended: bool = False
    suspension: Annotated[str, Field(max_length=500)] = ""

    def said(self) -> dict[str, object]:
        found: dict[str, object] = self.model_dump(exclude_unset=True)
        if found.get("models", ()) is None:
            found["models"] = ["*"]
        return found


class NewTenant(TenantSettings):
    """A tenant to create; its key expires after ``valid_s`` seconds."""

    name: str
    valid_s: ValidS | None = None


class Rotation(AdminRequest):
    """A new key, valid for ``valid_s``; older keys expire after ``grace_s`` seconds."""

    grace_s: Annotated[float, Field(ge=0, le=31_536_000)] = 0.0
    valid_s: ValidS | None = None


class Revocation(AdminRequest):
    """A key to revoke; without one, all keys of the tenant."""

    key: str | None = None


def respond(answer: answers.Answer, status: int = 200) -> Response:
    return Response(answers.encode(answer), status, media_type="application/json")


def add_tenants(app: FastAPI, tenanting: TenantManager) -> None:
    """Add the tenant routes, and the audit log for every route that changes state."""
    _add_audit(app, tenanting)

    @app.get("/tenants")
    async def tenants() -> Response:
        return respond([_shown(tenant) for tenant in tenanting.tenants.values()])

    @app.post("/tenants")
    async def create(asked: NewTenant) -> Response:
        own = ("name", "valid_s")
        said = {k: v for k, v in asked.said().items() if k not in own}
        made = await tenanting.create(asked.name, said, asked.valid_s)
        return respond(_with_key(*made))

    @app.patch("/tenants/{name}")
    async def change(name: str, asked: TenantSettings) -> Response:
        return respond(_shown(await tenanting.change(name, asked.said())))

    @app.post("/tenants/{name}/rotate")
    async def rotate(name: str, asked: Rotation) -> Response:
        made = await tenanting.rotate(name, asked.grace_s, asked.valid_s)
        return respond(_with_key(*made))

    @app.post("/tenants/{name}/revoke")
    async def revoke(name: str, asked: Revocation) -> Response:
        return respond(_shown(await tenanting.revoke(name, asked.key)))

    @app.delete("/tenants/{name}")
    async def delete(name: str) -> Response:
        await tenanting.delete(name)
        return respond(answers.TenantRemoved(name))

    @app.get("/usage")
    async def usage(
        tenant: str | None = None, since: float = 0.0, by_minute: bool = False
    ) -> Response:
        ask = tenanting.registry.usage
        found = await asyncio.to_thread(ask, tenant, since, by_minute=by_minute)
        return respond(found)

    @app.get("/audit")
    async def audit(last: int = 50) -> Response:
        return respond(await asyncio.to_thread(tenanting.registry.audited, last))


def _shown(tenant: Tenant) -> answers.TenantShown:
    return msgspec.convert(tenant, answers.TenantShown, from_attributes=True)


def _with_key(tenant: Tenant, key: str) -> answers.TenantWithKey:
    return answers.TenantWithKey(**msgspec.structs.asdict(_shown(tenant)), key=key)


def _add_audit(app: FastAPI, tenanting: TenantManager) -> None:
    @app.middleware("http")
    async def audited(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if request.method == "GET":
            return await call_next(request)
        what = _audited_body(await request.body())
        who = request.headers.get(WHO, "unknown")[:SHOWN]
        act = str(_cut(f"{request.method} {request.url.path}"))
        registry = tenanting.registry
        try:
            number = await asyncio.to_thread(registry.audit, who, act, what)
        except ServeError as error:
            if request.url.path == "/shutdown":
                # A shutdown must work on a full disk, too, so carry it out although it
                # is not audited.
                logger.error("a shutdown by %s is not in the audit log: %s", who, error)
                return await call_next(request)
            text = f"nothing was done, because the audit log cannot be written: {error}"
            return respond(answers.RefusedByController(text), 503)
        outcome = "failed"
        try:
            response = await call_next(request)
            is_done = response.status_code < 400
            outcome = "done" if is_done else f"refused ({response.status_code})"
        finally:
            try:
                await asyncio.to_thread(registry.audit_outcome, number, outcome)
            except ServeError as error:
                logger.error(
                    "%s by %s: cannot write the outcome to the audit log: %s",
                    act,
                    who,
                    error,
                )
        return response


def _audited_body(body: bytes) -> dict[str, object]:
    """Return a body for the audit log, with long values shortened."""
    try:
        said = json.loads(body) if body else {}
    except ValueError:
        said = body.decode(errors="replace")
    if not isinstance(said, dict):
        said = {"body": said}
    if isinstance(key := said.get("key"), str) and not KEY_ID.fullmatch(key):
        # A whole key, perhaps one that was not found; JSON may hold half a character.
        said["key"] = known_as(key.encode(errors="replace").decode())[0]
    return {name: _cut(value) for name, value in said.items()}


def _cut(value: object) -> object:
    if not isinstance(value, str):
        return value
    # The value may be a whole key that a user has pasted: hide its secret part.
    value = KEY_PATTERN.sub(rf"{PREFIX}-\1-…", value)
    if len(value) > SHOWN:
        return f"{value[:SHOWN]} … ({len(value)} characters)"
    return value
