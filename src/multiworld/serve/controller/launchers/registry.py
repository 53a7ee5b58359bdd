"""Launchers by name, or by the import path of their factory: ``launcher:
package.module:make`` names an ``async def make(context) -> Launcher``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from multiworld.errors import SpecError
from multiworld.serve.controller.launchers.base import Launcher, LauncherContext
from multiworld.serve.engine.models.factory import import_factory

# Import path of each launcher's factory, by its name in a spec.
LAUNCHERS = {
    "local": "multiworld.serve.controller.launchers.local:make",
    "ray": "multiworld.serve.controller.launchers.ray.launcher:make",
}


def maker_of(name: str) -> Callable[[LauncherContext], Awaitable[Launcher]]:
    """Return the factory of a launcher by its name or import path."""
    path = LAUNCHERS.get(name, name)
    if ":" not in path:
        known = ", ".join(LAUNCHERS)
        raise SpecError(f"no launcher {name!r}; use {known} or package.module:function")
    return import_factory(path)
