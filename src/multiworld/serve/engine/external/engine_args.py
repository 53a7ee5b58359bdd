"""Arguments of engines (``engine_args`` of the spec): checks and flags. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from multiworld.errors import InvalidRequestError, SpecError
from multiworld.serve.engine.external.whole_engine import EngineSettings, Run

# Arguments of any engine that would change a server's address, or the names of the
# models that it serves.
ELSEWHERE = (
    "uds",
    "root_path",
    "api_prefix",
    "config",
    "headless",
    "runner",
    "served_model_name",
    "alias",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_key_file",
    "ssl_cert_file",
    "api_key_file",
)


def refuse_reserved(args: Mapping[str, Any], reserved: Mapping[str, str]) -> None:
    """Raise SpecError if ``engine_args`` sets an argument that the service sets."""
    for name in args:
        field = name.replace("-", "_")
        if (known := reserved.get(field)) is not None or field in ELSEWHERE:
            remedy = f"use `{known}` instead" if known else "remove it"
            raise SpecError(f"engine_args: {name} is decided by the service; {remedy}")


def check_adapter(run: Run, settings: EngineSettings) -> None:
    """Raise InvalidRequestError if an update has removed the adapter of a run."""
    if run.adapter not in settings.adapters:
        text = f"adapter {run.adapter!r} is no longer served"
        raise InvalidRequestError(text, param="model")


def gpu_environment(
    settings: EngineSettings, visible: Sequence[str] | None
) -> dict[str, str]:
    """Return environment variables that show an engine only its replica's GPUs."""
    names = [str(g) if visible is None else visible[g] for g in settings.gpus]
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(names)}


def flags_of(args: Mapping[str, Any]) -> list[str]:
    """Return arguments as flags: ``{"max_model_len": 5}`` as ``--max-model-len 5``."""
    found: list[str] = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                pass
            case True:
                found.append(f"--{flag}")
            case False:
                found.append(f"--no-{flag}")
            case list():
                found += [f"--{flag}", *map(str, value)]
            case dict():
                found += [f"--{flag}", json.dumps(value)]
            case _:
                found += [f"--{flag}", str(value)]
    return found
