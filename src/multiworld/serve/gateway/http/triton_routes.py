"""Triton's routes for configurations and the repository index."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request, Response

from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_responses import json_response
from multiworld.serve.gateway.http.openapi import KNOWN_MODEL
from multiworld.serve.spec.stage import Model, TensorSpec

PLATFORM = "multiworld_pytorch"  # of every model in the Open Inference Protocol

TEXT_INPUTS = [TensorSpec("text_input", "BYTES", (1,))]
TEXT_OUTPUTS = [TensorSpec("text_output", "BYTES", (1,))]  # of ``generate``


def tensors_of(model: Model) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
    if model.generation is not None:
        return TEXT_INPUTS, TEXT_OUTPUTS
    return model.inputs, model.outputs


def type_of(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def add_triton(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v2/models/{name}/config", tags=["inference"], openapi_extra=KNOWN_MODEL)
    @app.get(
        "/v2/models/{name}/versions/{version}/config",
        tags=["inference"],
        openapi_extra=KNOWN_MODEL,
    )
    async def config(
        name: str, request: Request, version: str | None = None
    ) -> Response:
        """Return the configuration of a model: its inputs, outputs and version."""
        tenant = gateway.authenticator.identify(request.headers)
        current, model = gateway.model(name, version, tenant)
        inputs, outputs = tensors_of(model)
        fields = {
            key: [
                {"name": s.name, "data_type": type_of(s.datatype), "dims": s.shape}
                for s in found
            ]
            for key, found in (("input", inputs), ("output", outputs))
        }
        shown = {"name": name, "platform": PLATFORM, "backend": "multiworld"}
        versions = {"specific": {"versions": [current]}}
        return json_response({**shown, **fields, "version_policy": versions})

    @app.post("/v2/repository/index", tags=["inference"])
    async def index(request: Request) -> Response:
        """List the models that the client may use, with their states."""
        tenant = gateway.authenticator.identify(request.headers)
        routes = gateway.dispatcher.table.routes
        served = [(name, gateway.route(name, tenant)) for name in gateway.names(tenant)]
        rows = [
            {
                "name": name,
                "version": routes[route].version,
                "state": "READY" if gateway.is_ready(route) else "UNAVAILABLE",
                "reason": "",
            }
            for name, route in served
        ]
        return json_response(rows)

    async def absent() -> Response:
        """Refuse a request that this server serves in another way."""
        text = (
            "not available here: Prometheus metrics are at /metrics, and models can be "
        )
        return json_response({"error": f"{text}changed with `multiworld update`"}, 501)

    for path in ("/v2/models/stats", "/v2/models/{name}/stats"):
        app.add_api_route(path, absent, methods=["GET"], include_in_schema=False)
    path = "/v2/repository/models/{name}/{action}"
    app.add_api_route(path, absent, methods=["POST"], include_in_schema=False)
