"""The facts of a service, from what its processes report."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from multiworld.serve.controller.answers import StatusAnswer, decode
from multiworld.serve.controller.fleet.decision_log import DecisionLog
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.observe.facts import Facts
from multiworld.serve.controller.observe.observer import Observer
from multiworld.serve.wire.control_messages import (
    Counted,
    GatewayReport,
    Reports,
    StreamShown,
    WorkerReport,
)
from tests.unit.serve.controller import examples

POSTS = {"m/0/1": ("m", "1", 0)}


class Looked:
    """An observer that has looked at a service every two seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.observer = Observer(History(), DecisionLog(), lambda: self.now)

    def look(
        self,
        gateways: dict[str, GatewayReport],
        *counted: Counted,
        kv: float = 0.0,
        adopted: Sequence[str] = (),
    ) -> None:
        self.now += 2.0
        reports = Reports({"m/0/1": WorkerReport(kv_usage=kv)}, gateways)
        self.observer.seen(reports, counted, POSTS, adopted=adopted)

    def facts(self) -> Facts:
        status = decode(json.dumps(examples.STATUS), StatusAnswer)
        budgets = {"acme": {"tokens_per_day": (5, 10)}}
        return self.observer.facts(status, [], 3, budgets)


def stream(number: int, made: int, chain: tuple[str, ...]) -> StreamShown:
    return StreamShown(
        f"r-{number}", number, "acme", "m", 5, made, 1.5, "computing", chain, 0, 0
    )


def test_streams_of_all_gateways_and_their_chains_are_shown() -> None:
    looked = Looked()
    chain, other = ("m/0/1", "m/1/2"), ("other/0/1",)
    one = GatewayReport(streams=(stream(1, 2, chain),), chains=((chain, 4),))
    two = GatewayReport(streams=(stream(1, 9, chain),), chains=((chain, 3), (other, 2)))
    looked.look({"gateway/1": one, "gateway/2": two})
    found = looked.facts()
    assert found.streams.keys() == {"gateway/1/1", "gateway/2/1"}
    assert found.streams["gateway/2/1"].made == 9
    assert found.models["m"].chains == ((chain, 7),)


def test_past_of_an_adopted_process_is_no_growth() -> None:
    """After a restart of the controller, its first counts are those since its start."""
    looked = Looked()
    counted = ("requests", ("m", "200"), 5e6)
    looked.look({})
    looked.look({"gateway/1": GatewayReport()}, counted, adopted=["gateway/1"])
    looked.look({"gateway/1": GatewayReport()}, counted, adopted=["gateway/1"])
    assert looked.facts().models["m"].requests_s == 0.0
    counted = ("requests", ("m", "200"), 5e6 + 20)
    looked.look({"gateway/1": GatewayReport()}, counted, adopted=["gateway/1"])
    assert looked.facts().models["m"].requests_s == 5.0


def test_time_in_queues_is_shown_apart_from_that_to_the_first_token() -> None:
    looked = Looked()
    kinds = {"queue_buckets": "0.1", "first_token_buckets": "2"}
    for count in (0.0, 10.0):
        counted = [(kind, ("m", end), count) for kind, end in kinds.items()]
        looked.look({}, *counted)
    model = looked.facts().models["m"]
    assert model.queue is not None
    assert model.first_tokens is not None
    assert model.queue.p99 < 0.1 < model.first_tokens.p99 < 2.0


def test_time_at_which_a_stream_began_stays() -> None:
    """So a page is not told of it again and again."""
    looked = Looked()
    first = stream(1, 2, ())
    looked.look({"gateway/1": GatewayReport(streams=(first,))})
    before = looked.facts().streams["gateway/1/1"]
    looked.look({"gateway/1": GatewayReport(streams=(stream(1, 3, ()),))})
    after = looked.facts().streams["gateway/1/1"]
    assert (after.began_at, after.made) == (before.began_at, 3)
    looked.look({"gateway/1": GatewayReport()})
    assert looked.facts().streams == {}


def test_memory_caches_and_budgets_are_shown() -> None:
    looked = Looked()
    kinds = "stage_prefix_cache_queries", "stage_prefix_cache_hits"
    of = ("m", "0")
    looked.look({}, *((kind, of, 100.0) for kind in kinds))
    assert looked.facts().models["m"].prefix_hits is None
    looked.look({}, (kinds[0], of, 300.0), (kinds[1], of, 150.0), kv=0.75)
    model = looked.facts().models["m"]
    assert model.prefix_hits == pytest.approx(0.25)
    assert model.kv_usage == pytest.approx(0.75)
    assert looked.facts().tenants["acme"].budgets == {"tokens_per_day": (5, 10)}
    (*_, point) = looked.observer.series.models["m"]
    assert (point.kv_usage, point.prefix_hits) == pytest.approx((0.75, 0.25))


def test_requests_in_flight_are_counted_by_model() -> None:
    """A model's series agrees with its facts: other models do not count."""
    looked = Looked()
    load = {"m/0/1": 2, "m/1/2": 9, "owner/other/0/1": 5}
    report = GatewayReport(in_flight=16, load=load)
    looked.look({"gateway/1": report, "gateway/2": report})
    (point,) = looked.observer.series.models["m"]
    assert point.in_flight == looked.facts().models["m"].in_flight == 4
