"""Answers of the controller's admin interface, and their encoding. Pure.

Each answer is a declared type. It is sent as JSON with the names of its fields. Answers
also hold types of lower packages: ``HistoryEntry``, ``Assessment``, ``DesiredState``,
``UsageSum``, ``AuditEntry`` and the reports of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from multiworld.serve.fleet.entries import Assessment, HistoryEntry
from multiworld.serve.fleet.state import DesiredState, ProcessPhase
from multiworld.serve.resources.amounts import Gpu
from multiworld.serve.transport.protocol import GatewayReport, WorkerReport

T = TypeVar("T")


class AnswerFormError(ValueError):
    """An answer is not of the expected type."""


# Operations.


class Scaled(msgspec.Struct, frozen=True):
    """The outcome of a scale operation.

    Attributes:
        before: Replicas before.
        replicas: Replicas from now on.
    """

    before: int
    replicas: int


class Updated(msgspec.Struct, frozen=True):
    """An update was accepted.

    Attributes:
        versions: Desired version of each model, by name.
        since: Number of the last event before the update, to follow its events.
        ready_s: Seconds in which the new versions must become ready.
    """

    versions: dict[str, str]
    since: int
    ready_s: float


class Drained(msgspec.Struct, frozen=True):
    """A process is being replaced; then it is drained.

    Attributes:
        name: Name of the process.
    """

    name: str


class FaultInjected(msgspec.Struct, frozen=True):
    """A fault was injected into a replica.

    Attributes:
        name: Name of the replica.
        pid: Its process id.
        action: "kill", "stop" or "cut".
    """

    name: str
    pid: int
    action: str


class ShuttingDown(msgspec.Struct, frozen=True):
    """The service is being shut down.

    Attributes:
        app: Name of the service.
    """

    app: str


class RefusedByController(msgspec.Struct, frozen=True):
    """The controller refused a request.

    Attributes:
        error: Reason, for people.
        problems: Problems of a spec, one line each; left out where there is no spec.
    """

    error: str
    problems: tuple[str, ...] | UnsetType = UNSET


# Tenants.


class KeyShown(msgspec.Struct, frozen=True):
    """An API key, without its digest; see ``Key``.

    Attributes:
        id: The part of the key that is not secret.
        made_at: Time of its creation, in seconds since the epoch.
        expires_at: Time of its expiry, in seconds since the epoch; None: never.
    """

    id: str
    made_at: float
    expires_at: float | None


class TenantShown(msgspec.Struct, frozen=True):
    """A tenant, without the digests of its keys; see ``Tenant``.

    Attributes:
        name: Unique name.
        models: Patterns of the models it may use.
        rpm_limit: Most requests in any 60 seconds; None: no limit.
        max_parallel_requests: Most requests under way at a time; None: no limit.
        bytes_per_s: Average bytes of requests and answers each second; None: no limit.
        tpm_limit: Average tokens of prompts and answers each minute; None: no limit.
        tokens_per_day: Tokens of prompts and answers each day (UTC); None: no limit.
        tokens_per_month: The same for each month.
        weight: Weight of its share where the service is saturated.
        priority: Requests of a higher priority always run first.
        is_operator: Whether it may read the metrics, which cover all tenants.
        is_suspended: Whether its keys are refused for now.
        keys: Its API keys.
    """

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


class TenantWithKey(TenantShown, frozen=True, kw_only=True):
    """A tenant with a new key, which is not stored and not shown again.

    Attributes:
        key: The whole key.
    """

    key: str


class TenantRemoved(msgspec.Struct, frozen=True):
    """A tenant was removed.

    Attributes:
        name: Name of the tenant.
    """

    name: str


# Status.


class FailingStage(msgspec.Struct, frozen=True):
    """A stage without a ready replica, whose replicas fail again and again.

    Attributes:
        model: Name of the model.
        version: Version of the model.
        stage: Number of the stage.
        failures: Failures in a row.
        cause: Cause of the last failure, for people.
        next_in_s: Seconds until the next start.
    """

    model: str
    version: str
    stage: int
    failures: int
    cause: str
    next_in_s: float


class ProcessShown(msgspec.Struct, frozen=True):
    """A worker, or a gateway (with an empty ``model``).

    Attributes:
        name: Unique name, never reused.
        model: Name of the model.
        version: Version of the model.
        stage: Number of the stage.
        stage_name: Name of the stage.
        phase: Current phase.
        since_s: Seconds since its launch, readiness or start of draining, whichever was
            last.
        pid: Process id; None before it runs.
        node: Name of its machine; empty if it has none.
        booked_cpus: Cores that it has booked.
        booked_memory_bytes: Memory that it has booked.
        gpu: Number of its GPU; None on the CPU.
        crashes: Failures in a row of its stage.
        log: Path of its log.
        restarts: Replicas of its stage that were lost since the controller began.
    """

    name: str
    model: str
    version: str
    stage: int
    stage_name: str
    phase: ProcessPhase
    since_s: float
    pid: int | None
    node: str
    booked_cpus: float
    booked_memory_bytes: int
    gpu: int | None
    crashes: int
    log: str
    restarts: int = 0

    @property
    def is_gateway(self) -> bool:
        """True for a gateway."""
        return not self.model


class StatusAnswer(msgspec.Struct, frozen=True):
    """The observed and the desired state of a service.

    Attributes:
        app: Name of the service.
        url: URL at which clients reach the gateways.
        store: Address of the store.
        launcher: Name of the launcher.
        authentication: "none" or "keys".
        trouble: What keeps the launcher from starting processes; empty if nothing does.
        operations: The last operations, oldest first.
        is_ready: True if everything that is desired is ready.
        controller: Process id of the controller.
        wanted: Desired state.
        active: Version of each model that serves, by name.
        table: Number of the routing table.
        unplaced: Reason for each stage of which a replica has no place.
        failing: Stages whose replicas fail.
        processes: All processes.
        dtypes: Dtype of each model that generates text, and why.
        reports: Report of each process that answered, by its name; left out unless they
            were asked for.
    """

    app: str
    url: str
    store: str
    launcher: str
    authentication: str
    trouble: str
    operations: tuple[HistoryEntry, ...]
    is_ready: bool
    controller: int
    wanted: DesiredState
    active: dict[str, str]
    table: int
    unplaced: dict[str, str]
    failing: tuple[FailingStage, ...]
    processes: tuple[ProcessShown, ...]
    dtypes: dict[str, str] = {}
    # Of two types, which have no tag: that of a process says which one it is.
    reports: dict[str, Raw] | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Refuse an answer with a report of an unknown form."""
        for process in self.processes:
            if process.is_gateway:
                self.gateway_report(process.name)
            else:
                self.worker_report(process.name)

    def worker_report(self, name: str) -> WorkerReport | None:
        """Return the report of a replica; None if there is none."""
        found = self._report(name)
        return None if found is None else _WORKER_REPORT.decode(found)

    def gateway_report(self, name: str) -> GatewayReport | None:
        """Return the report of a gateway; None if there is none."""
        found = self._report(name)
        return None if found is None else _GATEWAY_REPORT.decode(found)

    def _report(self, name: str) -> Raw | None:
        return None if self.reports is UNSET else self.reports.get(name)


