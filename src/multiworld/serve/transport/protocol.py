"""Messages between the processes of a service, and their encoding. Pure.

Each message is a declared type, ``[name, field, …]`` on the wire. Fields are
positional: a new field is added at the end, with a default, and the previous release
ignores it. A release rejects messages that it does not know (``MessageError``). Orders
and news are sent one at a time, as text: the version of the protocol, then JSON.
Messages of edges are sent in ``frames``.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from multiworld import errors
from multiworld.errors import InternalError, ServeError
from multiworld.serve.tenants.budgets import TokensUsed
from multiworld.serve.tenants.directory import Tenant
from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.tenants.usage_meter import UsageRow
from multiworld.serve.transport.routing_table import RoutingTable

PROTOCOL = 1
"""Version of these messages. A process also understands the previous version."""

UNDERSTOOD = (str(PROTOCOL - 1), str(PROTOCOL))
"""Versions that this release understands."""

Counted = tuple[str, tuple[str, ...], float]
"""A count since the start of a process: its kind, its labels and its value."""

Attempt = tuple[int, int]
"""Number of a request at its router, and number of the attempt."""

Key = tuple[str, int, int]
"""Name of a router, number of the request at it, and number of the attempt."""

M = TypeVar("M")


class MessageError(InternalError):
    """A message of another version, or one that this release does not know."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message; the name of its type is its tag."""


# Orders: messages of the controller to a process.


class ModelsChanged(Message, frozen=True):
    """All versions of all models that may answer requests.

    Attributes:
        specs: Spec of each version as JSON, by model and version.
    """

    specs: dict[str, dict[str, str]]


class TableChanged(Message, frozen=True):
    """A new routing table."""

    table: RoutingTable


class AllTenants(Message, frozen=True):
    """A part of the list of all tenants.

    The previous list stays valid until the last part has arrived.

    Attributes:
        tenants: Tenants of this part.
        is_first: True for the first part.
        is_last: True for the last part.
    """

    tenants: tuple[Tenant, ...]
    is_first: bool
    is_last: bool


class TenantsChanged(Message, frozen=True):
    """New or changed tenants, and the names of removed ones."""

    tenants: tuple[Tenant, ...]
    removed: tuple[str, ...]


class TokensTold(Message, frozen=True):
    """Tokens that tenants with budgets have used, all gateways together."""

    used: tuple[TokensUsed, ...]


class UsageStored(Message, frozen=True):
    """The batch of usage with this number is on disk."""

    number: int


class ProbeReplica(Message, frozen=True):
    """An order to send one request through a replica and answer with ``Probed``."""

    replica: str


class Finish(Message, frozen=True):
    """An order to exit as soon as no work is left."""


class AskReport(Message, frozen=True):
    """An order to answer with a ``Report`` of the same number.

    Attributes:
        number: The number.
        has_counts: Whether a gateway is to add its counts, which are many.
    """

    number: int
    has_counts: bool = False


class Cut(Message, frozen=True):
    """An order to simulate a lost network for some seconds; for fault injection."""

    seconds: float


ROWS_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
"""Upper bounds of the rows of a batch in its histogram; larger ones come last."""

