"""Launchers by name, or by the import path of a function that makes one. Shell.

To add a launcher, write a module with ``async def make(context) -> Launcher`` and name
it here; one that lives elsewhere is given as ``launcher: package.module:make``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multiworld.errors import SpecError
from multiworld.serve.launchers.base import Launcher, LauncherContext
from multiworld.serve.models.factory import import_factory

LAUNCHERS = {
    "local": "multiworld.serve.launchers.local:make",
    "ray": "multiworld.serve.launchers.ray.launcher:make",
}
"""The function that makes each launcher, by the name that a spec gives."""


async def make_launcher(context: LauncherContext) -> Launcher:
    """Return the launcher that a spec names.

    Raises:
        SpecError: It cannot be imported.
        ServeError: It cannot be started.

    Cancellation: as for the launcher.
    """
    launcher: Launcher = await _maker(context.app.launcher)(context)
    return launcher


def check_launcher(name: str) -> None:
    """Check that there is a launcher of this name, or at this import path.

    Raises:
        SpecError: There is none.
    """
    _maker(name)


def _maker(name: str) -> Callable[[LauncherContext], Any]:
    path = LAUNCHERS.get(name, name)
    if ":" not in path:
        known = ", ".join(LAUNCHERS)
        raise SpecError(
            f"no launcher {name!r}; there are {known}, or give package.module:function"
        )
    return import_factory(path)
