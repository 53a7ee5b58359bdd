"""Adapters to external engines: the known ones by name, and checks of users' own."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from multiworld.errors import SpecError
from multiworld.serve.engine.external.whole_engine import EngineSettings, WholeEngine
from multiworld.serve.engine.models.factory import import_factory

HERE = "multiworld.serve.engine.external"

# For each known engine, the function that makes its adapter.
ENGINES = {
    "vllm": f"{HERE}.vllm:VllmEngine",
    "llama.cpp": f"{HERE}.llama_cpp:LlamaCppEngine",
    "openai": f"{HERE}.openai_servers:OpenAiEngine",
}


def maker_of(engine: str) -> Callable[[EngineSettings], WholeEngine]:
    name = ENGINES.get(engine, engine)
    if ":" not in name:
        known = ", ".join(ENGINES)
        raise SpecError(
            f"engine {engine!r} is not known; name one of {known}, or give the "
            "package.module:function of an adapter"
        )
    return import_factory(name)


def wrong_in(made: object) -> str:
    """Return why something is not a ``WholeEngine``; empty if it is one."""
    methods = "start", "check", "generate", "wait_lost", "stopped_s", "close", "kill"
    for name in methods:
        found = getattr(made, name, None)
        if not callable(found):
            return f"is a {type(made).__name__} without the method {name}"
        is_awaited = name in ("start", "wait_lost", "close")
        if not is_awaited and inspect.iscoroutinefunction(found):
            how = " without a yield" if name == "generate" else ""
            return f"has an `async def {name}`{how}"
    for name in ("usage", "phase"):
        if not hasattr(made, name):
            return f"has no attribute {name}"
    return ""
