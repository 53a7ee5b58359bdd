"""Model builds at a gateway by users' factories, which may hang or raise."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from multiworld.errors import MultiWorldError
from multiworld.net.threads import in_thread
from multiworld.serve.engine.models.factory import build_model
from multiworld.serve.gateway.admission.authenticator import ModelVersion
from multiworld.serve.spec.schema import ModelSpec
from multiworld.serve.spec.stage import Model

logger = logging.getLogger("multiworld.serve")

TURN_S = 5.0  # maximum seconds that a build waits for the previous one to end


class ModelBuilds:
    """Builds each version of a model once, in a thread; hung builds block no others."""

    def __init__(
        self,
        built: Callable[[str, ModelSpec, Model], None],
        ended: Callable[[], None],  # called after each build, even if it failed
    ) -> None:
        self._built, self._ended = built, ended
        self._tasks: dict[ModelVersion, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    def __contains__(self, version: ModelVersion) -> bool:
        """Return whether a version is being built."""
        return version in self._tasks

    def begin(self, name: str, version: str, text: str) -> None:
        key = name, version
        if key not in self._tasks:
            self._tasks[key] = asyncio.ensure_future(self._build(key, text))

    async def wait(self, limit_s: float, version: ModelVersion | None = None) -> None:
        """Wait at most ``limit_s`` for the build of a version, or for all builds."""
        awaited = [t for v, t in self._tasks.items() if version in (None, v)]
        if awaited:
            await asyncio.wait(awaited, timeout=limit_s)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _build(self, key: ModelVersion, text: str) -> None:
        name = key[0]
        try:
            async with self._turn:
                spec = ModelSpec.model_validate_json(text)
                building = asyncio.ensure_future(in_thread(partial(build_model, spec)))
                if not (await asyncio.wait({building}, timeout=TURN_S))[0]:
                    logger.warning(
                        "model %s is still being built; other models no longer wait "
                        "for it",
                        name,
                    )
            self._built(name, spec, await building)
        except MultiWorldError as error:
            logger.error("model %s: %s", name, error)
        except Exception:  # a factory may raise anything; serve the other models
            logger.exception("model %s cannot be built", name)
        finally:
            del self._tasks[key]
            self._ended()
