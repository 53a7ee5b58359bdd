"""The messages between the processes of a service: versions, unknown ones, damage."""

from __future__ import annotations

import msgspec
import pytest

from multiworld.errors import InvalidRequestError, ModelFailedError, ServeError
from multiworld.serve.tenants.directory import Key, Tenant
from multiworld.serve.tenants.fair_queue import Share
from multiworld.serve.tenants.usage_meter import UsageRow
from multiworld.serve.transport.protocol import (
    NEWS,
    NOTES,
    ORDERS,
    PROTOCOL,
    WORK,
    AllTenants,
    AskReport,
    Begun,
    Codec,
    Cut,
    Dropped,
    Failed,
    FleetReport,
    GatewayReport,
    Hello,
    Message,
    MessageError,
    ModelsChanged,
    News,
    Note,
    Order,
    Outgrown,
    PoisonFound,
    RemoteError,
    Report,
    UsageTold,
    Work,
    WorkerReport,
    WorkItem,
)

TENANT = Tenant(name="acme", keys=(Key(id="k", digest="d", made_at=1.0),), weight=2.0)

ORDERS_SENT: list[Order] = [
    ModelsChanged({"m": {"1": "{}"}}),
    AllTenants((TENANT,), is_first=True, is_last=False),
    FleetReport({"lost": 2}, {"m/0/1": WorkerReport(queued=3, counts={"rows": 9})}),
    Cut(0.5),
    AskReport(7),
    PoisonFound("acme", "m", "1", "digest"),
]
NEWS_SENT: list[News] = [
    Hello(12),
    Report(7, gateway=GatewayReport(load={"m/0/1": 2}, silent=("m/0/2",))),
    UsageTold("meter", 3, (UsageRow(60, "acme", "m", 1, 1, 0, 0, 1, 5, 6, 0.5),)),
    Outgrown(used=2**40, limit=2**30),
]
NOTES_SENT: list[Note] = [
    Begun(((1, 2), (3, 1)), is_isolated=True),
    Dropped(((1, 2),), 1),
    Failed((4, 1), RemoteError.of(ModelFailedError("no", stage="head"))),
]


@pytest.mark.parametrize("order", ORDERS_SENT)
def test_orders_arrive_as_they_were_sent(order: Order) -> None:
    """With their types, nested ones too."""
    assert ORDERS.decode(ORDERS.encode(order)) == order


@pytest.mark.parametrize("news", NEWS_SENT)
def test_news_arrives_as_it_was_sent(news: News) -> None:
    """With its types, nested ones too."""
    assert NEWS.decode(NEWS.encode(news)) == news


@pytest.mark.parametrize("note", NOTES_SENT)
def test_notes_arrive_as_they_were_sent(note: Note) -> None:
    """With their types, nested ones too."""
    assert NOTES.decode(NOTES.encode(note)) == note


def test_headers_of_work_keep_whose_it_is() -> None:
    """A share, a session, and the replicas of a probe."""
    share = Share("acme", 2.0, -1)
    item = WorkItem(("gateway/1", 4, 1), 2.5, True, "s", {"0": "m/0/1"}, share)
    header = Work((item, WorkItem(("gateway/1", 5, 1), 1.0)))
    assert WORK.decode(WORK.encode(header)) == header


def test_other_version_is_refused_by_name() -> None:
    """The text says which versions are understood."""
    body = NOTES.encode(NOTES_SENT[0]).partition(" ")[2]
    assert NOTES.decode(f"{PROTOCOL - 1} {body}") == NOTES_SENT[0]
    for version in (str(PROTOCOL + 1), "", "one"):
        with pytest.raises(MessageError, match=f"understands {PROTOCOL - 1} and"):
            NOTES.decode(f"{version} {body}")


def test_unknown_and_damaged_messages_are_refused_by_name() -> None:
    """Nothing of them is used."""
    for body in ('["Vanish",1]', "[", "{}", '["Begun",7]', '["Hello",1]', "\ud800"):
        with pytest.raises(MessageError, match="message"):
            NOTES.decode(f"{PROTOCOL} {body}")
    others: list[object] = [None, 7, [], {"kind": "begun"}]
    for data in others:
        with pytest.raises(MessageError):
            NOTES.decode(data)


class Grown(Message, frozen=True, tag="Cut"):
    """``Cut`` of a later release, with one field more."""

    seconds: float
    reason: str = "none"


def test_field_that_was_added_does_not_divide_releases() -> None:
    """The older ignores it, the newer takes its default."""
    later: Codec[Grown] = Codec(Grown, tag=0)
    assert ORDERS.decode(later.encode(Grown(1.5, "test"))) == Cut(1.5)
    assert later.decode(ORDERS.encode(Cut(1.5))) == Grown(1.5)


def test_error_of_another_process_is_raised_as_what_it_was() -> None:
    """Known kinds by their class, others as ``ServeError``."""
    error = RemoteError.of(ModelFailedError("broken", stage="head")).error()
    assert type(error) is ModelFailedError
    assert (str(error), error.stage) == ("broken", "head")
    assert (
        type(RemoteError.of(InvalidRequestError("no")).error()) is InvalidRequestError
    )
    for kind in ("NoSuchError", "TYPE_CHECKING", "MultiWorldError"):
        assert type(RemoteError(kind, "text").error()) is ServeError


def test_every_message_has_a_name_of_its_own() -> None:
    """Two of one name could not be told apart."""
    names = [kind.__struct_config__.tag for kind in Message.__subclasses__()]
    names = [name for name in names if name != "Cut"]
    assert len(names) == len(set(names)) > 20
    assert msgspec.structs.fields(Cut)[0].name == "seconds"
