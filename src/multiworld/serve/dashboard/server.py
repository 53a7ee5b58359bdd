"""Server of the dashboard: one page, the facts as server-sent events, and operations.

Like every command, the server talks to the controller over a Unix socket, with the
permissions of the user who started it. Whoever can reach the server's address gets
these permissions, so the server listens on loopback only, or requires a key.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import zlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from multiworld.errors import ServeError
from multiworld.serve.controller import answers
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.log_files import about
from multiworld.serve.controller.observe.facts import Facts, Series
from multiworld.serve.dashboard.patches import patch_of

PAGE = Path(__file__).with_name("page")
LOOK_S = 1.0  # seconds between polls of the service while a page is open
QUIET_S = 10.0  # seconds without a change after which readers get a comment
READERS = 64  # maximum number of open pages
WAY = 500  # maximum number of log entries shown for one request
LOG_BYTES = 64 * 1024  # maximum bytes shown from the end of a log
BODY_BYTES = 1024 * 1024  # maximum bytes of a request's body
# A chat may last long; its model's deadline limits it.
CHAT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
SEND_BYTES = 16 * 1024  # small: data that waits in the kernel is soon outdated
COOKIE = "multiworld_key"

LOCAL = ("localhost", "127.0.0.1", "[::1]")

# The page loads nothing from other origins, and no other page may frame it.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
        "form-action 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

# Operations that the page may request from the controller: method, path, and type of
# the answer. The body of an operation on a tenant names the tenant.
OPERATIONS: dict[str, tuple[str, str, type]] = {
    "scale": ("POST", "/scale", answers.Scaled),
    "drain": ("POST", "/drain", answers.Drained),
    "chaos": ("POST", "/chaos", answers.FaultInjected),
    "update": ("POST", "/update", answers.Updated),
    "cancel": ("POST", "/cancel", answers.Cancelled),
    "tenant_create": ("POST", "/tenants", answers.TenantWithKey),
    "tenant_change": ("PATCH", "/tenants/{name}", answers.TenantShown),
    "tenant_rotate": ("POST", "/tenants/{name}/rotate", answers.TenantWithKey),
    "tenant_revoke": ("POST", "/tenants/{name}/revoke", answers.TenantShown),
}


class Watch:
    """The facts of a service, polled while somebody reads them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.facts: dict[str, Any] = {}
        self._before: dict[str, Any] = {}  # the facts before the latest poll
        self._patch = b""  # event that turns ``_before`` into ``facts``
        self._polled = asyncio.Event()
        self._readers = 0
        self._looking: asyncio.Task[None] | None = None
        self._has_ended = False

    @property
    def is_full(self) -> bool:
        return self._readers >= READERS

    async def url(self) -> str:
        """Return the address of the gateways."""
        found = self.facts or plain(
            await asyncio.to_thread(self._service.ask, "GET", "/facts", Facts)
        )
        return str(found["url"])

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield all facts as an event, then the latest changes as patches.

        A slow reader misses polls, not changes: its patches skip to the latest facts.
        """
        self._readers += 1
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        sent: dict[str, Any] = {}
        try:
            while not self._has_ended:
                if self.facts and self.facts is not sent:
                    event, sent = self._event_after(sent), self.facts
                    yield event
                    continue
                try:
                    async with asyncio.timeout(QUIET_S):
                        await self._polled.wait()
                except TimeoutError:
                    yield b": nothing has changed\n\n"
        finally:
            self._readers -= 1
            if not self._readers and self._looking is not None:
                self._looking.cancel()
                self._looking, self.facts = None, {}

    def _event_after(self, sent: dict[str, Any]) -> bytes:
        if not sent:
            return _event("facts", self.facts)
        if sent is self._before:
            return self._patch
        return _event("patch", patch_of(sent, self.facts))

    def end(self) -> None:
        """End the readers' streams cleanly before the server shuts down."""
        self._has_ended = True
        self._wake()

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began_at = clock()
            try:
                found = await asyncio.to_thread(
                    self._service.ask, "GET", "/facts", Facts
                )
                self._tell({**plain(found), "is_old": False})
            except ServeError as error:
                text = (
                    "the service does not respond; everything below is out of date: "
                    f"{error}"
                )
                self._tell({**self.facts, "troubles": [text], "is_old": True})
            took_s = clock() - began_at
            await asyncio.sleep(max(LOOK_S - took_s, LOOK_S / 2))

    def _tell(self, found: dict[str, Any]) -> None:
        # Send events as an object: a patch would replace a list as a whole, but can add
        # single keys to an object.
        if isinstance(found.get("events"), list):
            found["events"] = {str(each["number"]): each for each in found["events"]}
        self._before, self.facts = self.facts, found
        self._patch = _event("patch", patch_of(self._before, found))
        self._wake()

    def _wake(self) -> None:
        polled, self._polled = self._polled, asyncio.Event()
        polled.set()


