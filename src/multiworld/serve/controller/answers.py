"""Responses of the controller's admin interface, sent as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from multiworld.serve.controller.fleet.entries import (
    Assessment,
    Decision,
    HistoryEntry,
)
from multiworld.serve.controller.fleet.state import DesiredState, ProcessPhase
from multiworld.serve.machines.amounts import Gpu
from multiworld.serve.wire.control_messages import GatewayReport, WorkerReport

T = TypeVar("T")


class AnswerFormError(ValueError):
    """A response is not of the expected type."""


# Operations.


class Scaled(msgspec.Struct, frozen=True):
    before: int
    replicas: int


class Updated(msgspec.Struct, frozen=True):
    """An update was accepted."""

    versions: dict[str, str]
    # Number of the last event before the update; its own events have higher numbers.
    since: int
    ready_s: float  # time limit for the new versions to become ready


class Drained(msgspec.Struct, frozen=True):
    """A replacement for a process starts; then the process drains."""

    name: str


class SpecShown(msgspec.Struct, frozen=True):
    """The spec that a service runs."""

    text: str  # the spec as YAML
    # The spec before the last update, as YAML, for a rollback; empty if there was no
    # update.
    before: str
    # How the running service differs from the spec, in words.
    differences: tuple[str, ...]


class Cancelled(msgspec.Struct, frozen=True):
    """A request was cancelled: the gateways end its streams."""

    request: str


class FaultInjected(msgspec.Struct, frozen=True):
    """A fault ("kill", "stop" or "cut") was injected into a replica or a gateway."""

    name: str
    pid: int
    action: str


class ShuttingDown(msgspec.Struct, frozen=True):
    app: str


class RefusedByController(msgspec.Struct, frozen=True):
    """The controller refused a request; `problems` has a line per problem of a spec."""

    error: str
    problems: tuple[str, ...] | UnsetType = UNSET


# Tenants.


class KeyShown(msgspec.Struct, frozen=True):
    """An API key, without its digest; see ``Key``."""

    id: str
    made_at: float
    expires_at: float | None


class TenantShown(msgspec.Struct, frozen=True):
    """A tenant, without the digests of its keys; see ``Tenant``."""

    name: str
    models: tuple[str, ...]
    rpm_limit: int | None
    max_parallel_requests: int | None
    bytes_per_s: float | None
    tpm_limit: int | None
    weight: float
    priority: int
    is_operator: bool
    is_suspended: bool
    keys: tuple[KeyShown, ...]
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    # Reason that an operator gave for suspending the tenant; empty if the tenant is not
    # suspended, or if no reason was given.
    suspension: str = ""


class TenantWithKey(TenantShown, frozen=True, kw_only=True):
    """A tenant with a new key in full, which is neither stored nor shown again."""

    key: str


class TenantRemoved(msgspec.Struct, frozen=True):
    name: str


# Status.


class FailingStage(msgspec.Struct, frozen=True):
    """A stage whose replicas keep failing, and of which none is ready."""

    model: str
    version: str
    stage: int
    failures: int
    cause: str
    next_in_s: float


class ProcessShown(msgspec.Struct, frozen=True):
    """A worker, or a gateway (with an empty ``model``)."""

    name: str
    model: str
    version: str
    stage: int
    stage_name: str
    phase: ProcessPhase
    since_s: float  # seconds in its current phase
    pid: int | None
    node: str
    booked_cpus: float
    booked_memory_bytes: int
    gpus: tuple[int, ...]
    crashes: int  # consecutive failures of its stage
    log: str
    restarts: int = 0  # restarts of its stage since the controller started

    @property
    def is_gateway(self) -> bool:
        return not self.model


class StatusAnswer(msgspec.Struct, frozen=True):
    app: str
    url: str
    store: str
    launcher: str
    authentication: str
    trouble: str  # why the launcher cannot start processes; empty if it can
    operations: tuple[HistoryEntry, ...]
    is_ready: bool
    controller: int  # process id
    wanted: DesiredState
    active: dict[str, str]  # active version of each model
    table: int  # number of the routing table
    unplaced: dict[str, str]  # reason for each stage that has an unplaced replica
    failing: tuple[FailingStage, ...]
    processes: tuple[ProcessShown, ...]
    dtypes: dict[str, str] = {}
    # Hash of each version's content, by model and version.
    identities: dict[str, dict[str, str]] = {}
    # Reports of the processes that answered, by name; omitted unless requested. They
    # are raw because their two types are untagged: the kind of process decides the type
    # of its report.
    reports: dict[str, Raw] | UnsetType = UNSET

    def __post_init__(self) -> None:
        for process in self.processes:
            if process.is_gateway:
                self.gateway_report(process.name)
            else:
                self.worker_report(process.name)

    def worker_report(self, name: str) -> WorkerReport | None:
        found = self._report(name)
        return None if found is None else _WORKER_REPORT.decode(found)

    def gateway_report(self, name: str) -> GatewayReport | None:
        found = self._report(name)
        return None if found is None else _GATEWAY_REPORT.decode(found)

    def _report(self, name: str) -> Raw | None:
        return None if self.reports is UNSET else self.reports.get(name)


_WORKER_REPORT = msgspec.json.Decoder(WorkerReport)
_GATEWAY_REPORT = msgspec.json.Decoder(GatewayReport)


class NodeShown(msgspec.Struct, frozen=True):
    """A machine of a service (see ``Node``), with its free resources and replicas."""

    name: str
    cpus: float
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    address: str
    key: str
    price: float
    bandwidth: float | None
    bfloat16: float | None
    free_cpus: float
    free_memory_bytes: int
    free_gpu_memory_bytes: dict[int, int]
    replicas: tuple[str, ...]


# Decisions.


class DecisionsAnswer(msgspec.Struct, frozen=True):
    """The last decisions, oldest first, and the latest reason by kind and model."""

    decisions: tuple[Decision, ...]  # with snapshots only if requested
    thoughts: tuple[Assessment, ...]


# The encoding.


Answer = msgspec.Struct | Sequence[msgspec.Struct]


def encode(answer: Answer) -> bytes:
    """Return a response as JSON; a value without a JSON type becomes a string."""
    return msgspec.json.encode(answer, enc_hook=str)


def decode(content: bytes | str, kind: type[T]) -> T:
    """Decode a response; raise ``AnswerFormError`` if it is not of type `kind`."""
    try:
        return msgspec.json.Decoder(kind).decode(content)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise AnswerFormError(str(error)) from error


def plain(answer: Answer) -> object:
    found: object = msgspec.json.decode(encode(answer))
    return found
