"""Messages between the processes of a service, and their one encoding. Pure.

Each message is a declared type. It travels as text: the version of the protocol, and
``[name, field, …]`` as JSON. Fields stand by position: a new one is added at the end,
with a default, and the release before ignores it. What a release does not know is
refused by name (``MessageError``).
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from multiworld import errors
from multiworld.errors import InternalError, ServeError
from multiworld.serve.tenants.directory import Tenant
from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.tenants.usage_meter import UsageRow
from multiworld.serve.transport.routing_table import RoutingTable

PROTOCOL = 1
"""Version of these messages. A process also understands the version before."""

UNDERSTOOD = (str(PROTOCOL - 1), str(PROTOCOL))

Attempt = tuple[int, int]
"""Number of the request at its router, number of the attempt."""

Key = tuple[str, int, int]
"""Name of the router, number of the request, number of the attempt."""

M = TypeVar("M")


class MessageError(InternalError):
    """A message of another version, or one that this release does not know."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message; its type's name says which."""


# What the controller tells a process.


class ModelsChanged(Message, frozen=True):
    """Every version of every model that may answer.

    Attributes:
        specs: The spec of each as JSON, by model and version.
    """

    specs: dict[str, dict[str, str]]


class TableChanged(Message, frozen=True):
    """The routing table."""

    table: RoutingTable


class AllTenants(Message, frozen=True):
    """A part of all tenants; those of before hold until the last part is there."""

    tenants: tuple[Tenant, ...]
    is_first: bool
    is_last: bool


class TenantsChanged(Message, frozen=True):
    """Tenants that are new or have changed, and names of those removed."""

    tenants: tuple[Tenant, ...]
    removed: tuple[str, ...]


class UsageStored(Message, frozen=True):
    """The usage that was told under this number is on disk."""

    number: int


class ProbeReplica(Message, frozen=True):
    """Send one request through a replica, and answer ``Probed``."""

    replica: str


class Finish(Message, frozen=True):
    """End as soon as nothing is left to do."""


class AskReport(Message, frozen=True):
    """Answer with a ``Report`` of the same number."""

    number: int


class Cut(Message, frozen=True):
    """Be cut off from the network for some seconds: a fault that is made on purpose."""

    seconds: float


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica does at this moment.

    Attributes:
        queued: Requests that wait to be computed.
        computing: Requests in the batch that is computed.
        probing: Probes among those two.
        computing_s: Seconds since that batch began.
        waiting_for_next: Outputs that wait for room at the next stage.
        handed: Outputs at the next stage that it has not begun.
        computed_s: Seconds of all batches so far.
        counts: Events so far, by kind.
    """

    queued: int = 0
    computing: int = 0
    probing: int = 0
    computing_s: float = 0.0
    waiting_for_next: int = 0
    handed: int = 0
    computed_s: float = 0.0
    counts: dict[str, int] = {}
    upstream: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    downstream: tuple[str, ...] = ()
    cpu_s: float = 0.0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway does at this moment; counts are since its start, by model.

    Attributes:
        in_flight: Requests that are accepted and not answered.
        load: Attempts under way, by replica.
        waiting: Requests that were never sent.
        pending: Requests that wait to be sent, those that are sent again too.
        silent: Replicas that give no sign.
        connected: Replicas that it has an edge to.
        counts: Events so far, by kind.
        arrived: Requests that came.
        attained: Requests answered within the model's objective.
        missed: Requests answered later, or not at all for want of replicas.
        refused: Requests refused as too many waited.
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


class Reports(msgspec.Struct, frozen=True):
    """The reports of all processes that answered, by name."""

    workers: dict[str, WorkerReport] = {}
    gateways: dict[str, GatewayReport] = {}


class FleetReport(Message, frozen=True):
    """What replicas report, and how often what has happened, for the metrics."""

    events: dict[str, int] = {}
    replicas: dict[str, WorkerReport] = {}


class PoisonFound(Message, frozen=True):
    """A request that kills replicas: nobody is to try it again.

    A gateway tells the controller, which tells the other gateways.
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
    | UsageStored
    | ProbeReplica
    | Finish
    | AskReport
    | Cut
    | FleetReport
    | PoisonFound
)
"""What the controller tells a process."""


# What a process tells the controller.


class Hello(Message, frozen=True):
    """The first message of a process."""

    pid: int


class Loaded(Message, frozen=True):
    """A worker has its weights, or a gateway listens."""


class Applied(Message, frozen=True):
    """This process goes by the routing table of this number."""

    number: int


class Report(Message, frozen=True):
    """The answer to ``AskReport``: one of the two reports."""

    number: int
    worker: WorkerReport | None = None
    gateway: GatewayReport | None = None


class UsageTold(Message, frozen=True):
    """What tenants have used at one gateway.

    Attributes:
        meter: A name that no two gateways have.
        number: Of this batch of rows, for that meter.
    """

    meter: str
    number: int
    rows: tuple[UsageRow, ...]


class ModelNeeded(Message, frozen=True):
    """Somebody asks for a model of which a stage has no replica."""

    model: str


class Outgrown(Message, frozen=True):
    """A replica uses more memory than it booked; both in bytes."""

    used: int
    limit: int


