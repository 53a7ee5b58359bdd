"""The controller's admin interface: HTTP on a Unix socket private to its user."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import Field

from multiworld.errors import ServeError, SpecError
from multiworld.net.threads import in_thread
from multiworld.serve.controller import answers
from multiworld.serve.controller.admin_tenants import AdminRequest, add_tenants, respond
from multiworld.serve.controller.controller import Controller
from multiworld.serve.controller.identities import find_changes
from multiworld.serve.controller.placement.replica_placement import Specs
from multiworld.serve.controller.spec_shown import shown
from multiworld.serve.controller.status import nodes_of, with_reports
from multiworld.serve.engine.models.factory import fetch, import_new
from multiworld.serve.engine.models.identity import refusal
from multiworld.serve.spec.loader import parse_spec
from multiworld.serve.spec.schema import AppSpec

IMPORT_S = 20.0  # maximum seconds to import the code that an update names


class Scale(AdminRequest):
    """Body of ``/scale``: run a stage with this many replicas."""

    model: str
    stage: str
    replicas: int = Field(ge=0, le=4096)
    is_confirmed: bool = False


class Update(AdminRequest):
    """Body of ``/update``: the new spec; ``text`` is YAML, ``where`` its path."""

    text: str
    where: str = "spec"


class Drain(AdminRequest):
    """Body of ``/drain``: the process to replace."""

    name: str


class Cancel(AdminRequest):
    """Body of ``/cancel``: the request, by its id."""

    request: str = Field(min_length=1, max_length=200)


class Chaos(AdminRequest):
    """Body of ``/chaos``: the fault to inject, and the stage to inject it into.

    The model ``gateway`` has no stage.
    """

    action: Literal["kill", "stop", "cut"]
    model: str
    stage: str = ""
    seconds: float = Field(default=5.0, gt=0, le=3600)


async def is_done_before(ended: asyncio.Event, call: Awaitable[None]) -> bool:
    """Await ``call``; return False if the service shuts down first."""
    work = asyncio.ensure_future(call)
    ending = asyncio.ensure_future(ended.wait())
    either: set[asyncio.Future[Any]] = {work, ending}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        return work.done()
    finally:
        ending.cancel()
        work.cancel()


def make_admin(controller: Controller, ended: asyncio.Event) -> FastAPI:
    """Return the admin application; a shutdown request sets ``ended``."""
    app = FastAPI(title="multiworld controller", redoc_url=None)

    @app.exception_handler(ServeError)
    async def problem(request: Request, error: ServeError) -> Response:
        refused = answers.RefusedByController(
            str(error), getattr(error, "problems", ())
        )
        return respond(refused, error.status if error.status != 500 else 409)

    add_tenants(app, controller.tenanting)

    _add_views(app, controller)
    _add_operations(app, controller, ended)

    @app.post("/shutdown")
    async def shutdown() -> Response:
        ended.set()
        return respond(answers.ShuttingDown(controller.app.app))

    return app


def _add_views(app: FastAPI, controller: Controller) -> None:
    @app.get("/status")
    async def status(reports: bool = False) -> Response:
        found = controller.status()
        if reports:
            found = with_reports(found, await controller.reports())
        return respond(found)

    @app.get("/facts")
    async def facts() -> Response:
        return respond(controller.facts())

    @app.get("/spec")
    async def spec() -> Response:
        before = controller.operations.before
        return respond(shown(controller.app, before, controller.status()))

    @app.get("/series")
    async def series() -> Response:
        return respond(controller.observer.series)

    @app.get("/nodes")
    async def nodes() -> Response:
        return respond(nodes_of(controller.bookings.ledger))

    @app.get("/decisions")
    async def decisions(last: int = 10, snapshots: bool = False) -> Response:
        journal = controller.journal
        found = journal.last(last, with_snapshots=snapshots)
        reasons = journal.reasons()
        return respond(answers.DecisionsAnswer(tuple(found), tuple(reasons)))

    @app.get("/events")
    async def events(since: int = 0) -> Response:
        return respond(controller.history.since(since))


async def _import_code(spec: AppSpec, known: Specs) -> None:
    """Import the users' code that a spec names; it may hang or exit."""
    try:
        async with asyncio.timeout(IMPORT_S):
            await in_thread(partial(import_new, spec, known))
    except TimeoutError:
        raise ServeError(
            f"importing the code that the spec names takes over {IMPORT_S:.0f} s; the "
            "update was not applied"
        ) from None
    except RuntimeError as error:
        raise SpecError(
            f"the code that the spec names cannot be used: {error}"
        ) from error


def _add_operations(app: FastAPI, controller: Controller, ended: asyncio.Event) -> None:
    operations, updating = controller.operations, asyncio.Lock()
    # ``arrivals`` numbers the updates in the order of their arrival; ``updated[0]`` is
    # the number of the latest one that was applied.
    arrivals, updated = itertools.count(1), [0]

    def check_running() -> None:
        if ended.is_set():
            raise ServeError("the service is shutting down; nothing was changed")

    @app.post("/scale")
    async def scale(asked: Scale) -> Response:
        check_running()
        scaled = operations.scale(
            asked.model, asked.stage, asked.replicas, is_confirmed=asked.is_confirmed
        )
        await controller.confirmed()
        return respond(scaled)

    @app.post("/update")
    async def update(asked: Update) -> Response:
        number = next(arrivals)
        spec = await asyncio.to_thread(parse_spec, asked.text, asked.where)
        await is_done_before(ended, in_thread(partial(fetch, spec)))
        async with updating:
            check_running()
            if number < updated[0]:
                raise ServeError(
                    "a later update was applied while this one fetched its models; "
                    "see `multiworld status`, and repeat this update if you want it"
                )
            await _import_code(spec, controller.specs)
            spec = await controller.identify(spec)
            for name, path in (await find_changes(spec)).items():
                raise ServeError(f"model {name!r}: {refusal(path)}")
            check_running()
            since = operations.update(spec)
            updated[0] = number
            desired = controller.fleet.desired.models
        await controller.confirmed()
        # While the service waits for its machines, the desired state is empty, and the
        # versions are those of the spec.
        models = desired or spec.models
        versions = {name: model.version for name, model in models.items()}
        starts = [model.start_s or 0.0 for model in desired.values()]
        return respond(answers.Updated(versions, since, max([spec.ready_s, *starts])))

    @app.post("/drain")
    async def drain(asked: Drain) -> Response:
        check_running()
        operations.drain(asked.name)
        await controller.confirmed()
        return respond(answers.Drained(asked.name))

    @app.post("/cancel")
    async def cancel(asked: Cancel) -> Response:
        check_running()
        await operations.cancel(asked.request)
        return respond(answers.Cancelled(asked.request))

    @app.post("/chaos")
    async def chaos(asked: Chaos) -> Response:
        check_running()
        broken = operations.inject_fault(
            asked.action, asked.model, asked.stage, asked.seconds
        )
        return respond(answers.FaultInjected(broken.name, broken.pid, asked.action))
