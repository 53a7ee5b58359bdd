"""OpenAI's routes that list the models that a client may use."""

from __future__ import annotations

import time
from typing import Any

from starlette.responses import Response

from multiworld.serve.gateway.http.calls import Call
from multiworld.serve.gateway.http.http_responses import json_response

BEGAN_AT = int(time.time())  # start, in epoch seconds; field ``created`` of all models


async def listed_models(call: Call) -> Response:
    """List the models that the client may use.

    ``max_model_len`` is present for models that generate text, and ``parent`` for LoRA
    adapters of another model, as in vLLM.
    """
    data = [_shown(call, name) for name in call.gateway.names(call.tenant)]
    return json_response({"object": "list", "data": data})


async def listed_model(call: Call) -> Response:
    """Return one model."""
    call.gateway.model(call.name, None, call.tenant)
    return json_response(_shown(call, call.name))


def _shown(call: Call, name: str) -> dict[str, Any]:
    gateway = call.gateway
    found = {"id": name, "object": "model", "created": BEGAN_AT}
    found["owned_by"] = "multiworld"
    if gateway.adapter(name):
        found["parent"] = gateway.base(name)
    max_tokens = gateway.max_tokens(name, call.tenant)
    return found if max_tokens is None else {**found, "max_model_len": max_tokens}