class Probed(Message, frozen=True):
    """A probe came back, or did not: ``error`` says why."""

    replica: str
    error: str | None = None


News = (
    Hello
    | Loaded
    | Applied
    | Report
    | UsageTold
    | ModelNeeded
    | Outgrown
    | Probed
    | PoisonFound
)
"""What a process tells the controller."""


# Edges: what replicas tell routers and the stage before them.


class Begun(Message, frozen=True):
    """These are being computed now; suspects alone, if ``is_isolated``."""

    attempts: tuple[Attempt, ...]
    is_isolated: bool


class Dropped(Message, frozen=True):
    """These were handed on to a replica of ``stage``, and may be lost with it."""

    attempts: tuple[Attempt, ...]
    stage: int


class Returned(Message, frozen=True):
    """These come back: ``stage`` has nobody who takes them."""

    attempts: tuple[Attempt, ...]
    stage: int


class Stuck(Message, frozen=True):
    """These are at a replica of ``stage`` that gives no sign."""

    attempts: tuple[Attempt, ...]
    stage: int


class Failed(Message, frozen=True):
    """The model raised for this one."""

    attempt: Attempt
    error: RemoteError


class RemoteError(msgspec.Struct, frozen=True, array_like=True):
    """A ``ServeError`` of another process: its class's name, its text, its stage."""

    kind: str
    text: str
    stage: str = ""

    @staticmethod
    def of(error: ServeError) -> RemoteError:
        """Return what another process needs to raise ``error`` again."""
        stage = getattr(error, "stage", "")
        return RemoteError(type(error).__name__, str(error), stage)

    def error(self) -> ServeError:
        """Return the error to raise here; a ``ServeError`` if its class is unknown."""
        kind = getattr(errors, self.kind, ServeError)
        if not (isinstance(kind, type) and issubclass(kind, ServeError)):
            kind = ServeError
        error: ServeError = kind(self.text)
        if self.stage:
            error.__dict__["stage"] = self.stage
        return error


Note = Begun | Dropped | Returned | Stuck | Failed
"""What a replica tells a router."""


class Released(Message, frozen=True):
    """These were begun: the sender has room for as many more."""

    keys: tuple[Key, ...]


class Refused(Message, frozen=True):
    """These go back to the sender, as their router is not connected here."""

    keys: tuple[Key, ...]


Credit = Released | Refused
"""What a replica tells the replica that handed it work."""


class Cancel(Message, frozen=True):
    """Nobody waits for this one any more."""

    key: Key


class WorkItem(msgspec.Struct, frozen=True, array_like=True):
    """The header of one attempt at one request.

    Attributes:
        remaining_s: Seconds until its deadline, when it was sent.
        is_isolated: It is a suspect, and computed alone.
        session: What keeps it at one replica of a stateful stage.
        via: Replicas that a probe must go through, by stage.
        share: Whose it is, and what that counts.
    """

    key: Key
    remaining_s: float
    is_isolated: bool = False
    session: str | None = None
    via: dict[str, str] | None = None
    share: Share = DEFAULT_SHARE


class Work(Message, frozen=True):
    """The header of a bundle of work; tensors are named ``NUMBER.NAME``."""

    items: tuple[WorkItem, ...]


class AnswerItem(msgspec.Struct, frozen=True, array_like=True):
    """The header of one answer."""

    attempt: Attempt
    is_last: bool = True


class Answers(Message, frozen=True):
    """The header of a bundle of answers; tensors are named ``NUMBER.NAME``."""

    items: tuple[AnswerItem, ...]


# The encoding.


class Codec(Generic[M]):
    """Reads and writes the messages of one kind of conversation.

    Args:
        kind: The expected type, or a union of them.
        tag: The tag that they travel with. What must overtake tensors has another one.
    """

    def __init__(self, kind: Any, tag: int) -> None:
        self.tag = tag
        self._decoder: msgspec.json.Decoder[M] = msgspec.json.Decoder(kind)

    def encode(self, message: M) -> str:
        """Return a message as text, for ``World.send_object``."""
        return f"{PROTOCOL} {_ENCODER.encode(message).decode()}"

    def decode(self, text: object) -> M:
        """Return the message that ``encode`` made a text of.

        Raises:
            MessageError: It is of another version, of no type that is expected, or
                damaged.
        """
        version, _, body = str(text).partition(" ")
        if version not in UNDERSTOOD:
            raise MessageError(
                f"a message of protocol version {version[:20]!r} arrived; this process "
                f"understands {' and '.join(UNDERSTOOD)}: run releases that are next "
                "to each other"
            )
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise MessageError(f"message {body[:80]!r}: {error}") from None


_ENCODER = msgspec.json.Encoder()

ORDERS: Codec[Order] = Codec(Order, tag=0)
NEWS: Codec[News] = Codec(News, tag=0)
WORK: Codec[Work] = Codec(Work, tag=1)
NOTES: Codec[Note] = Codec(Note, tag=2)
CREDITS: Codec[Credit] = Codec(Credit, tag=2)
ANSWERS: Codec[Answers] = Codec(Answers, tag=3)
CANCELS: Codec[Cancel] = Codec(Cancel, tag=4)
