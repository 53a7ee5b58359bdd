"""The arguments of a process of the service. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from multiworld.config import SERVICE_HEARTBEAT_S, WorldConfig
from multiworld.serve.deadlines import JOIN_S
from multiworld.serve.spec.schema import AppSpec, GatewaySpec, ModelSpec


class ProcessArgs(BaseModel):
    """The arguments of one process: a gateway, or one rank of a replica."""

    model_config = ConfigDict(frozen=True)

    app: str
    name: str
    role: str  # "gateway" or "worker"
    store: str
    silence_s: float  # seconds of silence after which a peer is declared lost
    # Seconds after which a worker without controller and gateways exits; for gateways,
    # see ``ORPHAN_FACTOR`` of ``gateway.process``.
    orphan_s: float
    model: str = ""
    stage: int = 0
    gpus: tuple[int, ...] = ()  # indexes of its GPUs; empty: the device of the spec
    # Rank of the process in its replica; None: ranks are not started separately.
    rank: int | None = None
    spec: ModelSpec | None = None
    gateway: GatewaySpec | None = None
    port: int = 0
    spare_gateways: int = 0  # gateways to which the keeper gives no connections
    keeper: str = ""  # socket of the stream keeper; empty: gateways accept connections
    alive: str = ""  # file whose lock all processes of the service hold; empty: none

    @property
    def device(self) -> str:
        assert self.spec is not None
        wanted = self.spec.stages[self.stage].device
        return f"cuda:{self.gpus[0]}" if self.gpus else wanted

    def config(self) -> WorldConfig:
        return world_config(self.silence_s)


def world_config(silence_s: float, join_s: float = JOIN_S) -> WorldConfig:
    """Return the configuration of all worlds in a service."""
    return WorldConfig(
        silence_s=silence_s,
        heartbeat_s=min(SERVICE_HEARTBEAT_S, silence_s / 5),
        join_s=join_s,
        embed_store=False,
    )


def args_of(app: AppSpec, store: str, port: int, name: str) -> ProcessArgs:
    """Return the arguments of a process; names of gateways start with ``gateway/``."""
    is_gateway = name.startswith("gateway/")
    return ProcessArgs(
        app=app.app,
        name=name,
        role="gateway" if is_gateway else "worker",
        store=store,
        silence_s=app.silence_s,
        orphan_s=app.orphan_s,
        gateway=app.gateway if is_gateway else None,
        spare_gateways=app.gateways - app.gateway.replicas,
        port=port,
    )