def plain(facts: Facts) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(answers.encode(facts))
    return found


def _event(kind: str, content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(content))


def make_dashboard(service: Service, key: str = "") -> Guard:
    """Return the ASGI application; visitors need ``key``, unless it is empty."""
    watch = Watch(service)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with aiohttp.ClientSession() as app.state.http:
            yield

    async def index(request: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def facts(request: Request) -> Response:
        if watch.is_full:
            text = f"the maximum of {READERS} open pages is reached; close one"
            return JSONResponse({"error": text}, 503)
        events, headers = watch.events(), {"Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            events, headers["Content-Encoding"] = compressed(events), "gzip"
        return StreamingResponse(events, 200, headers, "text/event-stream")

    def asked(path: str, kind: type) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that passes on the controller's answer."""

        async def endpoint(request: Request) -> Response:
            found: Any = await asyncio.to_thread(service.ask, "GET", path, kind)
            return Response(answers.encode(found), media_type="application/json")

        return endpoint

    async def way(request: Request) -> Response:
        paths = sorted(service.folder.logs.glob("*.log"))
        found = await asyncio.to_thread(way_of, request.path_params["id"], paths)
        return JSONResponse(found)

    async def do(request: Request) -> Response:
        name = request.path_params["operation"]
        if name not in OPERATIONS:
            return JSONResponse({"error": f"operation {name!r} is unknown"}, 404)
        method, path, kind = OPERATIONS[name]
        body = orjson.loads(await _body(request))
        if path.startswith("/tenants"):
            if not isinstance(body, dict) or not isinstance(body.get("name"), str):
                raise ValueError("the name of the tenant is missing")
            if "{name}" in path:
                path = path.format(name=quote(body.pop("name"), safe=""))
        done: Any = await asyncio.to_thread(service.ask, method, path, kind, json=body)
        return Response(answers.encode(done), media_type="application/json")

    async def log(request: Request) -> Response:
        name = request.path_params["name"]
        found = watch.facts.get("replicas", {}) | watch.facts.get("gateways", {})
        if name not in found:
            return JSONResponse({"error": f"process {name!r} is unknown"}, 404)
        text = await asyncio.to_thread(end_of, Path(found[name]["log"]))
        return Response(text, media_type="text/plain; charset=utf-8")

    async def chat(request: Request) -> Response:
        body = await _body(request)
        headers = {"content-type": "application/json"}
        if given := request.headers.get("authorization"):
            headers["authorization"] = given
        url = f"{await watch.url()}/v1/chat/completions"
        http: aiohttp.ClientSession = request.app.state.http
        try:
            answer = await http.post(
                url, data=body, headers=headers, ssl=False, timeout=CHAT
            )
        except aiohttp.ClientError as error:
            return JSONResponse({"error": f"no gateway answers: {error}"}, 502)

        async def parts() -> AsyncIterator[bytes]:
            async with answer:
                async for part in answer.content.iter_any():
                    yield part

        kind = answer.headers.get("content-type", "application/json")
        return StreamingResponse(parts(), answer.status, media_type=kind)

    app = Starlette(
        routes=[
            Route("/", index),
            Route("/facts", facts),
            Route("/series", asked("/series", Series)),
            Route("/spec", asked("/spec", answers.SpecShown)),
            Route("/tenants", asked("/tenants", list[answers.TenantShown])),
            Route("/requests/{id}", way),
            Route("/do/{operation}", do, methods=["POST"]),
            Route("/logs/{name:path}", log),
            Route("/chat", chat, methods=["POST"]),
        ],
        lifespan=lifespan,
        exception_handlers={ServeError: _refused, ValueError: _invalid},
    )
    app.mount("/page", StaticFiles(directory=PAGE))
    return Guard(app, key, watch.end)


async def _body(request: Request) -> bytes:
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > BODY_BYTES:
            raise ValueError(f"body is larger than {BODY_BYTES} bytes; send less")
    return bytes(found)


async def _refused(request: Request, error: Exception) -> Response:
    status = error.__dict__.get("status", 502)
    return JSONResponse({"error": str(error)}, status)


async def _invalid(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


async def compressed(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield events gzip-compressed and flushed one by one; a quarter of the size."""
    packer = zlib.compressobj(wbits=31)  # gzip format
    async with aclosing(events):
        async for event in events:
            yield packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH)


def way_of(request: str, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the last ``WAY`` log entries about a request, in order."""
    found = list(about(request, paths))
    found.sort(key=lambda each: each[1].at or 0.0)
    return [
        {"at": entry.at, "process": name, "text": "\n".join(entry.lines)}
        for name, entry in found[-WAY:]
    ]


def end_of(path: Path) -> bytes:
    """Return the last ``LOG_BYTES`` of a log, or why it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            return file.read(LOG_BYTES)
    except OSError as error:
        return f"{path} cannot be read on this machine: {error.strerror}".encode()


Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class Guard:
    """Access control of the dashboard; also adds its security headers.

    Without a key, the ``Host`` header must name this machine, which prevents DNS
    rebinding. Requests other than GET and HEAD must have the ``Origin`` of the page.
    """

    def __init__(self, app: Asgi, key: str, end: Callable[[], None]) -> None:
        self._app, self._key = app, key
        self.end = end  # ends the streams of all open pages

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        answer = self._refusal(request)
        if answer is not None:
            await answer(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                found = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *found]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if not self._key:
            if host.rpartition(":")[0] not in LOCAL and host not in LOCAL:
                return JSONResponse({"error": f"{host!r} is not this machine"}, 403)
        elif not self._is_key(request.cookies.get(COOKIE, "")):
            given = request.query_params.get("key", "")
            if request.url.path == "/" and self._is_key(given):
                found = RedirectResponse("/", 303)
                found.set_cookie(COOKIE, given, httponly=True, samesite="strict")
                return found
            return JSONResponse({"error": "open the page with its ?key=…"}, 401)
        if request.method not in ("GET", "HEAD"):
            origin = request.headers.get("origin", "")
            if origin.partition("://")[2] != host:
                text = f"Origin {origin!r} is not this page's origin"
                return JSONResponse({"error": text}, 403)
        return None

    def _is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._key.encode())


class _Protocol(H11Protocol):
    """Buffers little for a slow connection, so newer facts replace waiting ones."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)


class PageServer(uvicorn.Server):
    """HTTP server of a page; ends open pages' streams before it waits for requests."""

    def __init__(self, page: Guard, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                page,
                host=host,
                port=port,
                http=_Protocol,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._page = page

    def bind(self) -> socket.socket:
        """Return the socket for ``run``."""
        sock = self.config.bind_socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        return sock

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._page.end()
        super().handle_exit(sig, frame)
