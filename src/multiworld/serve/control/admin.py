"""The controller's admin interface: HTTP on a Unix socket of its user alone. Shell."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from multiworld.errors import ServeError
from multiworld.serve.control.admin_tenants import add_tenants
from multiworld.serve.control.controller import Controller
from multiworld.serve.spec.loader import parse_spec


class _AdminRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Scale(_AdminRequest):
    """Body of ``/scale``: run a stage with this many replicas."""

    model: str
    stage: str
    replicas: int = Field(ge=0, le=4096)
    is_confirmed: bool = False


class Update(_AdminRequest):
    """Body of ``/update``: the new spec; ``text`` is YAML, ``where`` its path."""

    text: str
    where: str = "spec"


class Drain(_AdminRequest):
    """Body of ``/drain``: the process to replace."""

    name: str


class Chaos(_AdminRequest):
    """Body of ``/chaos``: the fault to inject, and the stage to inject it into."""

    action: Literal["kill", "stop", "cut"]
    model: str
    stage: str
    seconds: float = Field(default=5.0, gt=0, le=3600)


def make_admin(controller: Controller, ended: asyncio.Event) -> FastAPI:
    """Return the admin application.

    Args:
        controller: The controller that it administers.
        ended: Set when a client requests the shutdown of the service.
    """
    app = FastAPI(title="multiworld controller", redoc_url=None)

    @app.exception_handler(ServeError)
    async def problem(request: Request, error: ServeError) -> Response:
        body = {"error": str(error), "problems": getattr(error, "problems", ())}
        status = error.status if error.status != 500 else 409
        return JSONResponse(body, status)

    add_tenants(app, controller.tenanting)

    @app.get("/status")
    async def status(reports: bool = False) -> dict[str, Any]:
        found = controller.status()
        if reports:
            told = await controller.reports()
            found["reports"] = msgspec.to_builtins({**told.workers, **told.gateways})
        return found

    @app.get("/nodes")
    async def nodes() -> list[dict[str, Any]]:
        return controller.places.status()

    @app.get("/decisions")
    async def decisions(last: int = 10, snapshots: bool = False) -> dict[str, Any]:
        journal = controller.journal
        return {
            "decisions": journal.last(last, with_snapshots=snapshots),
            "thoughts": journal.reasons(),
        }

    @app.get("/events")
    async def events(since: int = 0) -> list[dict[str, Any]]:
        return controller.history.since(since)

    @app.post("/scale")
    async def scale(asked: Scale) -> dict[str, Any]:
        scaled = controller.operations.scale(
            asked.model, asked.stage, asked.replicas, is_confirmed=asked.is_confirmed
        )
        return asdict(scaled)

    @app.post("/update")
    async def update(asked: Update) -> dict[str, Any]:
        app = parse_spec(asked.text, asked.where)
        since = controller.operations.update(app)
        desired = controller.fleet.desired.models
        versions = {name: model.version for name, model in desired.items()}
        return {"versions": versions, "since": since, "ready_s": app.ready_s}

    @app.post("/drain")
    async def drain(asked: Drain) -> dict[str, Any]:
        controller.operations.drain(asked.name)
        return {"name": asked.name}

    @app.post("/chaos")
    async def chaos(asked: Chaos) -> dict[str, Any]:
        broken = controller.operations.inject_fault(
            asked.action, asked.model, asked.stage, asked.seconds
        )
        return {"name": broken.name, "pid": broken.pid, "action": asked.action}

    @app.post("/shutdown")
    async def shutdown() -> dict[str, Any]:
        ended.set()
        return {"app": controller.app.app}

    return app
