"""SLO attainment of streams, and streams that are late or refused."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from multiworld.errors import (
    InvalidRequestError,
    NoReplicaError,
    OverloadedError,
    UnknownModelError,
)
from multiworld.serve.gateway.streams.actions import Action, Item, Log, Send, merged
from multiworld.serve.gateway.streams.stream import TimeLimits
from multiworld.serve.gateway.streams.streams import Delivered, Streams
from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.text.engine_limits import EngineLimits
from multiworld.serve.wire.generation_messages import (
    EndSequences,
    PauseSequences,
    Sampling,
)
from multiworld.serve.wire.routing_table import Route, RoutingTable
from tests.unit.serve.gateway.streams.simulated_chains import Client, Net
from tests.unit.waiting import turns

LIMITS = EngineLimits(
    max_num_seqs=8, max_num_batched_tokens=16, block_size=4, blocks=200, steps=1
)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "attained"),
    [(None, None, 1), (1e6, 1e6, 1), (1e-6, None, 0), (None, 1e-6, 0)],
)
async def test_stream_attains_its_objectives_or_not(
    ttft_s: float | None, tpot_s: float | None, attained: int
) -> None:
    """Objectives cover the first token, and the mean time of the others."""
    net = Net(random.Random(0), [1, 1], LIMITS)
    await net.connected()
    route = replace(net.table.routes["m"], ttft_s=ttft_s, tpot_s=tpot_s)
    net.table.routes["m"] = route
    client = Client(net, [1, 2, 3], 5)
    await net.settle(client.task.done)
    found = net.streams.attainment
    assert found.arrived["m"] == 1
    assert (found.attained["m"], found.missed["m"]) == (attained, 1 - attained)


async def test_time_in_the_queue_is_apart_from_that_of_the_prompt() -> None:
    """One replica computes one stream; the other waits until that has all tokens."""
    net = Net(random.Random(0), [1, 1], replace(LIMITS, max_num_seqs=1))
    await net.connected()
    clients = [Client(net, [1, 2, 3], 30) for _ in range(2)]
    await net.settle(lambda: all(client.task.done() for client in clients))
    sums = {kind: n for kind, _, n in net.streams.router.timed.counted()}
    assert 0 < sums["prefill_seconds"] < sums["queue_seconds"] / 3
    both = sums["queue_seconds"] + sums["prefill_seconds"]
    assert sums["first_token_seconds"] == pytest.approx(both)


async def test_tenant_that_fills_the_queue_leaves_room_for_others() -> None:
    """The others share as much room again."""
    net = Net(random.Random(0), [1, 1], LIMITS)
    for name in net.alive():
        net.kill(name)
    net.table.routes["m"] = replace(net.table.routes["m"], max_queued_requests=3)
    flood, other = Share("flood"), Share("other")
    clients = [Client(net, [1], 5, share=flood) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="4 of your requests"):
        net.streams.check_room("m", flood)
    for _ in range(2):
        net.streams.check_room("m", other)
        clients.append(Client(net, [1], 5, share=other))
        await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="2 of your requests"):
        net.streams.check_room("m", other)
    net.streams.check_room("m", Share("third"))
    for client in clients:
        client.task.cancel()
    await asyncio.gather(*(c.task for c in clients), return_exceptions=True)
    net.streams.check_room("m", flood)


async def test_request_of_many_completions_needs_room_for_all() -> None:
    """If even an empty queue has no room for all, the request is invalid."""
    net = Net(random.Random(0), [1, 1], LIMITS)
    for name in net.alive():
        net.kill(name)
    net.table.routes["m"] = replace(net.table.routes["m"], max_queued_requests=3)
    with pytest.raises(InvalidRequestError, match="request has 5 completions"):
        net.streams.check_room("m", DEFAULT_SHARE, 5)
    net.streams.check_room("m", DEFAULT_SHARE, 4)
    client = Client(net, [1], 5)
    await asyncio.sleep(0)
    net.streams.check_room("m", DEFAULT_SHARE, 3)
    with pytest.raises(OverloadedError):
        net.streams.check_room("m", DEFAULT_SHARE, 4)
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)


async def test_streams_of_a_model_that_is_removed_end() -> None:
    """Waiting streams end at once, running ones when they lose a replica."""
    net = Net(random.Random(0), [1, 1], LIMITS)
    await net.connected()
    running = Client(net, [1, 2], 50)
    await net.settle(lambda: len(running.items) > 3)
    lost = net.alive()[1]
    table = RoutingTable(99, net.table.gateways, {}, net.table.replicas)
    net.streams.table_changed(table)
    await asyncio.sleep(0)
    assert not running.task.done()
    net.kill(lost)
    net.streams.table_changed(table)
    await net.settle(running.task.done)
    with pytest.raises(UnknownModelError, match="no longer served"):
        await running.task
    net = Net(random.Random(0), [1, 1], LIMITS)
    for name in net.alive():
        net.kill(name)
    waiting = [Client(net, [n], 5) for n in range(5)]
    await asyncio.sleep(0)
    net.streams.table_changed(table)
    await turns()  # no time passes
    assert all(client.task.done() for client in waiting)
    found = await asyncio.gather(*(c.task for c in waiting), return_exceptions=True)
    assert {type(error) for error in found} == {UnknownModelError}


def test_messages_about_many_streams_are_few() -> None:
    """Consecutive messages of one kind to a replica are merged."""
    keys = [("g", number, 0) for number in range(100)]
    given: list[Action] = []
    for key in keys:
        given += [Send("a", EndSequences((key,))), Send("b", PauseSequences((key,)))]
    given += [Log("x"), Send("a", PauseSequences(tuple(keys[:1])))]
    given.append(Send("a", EndSequences(tuple(keys[:1]))))
    found = merged(given)
    assert len(found) == 2 * 2 + 3
    to_a = [a.message for a in found if isinstance(a, Send) and a.replica == "a"]
    assert [type(m) for m in to_a] == [EndSequences] * 2 + [
        PauseSequences,
        EndSequences,
    ]
    ended = [key for m in to_a if isinstance(m, EndSequences) for key in m.keys]
    assert ended == [*keys, keys[0]]


async def test_refused_and_late_cancelled_streams_miss_their_objective() -> None:
    """A client that leaves in time has neither attained nor missed."""
    net = Net(random.Random(0), [1, 1], LIMITS)
    for name in net.alive():
        net.kill(name)
    route = replace(net.table.routes["m"], max_queued_requests=0, ttft_s=5.0)
    net.table.routes["m"] = route
    client = Client(net, [1], 5)
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        net.streams.check_room("m", DEFAULT_SHARE)
    found = net.streams.attainment
    assert (found.arrived["m"], found.refused["m"], found.missed["m"]) == (2, 1, 1)
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)
    assert found.missed["m"] == 1
    late = Client(net, [1], 5)
    await asyncio.sleep(0)
    net.now += 6.0
    late.task.cancel()
    await asyncio.gather(late.task, return_exceptions=True)
    assert found.missed["m"] == 2


async def test_slot_is_held_until_its_stream_starts_or_its_client_is_gone() -> None:
    """Otherwise requests that arrive together could all find the last place."""
    net = Net(random.Random(0), [1, 1], LIMITS)
    for name in net.alive():
        net.kill(name)
    net.table.routes["m"] = replace(net.table.routes["m"], max_queued_requests=3)
    share = Share("flood")
    with net.streams.reserve("m", share, 4) as places:
        with pytest.raises(OverloadedError, match="4 of your requests"):
            net.streams.reserve("m", share, 1)
        clients = []
        for _ in range(2):
            places.take()
            clients.append(Client(net, [1], 5, share=share))
            await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="4 of your requests"):
            net.streams.reserve("m", share, 1)
    assert net.streams.router.waiting("m") == 2
    net.streams.reserve("m", share, 2)
    for client in clients:
        client.task.cancel()
    await asyncio.gather(*(c.task for c in clients), return_exceptions=True)


async def test_stream_that_no_replica_could_begin_says_so() -> None:
    net = Net(random.Random(0), [1, 1], LIMITS)
    await net.connected()
    lost = next(name for name in net.alive() if name.startswith("r1"))
    net.kill(lost)
    await net.settle(lambda: lost not in net.streams.router.view.connected)
    client = Client(net, [1, 2, 3], 5, deadline_s=1.0)
    await net.settle(client.task.done)
    with pytest.raises(NoReplicaError, match="no replica of stage 1") as caught:
        await client.task
    assert caught.value.retry_after_s


async def test_stream_that_another_gateway_began_is_cut_if_it_fails_here() -> None:
    """It has tokens, although this gateway has timed none of them."""
    now = 1000.0
    streams = Streams("g", clock=lambda: now)
    route = Route("1", {"1": 1}, generates=True, ttft_s=1.0)
    streams.table_changed(RoutingTable(1, ("g",), {"m": route}, {}))
    items: list[Item] = []
    opened = streams.open(
        "m",
        [1, 2, 3],
        Sampling(max_tokens=100),
        Delivered(tuple(range(90)), None, 20.0),
        items.append,
        deadline_s=300.0,
        limits=TimeLimits(60.0, 60.0),
        version="1",
    )
    now += 61.0
    streams.tick()
    (error,) = items
    assert isinstance(error, NoReplicaError)
    opened.close(error)
    assert streams.counts["cut"] == 1
    found = {(kind, *labels): n for kind, labels, n in streams.timed.counted()}
    assert found["generation_tokens", "m"] == 90
    assert not any(kind.endswith("buckets") for kind, *_ in found)
