"""Messages between the processes of a service: versions, unknown kinds, damage."""

from __future__ import annotations

import msgspec
import pytest

from multiworld.errors import InvalidRequestError, ModelFailedError, ServeError
from multiworld.serve.tenants.directory import Key, Tenant
from multiworld.serve.tenants.usage_rows import UsageRow
from multiworld.serve.wire.control_messages import (
    NEWS,
    ORDERS,
    AllTenants,
    FleetReport,
    GatewayReport,
    Hello,
    InjectHang,
    InjectPartition,
    MemoryExceeded,
    ModelsChanged,
    News,
    Order,
    PoisonFound,
    Report,
    ReportRequest,
    UsageReport,
    WorkerReport,
)
from multiworld.serve.wire.protocol import (
    PROTOCOL,
    Codec,
    Message,
    MessageError,
    RemoteError,
)

TENANT = Tenant(name="acme", keys=(Key(id="k", digest="d", made_at=1.0),), weight=2.0)

ORDERS_SENT: list[Order] = [
    ModelsChanged({"m": {"1": "{}"}}),
    AllTenants((TENANT,), is_first=True, is_last=False),
    FleetReport(
        4,
        {"m/0/1": WorkerReport(queued=3, counts={"rows": 9})},
        {"gateway/1": GatewayReport(in_flight=1)},
        (("requests", ("m", "200"), 2.0),),
    ),
    ReportRequest(8, has_counts=True),
    InjectHang(),
    InjectPartition(0.5),
    ReportRequest(7),
    PoisonFound("acme", "m", "1", "digest"),
]
NEWS_SENT: list[News] = [
    Hello(12),
    Report(7, gateway=GatewayReport(load={"m/0/1": 2}, silent=("m/0/2",))),
    UsageReport("meter", 3, (UsageRow(60, "acme", "m", 1, 1, 0, 0, 1, 5, 6, 0.5),)),
    MemoryExceeded(used=2**40, limit=2**30),
]


@pytest.mark.parametrize("order", ORDERS_SENT)
def test_orders_arrive_as_they_were_sent(order: Order) -> None:
    assert ORDERS.decode(ORDERS.encode(order)) == order


@pytest.mark.parametrize("news", NEWS_SENT)
def test_news_arrives_as_it_was_sent(news: News) -> None:
    assert NEWS.decode(NEWS.encode(news)) == news


def test_other_version_is_refused_by_name() -> None:
    body = NEWS.encode(NEWS_SENT[0]).partition(" ")[2]
    assert NEWS.decode(f"{PROTOCOL - 1} {body}") == NEWS_SENT[0]
    for version in (str(PROTOCOL + 1), "", "one"):
        with pytest.raises(MessageError, match=f"understands {PROTOCOL - 1} and"):
            NEWS.decode(f"{version} {body}")


def test_unknown_and_damaged_messages_are_refused_by_name() -> None:
    for body in (
        '["Vanish",1]',
        "[",
        "{}",
        '["report","x"]',
        '["inject_partition","1"]',
        "\ud800",
    ):
        with pytest.raises(MessageError, match="message"):
            NEWS.decode(f"{PROTOCOL} {body}")
    others: list[object] = [None, 7, [], {"kind": "begun"}]
    for data in others:
        with pytest.raises(MessageError):
            NEWS.decode(data)


class Grown(Message, frozen=True, tag="inject_partition"):
    """``InjectPartition`` of a later release, with one field more."""

    seconds: float
    reason: str = "none"


def test_field_that_was_added_does_not_divide_releases() -> None:
    """The older release ignores it; the newer one uses its default."""
    later: Codec[Grown] = Codec(Grown)
    assert ORDERS.decode(later.encode(Grown(1.5, "test"))) == InjectPartition(1.5)
    assert later.decode(ORDERS.encode(InjectPartition(1.5))) == Grown(1.5)


def test_error_of_another_process_is_raised_with_its_type() -> None:
    error = RemoteError.of(ModelFailedError("broken", stage="head")).error()
    assert type(error) is ModelFailedError
    assert (str(error), error.stage) == ("broken", "head")
    assert (
        type(RemoteError.of(InvalidRequestError("no")).error()) is InvalidRequestError
    )

    class TooLongError(InvalidRequestError):
        """Error that a model defines."""

    refused = RemoteError.of(TooLongError("long", param="x", code="too_long")).error()
    assert type(refused) is InvalidRequestError
    assert (refused.param, refused.code) == ("x", "too_long")
    for kind in ("NoSuchError", "TYPE_CHECKING", "MultiWorldError"):
        assert type(RemoteError(kind, "text").error()) is ServeError


def test_every_message_has_a_name_of_its_own() -> None:
    """Two messages of one name could not be distinguished."""
    names = [kind.__struct_config__.tag for kind in Message.__subclasses__()]
    names = [name for name in names if name != "inject_partition"]
    assert len(names) == len(set(names)) > 20
    assert msgspec.structs.fields(InjectPartition)[0].name == "seconds"


def test_text_of_an_error_can_be_sent_whatever_it_is() -> None:
    """A model may raise with a client's bytes in the text, and with many."""
    error = RemoteError.of(ModelFailedError("no \udcff" + "x" * 10**6, stage="s"))
    assert len(error.text.encode()) < 5000
    assert error.text.startswith("no ?x")
