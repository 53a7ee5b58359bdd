"""Identities of versions: hashes of all bytes that a version's tokens depend on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Set
from pathlib import Path

from multiworld.errors import SpecError
from multiworld.net.threads import in_thread
from multiworld.serve.controller.placement.replica_placement import Specs
from multiworld.serve.engine.models.factory import changed_since, identified
from multiworld.serve.engine.models.identity import forget_copies
from multiworld.serve.spec.schema import AppSpec


class Identities:
    """Computes identities in threads; ``copies`` is the folder of copied files."""

    def __init__(self, specs: Specs, copies: Path) -> None:
        self._specs, self._copies = specs, copies
        # ``forget_copies`` would remove the copies that another call is making.
        self._lock = asyncio.Lock()

    async def identify(self, app: AppSpec, used: Set[tuple[str, str]]) -> AppSpec:
        """Add identities, except to ``used``; raise SpecError on unreadable files."""
        async with self._lock:
            return await self._identified(app, used)

    async def _identified(self, app: AppSpec, used: Set[tuple[str, str]]) -> AppSpec:
        known = {
            name: spec
            for name, version in used
            if (spec := self._specs.get(name, {}).get(version)) is not None
            and spec.identity is not None
            and name in app.models
            and app.models[name].version == version
        }
        kept = [
            spec.identity.kept
            for versions in (*self._specs.values(), known)
            for spec in versions.values()
            if spec.identity is not None
        ]

        def identify() -> AppSpec:
            forget_copies(self._copies, kept)
            models = {}
            for name, spec in app.models.items():
                if name in known:
                    update = {"identity": known[name].identity}
                    models[name] = spec.model_copy(update=update)
                else:
                    models[name] = identified(spec, self._copies)
            return app.model_copy(update={"models": models})

        found: AppSpec = await in_thread(identify)
        return found


async def find_changes(app: AppSpec) -> dict[str, str]:
    """Return, by model, a file that has changed although the version has not."""
    models = app.models.items()
    specs = {name: spec for name, spec in models if spec.identity is not None}

    def find() -> dict[str, str]:
        found = {}
        for name, spec in specs.items():
            with contextlib.suppress(SpecError):
                found[name] = changed_since(spec)
        return {name: path for name, path in found.items() if path}

    found: dict[str, str] = await in_thread(find)
    return found
