"""The logits processor for vLLM, for whichever runner vLLM chooses."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from typing import Any

from .structures import HERE, RUNNER


def _made(cls: type, vllm_config: Any, *rest: Any) -> Any:
    """Return the processor of the calling runner; V1 also passes a device."""
    if len(rest) == 1:
        from .continuation import Continuation

        _note("v2", vllm_config)
        return Continuation(vllm_config, *rest)
    from .sampling import MultiworldSampling

    _note("v1", vllm_config)
    if vllm_config.scheduler_config.async_scheduling:
        # This processor needs the tokens of the previous step. With asynchronous
        # scheduling, they arrive one step late.
        raise RuntimeError(
            "runner V1 does not support --async-scheduling here; remove it"
        )
    return MultiworldSampling(vllm_config, *rest)


def _note(runner: str, vllm_config: Any) -> None:
    release = getattr(sys.modules.get("vllm"), "__version__", "")
    found = {"runner": runner, "release": release}
    found["is_async"] = bool(vllm_config.scheduler_config.async_scheduling)
    path = HERE / f"{RUNNER}.{os.getpid()}"
    with contextlib.suppress(OSError):  # the replica has removed the folder
        path.write_text(json.dumps(found))
        path.replace(HERE / RUNNER)


def _interfaces() -> list[type]:
    """Return the classes that a processor must inherit from, in this vLLM."""
    found: list[type] = []
    with contextlib.suppress(ImportError):
        from vllm.v1.sample.logits_processor import LogitsProcessor as V1

        found.append(V1)
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2

        found.append(V2)
    return found


# vLLM checks this class and creates an instance of it. ``__new__`` returns the
# processor for the chosen runner instead.
Multiworld: Any = types.new_class(
    "Multiworld",
    tuple(_interfaces()),
    exec_body=lambda body: body.update(__new__=_made, __module__=__name__),
)