SECONDS_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
"""Upper bounds of the seconds of a batch in its histogram; longer ones come last."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a replica.

    Attributes:
        queued: Requests that wait to be computed.
        computing: Requests in the batch that is being computed.
        probing: Probes among the queued and computing requests.
        computing_s: Seconds since the current batch started.
        waiting_for_next: Outputs that wait for credit of the next stage.
        handed: Outputs sent to the next stage and not begun there.
        computed_s: Total computing time of all batches, in seconds.
        counts: Number of events since the start, by kind.
        batch_rows: Batches so far by their rows, up to each of ``ROWS_BOUNDS``.
        batch_seconds: Batches so far by their duration, up to ``SECONDS_BOUNDS``.
        upstream: Connected replicas of the previous stage.
        routers: Connected gateways.
        downstream: Connected replicas of the next stage.
        cpu_s: CPU time of the process, in seconds.
        memory_bytes: Memory that the process uses.
        gpu_memory_bytes: GPU memory that torch has reserved.
        kv_usage: Share of the memory for keys and values that is in use.
    """

    queued: int = 0
    computing: int = 0
    probing: int = 0
    computing_s: float = 0.0
    waiting_for_next: int = 0
    handed: int = 0
    computed_s: float = 0.0
    counts: dict[str, int] = {}
    batch_rows: tuple[int, ...] = ()
    batch_seconds: tuple[int, ...] = ()
    upstream: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    downstream: tuple[str, ...] = ()
    cpu_s: float = 0.0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    kv_usage: float = 0.0


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a gateway; counters start with the process.

    Attributes:
        in_flight: Requests that were accepted and are not answered.
        load: Attempts in progress, by replica.
        waiting: Requests that were never sent to a replica, by model.
        pending: Requests that wait to be sent, first attempts and retries, by model.
        silent: Replicas that are silent.
        connected: Replicas that it has an edge to.
        counts: Number of events, by kind.
        arrived: Requests received, by model.
        attained: Requests answered within the latency objective, by model.
        missed: Requests answered late, or not at all for lack of replicas, by model.
        refused: Requests rejected because too many waited, by model.
        texts: Generated texts that have ended, by model.
        prompt_tokens: Tokens of their prompts, by model.
        generated_tokens: Tokens that were generated for them, by model.
        cpu_s: CPU time of the process, in seconds.
    """

    in_flight: int = 0
    load: dict[str, int] = {}
    waiting: dict[str, int] = {}
    pending: dict[str, int] = {}
    silent: tuple[str, ...] = ()
    connected: tuple[str, ...] = ()
    counts: dict[str, int] = {}
    arrived: dict[str, int] = {}
    attained: dict[str, int] = {}
    missed: dict[str, int] = {}
    refused: dict[str, int] = {}
    texts: dict[str, int] = {}
    prompt_tokens: dict[str, int] = {}
    generated_tokens: dict[str, int] = {}
    cpu_s: float = 0.0


class Reports(msgspec.Struct, frozen=True):
    """Reports of all processes that answered, and their counts if wanted, by name."""

    workers: dict[str, WorkerReport] = {}
    gateways: dict[str, GatewayReport] = {}
    counted: dict[str, tuple[Counted, ...]] = {}


class FleetReport(Message, frozen=True):
    """The state of all processes, for the metrics of the gateway that asked for it.

    Attributes:
        number: Number of the question.
        events: Events of the fleet, by kind.
        replicas: Reports of replicas, by name.
        gateways: Reports of the other gateways, by name.
        others: Sums of the counts of all processes but the gateway that asked, those
            that have ended included.
    """

    number: int = 0
    events: dict[str, int] = {}
    replicas: dict[str, WorkerReport] = {}
    gateways: dict[str, GatewayReport] = {}
    others: tuple[Counted, ...] = ()


class PoisonFound(Message, frozen=True):
    """A poison request, which must not be retried.

    A gateway reports it to the controller, which tells the other gateways.

    Attributes:
        tenant: Name of the tenant.
        model: Name of the model.
        version: Version of the model.
        digest: Digest of the request's inputs.
    """

    tenant: str
    model: str
    version: str
    digest: str


Order = (
    ModelsChanged
    | TableChanged
    | AllTenants
    | TenantsChanged
    | TokensTold
    | UsageStored
    | ProbeReplica
    | Finish
    | AskReport
    | Cut
    | FleetReport
    | PoisonFound
)
"""Message of the controller to a process."""


# News: messages of a process to the controller.


class Hello(Message, frozen=True):
    """The first message of a process, with its process id."""

    pid: int


class Loaded(Message, frozen=True):
    """A worker has loaded its stage, or a gateway listens.

    Attributes:
        fingerprint: Kind of machine that its results depend on, if they are to be bit
            for bit the same.
        weights: Name of its weights, if it has any.
    """

    fingerprint: str = ""
    weights: str = ""


class Applied(Message, frozen=True):
    """This process has applied the routing table of this number."""

    number: int


class Report(Message, frozen=True):
    """The answer to ``AskReport``, with one of the two reports.

    A process that ends sends its last one unasked, with number 0.

    Attributes:
        number: Number of the question.
        worker: Report of a replica.
        gateway: Report of a gateway.
        counted: Counts of a gateway, if they were asked for.
    """

    number: int
    worker: WorkerReport | None = None
    gateway: GatewayReport | None = None
    counted: tuple[Counted, ...] = ()


class FleetAsked(Message, frozen=True):
    """A question of a gateway, which is answered with a ``FleetReport``."""

    number: int


class UsageTold(Message, frozen=True):
    """A batch of usage at one gateway.

    Attributes:
        meter: Random name of the gateway's usage meter.
        number: Number of the batch at that meter.
        rows: Usage by minute, tenant and model.
    """

    meter: str
    number: int
    rows: tuple[UsageRow, ...]


class ModelNeeded(Message, frozen=True):
    """A request arrived for a model of which a stage has no replica."""

    model: str


class Outgrown(Message, frozen=True):
    """A replica uses more memory than it booked; both numbers in bytes."""

    used: int
    limit: int


class Probed(Message, frozen=True):
    """The result of a probe; ``error`` is None if it was answered."""

    replica: str
    error: str | None = None


News = (
    Hello
    | Loaded
    | Applied
    | Report
    | FleetAsked
    | UsageTold
    | ModelNeeded
    | Outgrown
    | Probed
    | PoisonFound
)
"""Message of a process to the controller."""


# Edges: messages of replicas to routers and to the previous stage, and back.


class Begun(Message, frozen=True):
    """Attempts whose computation starts now.

    Attributes:
        attempts: The attempts of one batch, as far as they are of this router.
        is_isolated: True for a suspect that runs alone in its batch.
    """

    attempts: tuple[Attempt, ...]
    is_isolated: bool


class Dropped(Message, frozen=True):
    """Attempts that were sent to a replica of ``stage`` and may be lost with it."""

    attempts: tuple[Attempt, ...]
    stage: int


class Returned(Message, frozen=True):
    """Attempts that come back because no replica of ``stage`` takes them."""

    attempts: tuple[Attempt, ...]
    stage: int


class Stuck(Message, frozen=True):
    """Attempts at a replica of ``stage`` that has fallen silent."""

    attempts: tuple[Attempt, ...]
    stage: int


class Failed(Message, frozen=True):
    """An attempt for which the model raised an error."""

    attempt: Attempt
    error: RemoteError


class RemoteError(msgspec.Struct, frozen=True, array_like=True):
    """A ``ServeError`` of another process.

    Attributes:
        kind: Name of its class.
        text: Its message.
        stage: Name of the stage that raised it; empty if none did.
    """

    kind: str
    text: str
    stage: str = ""

    @staticmethod
    def of(error: ServeError) -> RemoteError:
        """Return the message from which another process can raise ``error`` again."""
        stage = getattr(error, "stage", "")
        return RemoteError(type(error).__name__, str(error), stage)

    def error(self) -> ServeError:
        """Return the error to raise; a plain ``ServeError`` if its class is unknown."""
        kind = getattr(errors, self.kind, ServeError)
        if not (isinstance(kind, type) and issubclass(kind, ServeError)):
            kind = ServeError
        error: ServeError = kind(self.text)
        if self.stage:
            error.__dict__["stage"] = self.stage
        return error


Note = Begun | Dropped | Returned | Stuck | Failed
"""Message of a replica to a router."""


class Released(Message, frozen=True):
    """Work that was begun, so that its sender gets its credit back."""

    keys: tuple[Key, ...]


class Refused(Message, frozen=True):
    """Work that goes back to the sender: its router is not connected here."""

    keys: tuple[Key, ...]


Credit = Released | Refused
"""Message of a replica to the replica that sent it work."""


class Cancel(Message, frozen=True):
    """An attempt whose answer nobody waits for any more."""

    key: Key


class Spent(NamedTuple):
    """Seconds that one attempt has taken at replicas so far.

    Attributes:
        queued_s: Waiting for its batch, and for room at the next stage.
        computed_s: In batches.
    """

    queued_s: float = 0.0
    computed_s: float = 0.0


NOTHING_SPENT = Spent()
"""Time of an attempt that no replica has had yet."""


class WorkItem(msgspec.Struct, frozen=True, array_like=True):
    """The header of one attempt at one request.

    Attributes:
        key: Router, request and attempt.
        remaining_s: Seconds until its deadline, at the time of sending.
        is_isolated: True for a suspect, which is computed alone.
        session: Requests of one session go to the same replica of a stateful stage.
        via: For a probe: replicas by stage that it must go through.
        share: The tenant, its weight and its priority.
        spent: Time that it has taken at earlier stages.
    """

    key: Key
    remaining_s: float
    is_isolated: bool = False
    session: str | None = None
    via: dict[str, str] | None = None
    share: Share = DEFAULT_SHARE
    spent: Spent = NOTHING_SPENT


class Work(Message, frozen=True):
    """Attempts at requests; the frame has the tensors of each."""

    items: tuple[WorkItem, ...]


class AnswerItem(msgspec.Struct, frozen=True, array_like=True):
    """The header of one answer.

    Attributes:
        attempt: Request and attempt.
        is_last: True for the last part of an answer; today an answer is one part.
        spent: Time that it has taken at all stages.
    """

    attempt: Attempt
    is_last: bool = True
    spent: Spent = NOTHING_SPENT


class Answers(Message, frozen=True):
    """Answers to requests; the frame has the tensors of each."""

    items: tuple[AnswerItem, ...]


FRAMES = 1
"""Tag of the frames of an edge."""

NOTHING = 2
"""Tag that nothing is sent with; a receive of it ends with the edge."""


# The encoding.


class Codec(Generic[M]):
    """Encoder and decoder of one kind of messages.

    Args:
        kind: Type of the messages, or a union of types.
        tag: Tag that they are sent with.
    """

    def __init__(self, kind: Any, tag: int) -> None:
        self.tag = tag
        self._decoder: msgspec.json.Decoder[M] = msgspec.json.Decoder(kind)

    def encode(self, message: M) -> str:
        """Return a message as text, for ``World.send_object``."""
        return f"{PROTOCOL} {_ENCODER.encode(message).decode()}"

    def decode(self, text: object) -> M:
        """Return the message that ``encode`` encoded.

        Raises:
            MessageError: The text is of another version, has an unexpected type, or is
                malformed.
        """
        version, _, body = str(text).partition(" ")
        if version not in UNDERSTOOD:
            raise MessageError(
                f"a message of protocol version {version[:20]!r} arrived; this process "
                f"understands {' and '.join(UNDERSTOOD)}: use the same or adjacent "
                "releases"
            )
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise MessageError(f"message {body[:80]!r}: {error}") from None


_ENCODER = msgspec.json.Encoder()

ORDERS: Codec[Order] = Codec(Order, tag=0)
NEWS: Codec[News] = Codec(News, tag=0)
