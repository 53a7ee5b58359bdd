"""Snapshots as plain data and back, so that decisions can be replayed. Pure."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter

from multiworld.serve.controller.scaling.default_policy import PolicyState
from multiworld.serve.controller.scaling.snapshot import Snapshot
from multiworld.serve.controller.scaling.token_policy import TokenState

_SNAPSHOT: TypeAdapter[Snapshot] = TypeAdapter(Snapshot)
_MEMORY: TypeAdapter[PolicyState] = TypeAdapter(PolicyState)
_TOKEN_MEMORY: TypeAdapter[TokenState] = TypeAdapter(TokenState)


def snapshot_to_json(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as plain data; a custom policy's memory as its ``repr``."""
    found = asdict(replace(snapshot, memory=None))
    memory = snapshot.memory
    if isinstance(memory, PolicyState | TokenState):
        found["memory"] = asdict(memory)
    elif memory is not None:
        found["memory"] = repr(memory)
    return found


def snapshot_from_json(data: dict[str, Any]) -> Snapshot:
    """Return a recorded snapshot; a built-in policy makes the same decision again."""
    memory = data.get("memory")
    fields = {**data, "memory": None}
    snapshot = _SNAPSHOT.validate_python(fields)
    if not isinstance(memory, dict):
        return snapshot
    adapter: TypeAdapter[Any] = _MEMORY if "costs" in memory else _TOKEN_MEMORY
    return replace(snapshot, memory=adapter.validate_python(memory))
