"""Routes that describe the server and its models, including Triton's.

https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

import multiworld
from multiworld.serve.gateway.http.calls import Call
from multiworld.serve.gateway.http.http_responses import json_response
from multiworld.serve.spec.stage import Model, TensorSpec

PLATFORM = "multiworld_pytorch"  # field ``platform`` of each model's metadata

TEXT_INPUTS = [TensorSpec("text_input", "BYTES", (1,))]
TEXT_OUTPUTS = [TensorSpec("text_output", "BYTES", (1,))]  # outputs of ``generate``


async def server(call: Call) -> Response:
    """Return the server's name, version and extensions."""
    found = {"name": "multiworld", "version": multiworld.__version__}
    return json_response({**found, "extensions": ["binary_tensor_data"]})


async def listed(call: Call) -> Response:
    """List the models that the client may use."""
    names = call.gateway.names(call.tenant)
    return json_response({"models": [{"name": name} for name in names]})


async def metadata(call: Call) -> Response:
    """Return the inputs and outputs of a model."""
    current, model = call.gateway.model(call.name, call.version, call.tenant)
    inputs, outputs = _tensors_of(model)
    return json_response(
        {
            "name": call.name,
            "versions": [current],
            "platform": PLATFORM,
            "inputs": [_shown(spec) for spec in inputs],
            "outputs": [_shown(spec) for spec in outputs],
        }
    )


async def ready(call: Call) -> Response:
    """Report whether every stage of a model has a replica."""
    gateway, name = call.gateway, call.name
    gateway.model(name, call.version, call.tenant)
    is_ready = gateway.is_ready(gateway.route(name, call.tenant))
    return json_response({"name": name, "ready": is_ready}, 200 if is_ready else 503)


async def config(call: Call) -> Response:
    """Return the configuration of a model: its inputs, outputs and version."""
    current, model = call.gateway.model(call.name, call.version, call.tenant)
    inputs, outputs = _tensors_of(model)
    fields = {
        key: [
            {"name": s.name, "data_type": _type_of(s.datatype), "dims": s.shape}
            for s in found
        ]
        for key, found in (("input", inputs), ("output", outputs))
    }
    shown = {"name": call.name, "platform": PLATFORM, "backend": "multiworld"}
    versions = {"specific": {"versions": [current]}}
    return json_response({**shown, **fields, "version_policy": versions})


async def index(call: Call) -> Response:
    """List the models that the client may use, with their states."""
    gateway, tenant = call.gateway, call.tenant
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


async def absent(call: Call) -> Response:
    """Refuse a request of Triton's API for which this server has another interface."""
    text = (
        "not available here: Prometheus metrics are at /metrics, and models can be "
        "changed with `multiworld update`"
    )
    return json_response({"error": text}, 501)


def _tensors_of(model: Model) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
    if model.generation is not None:
        return TEXT_INPUTS, TEXT_OUTPUTS
    return model.inputs, model.outputs


def _shown(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _type_of(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