_WORKER_REPORT = msgspec.json.Decoder(WorkerReport)
_GATEWAY_REPORT = msgspec.json.Decoder(GatewayReport)


class NodeShown(msgspec.Struct, frozen=True):
    """A machine of a service, with its free resources and its replicas.

    Attributes:
        name: Unique name.
        cpus: Cores.
        memory_bytes: Main memory.
        gpus: GPUs.
        address: Address of the machine, for people.
        key: Identifier that the launcher uses for it.
        price: Price per hour, charged if any of it is used; 0 if it is there anyway.
        bandwidth: Bytes a second that it can send to others; None: no limit.
        bfloat16: Time of a product in bfloat16, as a multiple of that in float32; None:
            not measured.
        free_cpus: Cores that are not booked.
        free_memory_bytes: Memory that is not booked.
        free_gpu_memory_bytes: GPU memory that is not booked, by the number of the GPU.
        replicas: Names of the replicas on it.
    """

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


class DecisionShown(msgspec.Struct, frozen=True):
    """One decision; see ``LoggedDecision``.

    Attributes:
        number: Number of the decision, from 1.
        at: Time in seconds since the epoch.
        kind: "scaling" or "placement".
        about: Name of the model; empty for all models.
        what: The decision, in one line.
        facts: Numbers behind the decision.
        snapshot: Complete input of the decision; left out unless it was asked for.
    """

    number: int
    at: float
    kind: str
    about: str
    what: str
    # Both are up to the policy, which a user may replace.
    facts: dict[str, Any]
    snapshot: dict[str, Any] | UnsetType = UNSET


class DecisionsAnswer(msgspec.Struct, frozen=True):
    """The last decisions, and the latest reason of each kind and model.

    Attributes:
        decisions: The last decisions, oldest first.
        thoughts: The latest reasons.
    """

    decisions: tuple[DecisionShown, ...]
    thoughts: tuple[Assessment, ...]


# The encoding.


Answer = msgspec.Struct | Sequence[msgspec.Struct]
"""An answer: of one type, or several of one type."""


def encode(answer: Answer) -> bytes:
    """Return an answer as JSON; a value of a policy that JSON lacks becomes text."""
    return msgspec.json.encode(answer, enc_hook=str)


def decode(content: bytes | str, kind: type[T]) -> T:
    """Return the answer that ``encode`` encoded.

    Args:
        content: The answer as JSON.
        kind: Its expected type.

    Raises:
        AnswerFormError: It is not of that type.
    """
    try:
        return msgspec.json.Decoder(kind).decode(content)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise AnswerFormError(str(error)) from error


def plain(answer: Answer) -> object:
    """Return an answer as plain data, as it is sent."""
    found: object = msgspec.json.decode(encode(answer))
    return found
