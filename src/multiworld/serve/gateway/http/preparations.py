"""Requests whose prompts or grammars are being prepared: no stream exists yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from multiworld.serve.wire.control_messages import ModelLoad, TenantLoad


@dataclass(slots=True, eq=False)
class Preparation:
    tenant: str
    model: str  # as the client names it, until the served one is known
    began_at: float
    is_compiling: bool = False  # its grammar is being compiled, or waits for that


class Preparations:
    """The requests in preparation at one gateway."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # A dict, because it is ordered: the oldest request is first.
        self._known: dict[Preparation, None] = {}

    def __len__(self) -> int:
        return len(self._known)

    @contextlib.contextmanager
    def preparing(self, tenant: str, model: str) -> Iterator[Preparation]:
        """Count a request until it is prepared, refused or cancelled."""
        one = Preparation(tenant, model, self._clock())
        self._known[one] = None
        try:
            yield one
        finally:
            del self._known[one]

    def of_tenants(self) -> dict[str, TenantLoad]:
        found: dict[str, TenantLoad] = {}
        for one in self._known:
            before = found.get(one.tenant, TenantLoad())
            found[one.tenant] = TenantLoad(
                before.in_flight + 1,
                before.waiting + 1,
                before.structured + one.is_compiling,
            )
        return found

    def of_models(self) -> dict[str, ModelLoad]:
        found: dict[str, ModelLoad] = {}
        for one in self._known:
            before = found.get(one.model, ModelLoad())
            found[one.model] = ModelLoad(
                before.waiting + 1, 0, before.compiling + one.is_compiling
            )
        return found

    def oldest_s(self) -> dict[str, float]:
        """Return how long each model's oldest request has been in preparation."""
        now = self._clock()
        found: dict[str, float] = {}
        for one in self._known:
            found.setdefault(one.model, now - one.began_at)
        return found
