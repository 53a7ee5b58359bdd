"""The arguments of a process of the service. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from multiworld.config import WorldConfig
from multiworld.serve.spec.schema import AppSpec, GatewaySpec, ModelSpec

JOIN_S = 10.0
"""Seconds that a process waits for the other member of a world."""


class ProcessArgs(BaseModel):
    """The arguments of one process: a gateway, or one rank of a replica."""

    model_config = ConfigDict(frozen=True)

    app: str
    name: str
    role: str
    store: str
    silence_s: float
    orphan_s: float
    model: str = ""
    stage: int = 0
    gpu: int | None = None
    rank: int | None = None
    spec: ModelSpec | None = None
    gateway: GatewaySpec | None = None
    port: int = 0
    alive: str = ""

    @property
    def device(self) -> str:
        """The device of its stage's tensors, as torch names it."""
        assert self.spec is not None
        wanted = self.spec.stages[self.stage].device
        return wanted if self.gpu is None else f"cuda:{self.gpu}"

    def config(self) -> WorldConfig:
        """Return the configuration of its worlds."""
        return WorldConfig(silence_s=self.silence_s, join_s=JOIN_S, embed_store=False)


def args_of(app: AppSpec, store: str, port: int, name: str) -> ProcessArgs:
    """Return the arguments that every process of a service is started with.

    Args:
        app: The spec of the service.
        store: Address of the store.
        port: Port of the gateways.
        name: Name of the process; that of a gateway begins with ``gateway/``.
    """
    is_gateway = name.startswith("gateway/")
    return ProcessArgs(
        app=app.app,
        name=name,
        role="gateway" if is_gateway else "worker",
        store=store,
        silence_s=app.silence_s,
        orphan_s=app.orphan_s,
        gateway=app.gateway if is_gateway else None,
        port=port,
    )
