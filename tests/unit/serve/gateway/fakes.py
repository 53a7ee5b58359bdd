"""A gateway with a fake dispatcher, and clients of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import torch

from multiworld.serve.gateway.admission.authenticator import Authenticator
from multiworld.serve.gateway.admission.timing import Timing
from multiworld.serve.gateway.http.app import App, make_app
from multiworld.serve.gateway.http.body_limits import BodyBudget, BodyLimits
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_request import CONNECTION, Connection
from multiworld.serve.gateway.http_routes import ROUTES
from multiworld.serve.gateway.openai.schemas import schemas
from multiworld.serve.gateway.requests.dispatcher import Dispatcher
from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.spec.stage import Model, Stage, Tensors, TensorSpec
from multiworld.serve.tenants.directory import Key, Tenant
from multiworld.serve.tenants.keys import make_key
from multiworld.serve.wire.origin import NOWHERE, Origin
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)

MODEL = Model(
    stages=[Stage(load=lambda context: lambda tensors: tensors)],
    inputs=[TensorSpec("x", "FP32", (-1,))],
    outputs=[TensorSpec("y", "FP32", (-1,))],
)


class FakeText:
    """Tokenizer with one token per letter."""

    def encode(self, text: str) -> Tensors:
        return {"ids": torch.tensor([[ord(letter) for letter in text]])}


TEXT = Model(
    stages=MODEL.stages,
    inputs=[TensorSpec("ids", "INT64", (-1, -1))],
    outputs=[TensorSpec("embedding", "FP32", (-1, 2))],
    text=FakeText,
)


class FakeDispatcher(Dispatcher):
    """Dispatcher whose answers a test sets.

    Attributes:
        lacking: Stages without a replica, by model.
    """

    def __init__(self) -> None:
        super().__init__("gateway/1")
        self.answers: Callable[[str, Tensors], Awaitable[Tensors]] = doubled
        self.calls: list[dict[str, Any]] = []
        self.lacking: dict[str, list[int]] = {}
        self.quarantined: list[tuple[str, str]] = []

    async def infer(
        self,
        model: str,
        tensors: Tensors,
        *,
        deadline_s: float | None = None,
        session: str | None = None,
        via: dict[int, str] | None = None,
        share: Share = DEFAULT_SHARE,
        timing: Timing | None = None,
        version: str = "",
        origin: Origin = NOWHERE,
        is_resumed: bool = False,
    ) -> Tensors:
        call = {"model": model, "deadline_s": deadline_s, "session": session}
        call["version"] = version
        self.calls.append({**call, "tenant": share.tenant, "tensors": tensors})
        if timing is not None:
            timing.asked(time.monotonic())
        answer = await self.answers(model, tensors)
        if timing is not None:
            timing.answered(time.monotonic(), 0.25, 0.5)
        return answer

    def missing(self, model: str) -> list[int]:
        return self.lacking.get(model, [])

    def quarantine(self, tenant: str, model: str) -> None:
        self.quarantined.append((tenant, model))


async def doubled(model: str, tensors: Tensors) -> Tensors:
    """Return twice the inputs; for token ids, an embedding."""
    if "ids" in tensors:
        total = tensors["ids"].sum().float()
        return {"embedding": torch.stack([total, -total]).reshape(1, 2)}
    return {"y": tensors["x"] * 2}


def raising(error: Exception) -> Callable[[str, Tensors], Awaitable[Tensors]]:
    async def answer(model: str, tensors: Tensors) -> Tensors:
        raise error

    return answer


class Hanging:
    def __init__(self) -> None:
        self.is_asked, self.is_cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, model: str, tensors: Tensors) -> Tensors:
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise
        raise AssertionError("unreachable")


class Fake:
    def __init__(self, *tenants: Tenant, max_body_bytes: int = 1 << 20) -> None:
        self.dispatcher = FakeDispatcher()
        self.keys: dict[str, str] = {}
        authenticator = Authenticator(needs_key=bool(tenants))
        for tenant in tenants:
            text, key_id, digest = make_key()
            self.keys[tenant.name] = text
            key = Key(id=key_id, digest=digest, made_at=0.0)
            authenticator.directory.put([replace(tenant, keys=(*tenant.keys, key))])
        limits = BodyLimits(max_body_bytes, max_body_bytes)
        bodies = BodyBudget(4 * max_body_bytes)
        self.gateway = Gateway(self.dispatcher, limits, bodies, authenticator)
        self.serve(m=MODEL, t=TEXT)
        self.app = make_app(self.gateway, ROUTES, schemas())

    def serve(
        self,
        version: str = "1",
        on_demand: tuple[int, ...] = (),
        state: ReplicaState = ReplicaState.READY,
        **models: Model,
    ) -> None:
        """Replace the routing table by these loaded models; ``__`` stands for ``@``."""
        routes = {
            name.replace("__", "@"): Route(version, {version: 1}, on_demand=on_demand)
            for name in models
        }
        replicas = {name: Replica(name, name, version, 0, state) for name in routes}
        self.dispatcher.table = RoutingTable(1, ("gateway/1",), routes, replicas)
        for name, model in models.items():
            known = self.gateway.models.setdefault(name.replace("__", "@"), {})
            known[version] = model

    def client(self, tenant: str = "", **headers: str) -> httpx.AsyncClient:
        if tenant:
            headers["authorization"] = f"Bearer {self.keys[tenant]}"
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(
            transport=transport, base_url="http://gateway", headers=headers
        )

    def requests(self) -> dict[tuple[str, str], float]:
        return {
            (labels[0], labels[1]): value
            for kind, labels, value in self.gateway.counted(self.gateway.report())
            if kind == "requests"
        }


def body(*values: float, **more: Any) -> dict[str, Any]:
    """Return the body of an inference request to model ``m``."""
    size = [len(values)]
    item = {"name": "x", "datatype": "FP32", "shape": size, "data": list(values)}
    return {"inputs": [item], **more}


class Disconnecting:
    def __init__(
        self, app: App, path: str, *parts: bytes, is_whole: bool = True
    ) -> None:
        self._app, self._path = app, path
        self._messages: list[dict[str, Any]] = [
            {
                "type": "http.request",
                "body": part,
                "more_body": number + 1 < len(parts) or not is_whole,
            }
            for number, part in enumerate(parts)
        ]
        self._is_gone = asyncio.Event()
        self._connection = Connection()
        self.sent: list[Any] = []

    def hang_up(self) -> None:
        self._is_gone.set()
        self._connection.lost()

    async def _receive(self) -> Any:
        if self._messages:
            return self._messages.pop(0)
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"host", b"gateway")],
            "server": ("gateway", 80),
            "client": ("client", 1),
            CONNECTION: self._connection,
        }
        await self._app(scope, self._receive, self._send)
