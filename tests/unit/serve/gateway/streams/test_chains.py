"""Streams over chains of replicas that are lost and replaced, in simulated services."""

from __future__ import annotations

import asyncio
import random
import unittest.mock
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from multiworld.errors import RequestCancelledError, RequestPoisonedError
from multiworld.serve.deadlines import UNCONFIRMED_S
from multiworld.serve.gateway.streams.chain_selection import HOME
from multiworld.serve.gateway.streams.stream import Returned, SuspectGroup
from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.text.engine_limits import EngineLimits
from multiworld.serve.wire.generation_messages import (
    ActivationRows,
    BeginSequences,
    KvHeld,
    RunsAlone,
    Step,
    Tokens,
)
from tests.tiers import some
from tests.unit.inner_state import leaks_of
from tests.unit.serve.gateway.streams.simulated_chains import (
    CONTROLLER,
    GATEWAY,
    Client,
    Net,
)

LIMITS = EngineLimits(
    max_num_seqs=8, max_num_batched_tokens=16, block_size=4, blocks=200, steps=3
)


async def whole(net: Net, *clients: Client) -> None:
    """Run until all streams have ended, and check them."""
    await net.settle(lambda: all(c.task.done() for c in clients))
    for client in clients:
        await client.task
        client.check()


async def have_tokens(net: Net, clients: list[Client]) -> None:
    await net.settle(lambda: all(client.items for client in clients))


async def freed(net: Net) -> None:
    """Check that no stream left anything behind, and that no message was refused."""
    assert not net.refused
    await net.settle(lambda: not net.probing)
    for _ in range(250):  # twenty minutes
        await net.turn()
        net.now += 4.0
    for name in net.alive():
        worker = net.worker(name)
        await net.engine(name).tidy()
        assert leaks_of(worker) == {}
        assert net.engine(name).nbytes == 0


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
async def test_replacement_rebuilds_its_kv_and_no_other_stage_recomputes(
    lost: int,
) -> None:
    net = Net(random.Random(1), [1, 1, 1, 1], LIMITS)
    client = Client(net, [5, 6, 7] * 10, 30)
    await net.settle(lambda: len(client.items) == 12)
    (name,) = [n for n in net.alive() if n.startswith(f"r{lost}.")]
    before = {n: net.engine(n).rows for n in net.alive() if n != name}
    tokens = 30 + len(client.items)
    net.kill(name)
    fresh = net.start(lost)
    await whole(net, client)
    assert net.engine(fresh).rows >= tokens
    for other, rows in before.items():
        # What was left to compute, and what was in flight at the loss.
        assert net.engine(other).rows - rows <= 60 - tokens + 4
    assert net.streams.counts["replayed"] >= 1
    await freed(net)


async def test_new_stream_waits_for_no_report() -> None:
    """It computes at once: no later stage can have anything of it."""
    net = Net(random.Random(3), [1, 1, 1], LIMITS)
    await net.connected()
    net.lie = lambda pair, entry: None if isinstance(entry[0], KvHeld) else entry
    clients = [Client(net, [5, 6, n] * 10, 20) for n in range(3)]
    await whole(net, *clients)
    assert not net.streams.counts["replayed"]
    await freed(net)


class Held(deque[Any]):
    """Messages that do not arrive yet."""

    is_held = True

    def __bool__(self) -> bool:
        return not self.is_held and len(self) > 0


@pytest.mark.parametrize("stage", [1, 2])
async def test_new_stream_of_a_gateway_that_a_stage_has_not_noticed(stage: int) -> None:
    """The gateway has, as far as it knows, reached every stage."""
    net = Net(random.Random(5), [1, 1, 1], LIMITS)
    late = net.alive()[stage]
    queue = net.queues[GATEWAY, late] = Held(net.queues[GATEWAY, late])
    client = Client(net, [5, 6, 7] * 5, 10)
    await net.settle(lambda: bool(list(net.worker(late).recovery.table)))
    queue.is_held = False
    await whole(net, client)
    assert not net.streams.counts["replayed"]
    await freed(net)


@pytest.mark.parametrize("stage", ["1", "2"])
@pytest.mark.parametrize("seed", range(4))
async def test_new_stream_of_which_its_gateway_does_not_tell_a_stage(
    stage: str, seed: int
) -> None:
    """The stage before has announced it, but its gateway would not end it there."""
    net = Net(random.Random(seed), [1, 1, 1], LIMITS)
    await net.connected()
    forgotten: list[Any] = []

    def lie(pair: tuple[str, str], entry: Any) -> Any:
        is_begin = isinstance(entry[0], BeginSequences) and pair[1][1] == stage
        if is_begin and not forgotten:
            forgotten.append(entry)
            return None
        return entry

    net.lie = lie
    client = Client(net, [5, 6, 7] * 10, 60)
    await have_tokens(net, [client])
    assert not net.streams.counts["replayed"]
    (late,) = [n for n in net.alive() if n[1] == stage]
    assert list(net.worker(late).recovery.table)
    await passes(net, UNCONFIRMED_S + 1.0)
    await whole(net, client)
    assert net.streams.counts["replayed"]
    await freed(net)


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_replacement_is_probed_though_streams_that_wait_have_all_memory(
    lost: int,
) -> None:
    """The streams wait for the replacement, which is ready only after its probe."""
    limits = replace(LIMITS, blocks=24)
    for seed in range(4):
        net = Net(random.Random(seed), [1, 1, 1], limits)
        clients = [Client(net, [n, 5, 6] * 7 + [1, 2], 20) for n in range(4)]
        await have_tokens(net, clients)
        net.probing = set()
        net.replace(net.alive()[lost])
        await whole(net, *clients)
        await freed(net)


async def passes(net: Net, seconds: float) -> None:
    """Let time pass in small steps, also while nothing happens."""
    end = net.now + seconds
    while net.now < end:
        began = net.now
        await net.turn()
        await asyncio.sleep(0)
        if net.now - began > 0.1:
            net.now = began + 0.02


@pytest.mark.parametrize("away_s", [0.05, 0.3, 0.9])
async def test_restored_connection_recomputes_no_row(away_s: float) -> None:
    """Every replica still has what the stream needs."""
    net = Net(random.Random(1), [1, 1, 1], LIMITS)
    await net.connected()
    first, middle, _ = net.alive()
    client = Client(net, [1, 5, 6] * 20, 40)
    await have_tokens(net, [client])
    net.part(first, middle)
    await passes(net, away_s)
    before = {name: net.engine(name).rows for name in net.alive()}
    left = 40 - len(client.items)
    net.connect(first, middle)
    await whole(net, client)
    for name, rows in before.items():
        assert net.engine(name).rows - rows <= left + 5  # steps in flight


async def test_streams_avoid_a_connection_that_stays_lost() -> None:
    """One stream discovers it; later ones begin at another replica."""
    net = Net(random.Random(2), [1, 2, 1], LIMITS)
    await net.connected()
    _, middle, _, last = net.alive()
    net.part(middle, last)
    late = []
    for number in range(12):
        client, began = Client(net, [number, 7, 6], 10), net.now
        while not client.task.done():
            await passes(net, 0.02)
        client.check()
        late.append(client.times[0] - began)
    assert max(late) < 2.0
    assert sum(wait > 0.5 for wait in late) <= 1
    await freed(net)


async def test_previous_stage_recomputes_a_dropped_activation_log() -> None:
    """The tokens at the gateway always suffice."""
    net = Net(random.Random(2), [1, 1, 1], LIMITS, log_bytes=0)
    client = Client(net, [5, 6, 7] * 5, 20)
    await net.settle(lambda: len(client.items) == 10)
    net.kill(net.alive()[2])
    net.start(2)
    await whole(net, client)
    await freed(net)


async def test_two_lost_stages_are_rebuilt_from_the_stage_before_them() -> None:
    """The stage before both has the log."""
    net = Net(random.Random(3), [1, 1, 1, 1], LIMITS)
    client = Client(net, [9, 8] * 8, 24)
    await net.settle(lambda: len(client.items) == 10)
    first, *others = net.alive()
    before = net.engine(first).rows
    for stage, name in ((1, others[0]), (2, others[1])):
        net.kill(name)
        net.start(stage)
    await whole(net, client)
    assert net.engine(first).rows - before <= 24 - 10 + 4
    await freed(net)


async def test_shared_prefix_of_a_prompt_is_not_computed_again() -> None:
    """A replacement is rebuilt although nobody computed the prefix for this request."""
    net = Net(random.Random(6), [1, 1, 1], LIMITS, prefix_bytes=1 << 20)
    await net.connected()
    shared = list(range(1, 41))
    first = Client(net, [*shared, 50], 5)
    await whole(net, first)
    before = {name: net.engine(name).rows for name in net.alive()}
    second = Client(net, [*shared, 60, 61], 12)
    await net.settle(lambda: len(second.items) == 6)
    for name in net.alive():
        assert net.engine(name).rows - before[name] <= 2 + 6 + 2
        counts = net.worker(name).counts
        assert counts["prefix_cache_hits"] == 40
        assert counts["prefix_cache_queries"] == 41 + 42
    net.kill(net.alive()[1])
    fresh = net.start(1)
    await whole(net, second)
    assert net.engine(fresh).rows >= 42 + 6
    first_stage = net.alive()[0]
    assert net.engine(first_stage).rows - before[first_stage] <= 2 + 12 + 4
    await freed(net)


async def test_waiting_sequence_takes_no_memory_for_its_cached_prefix() -> None:
    """It pushes no rows of other sequences out of the log, either."""
    limits = replace(LIMITS, max_num_seqs=1)
    net = Net(random.Random(7), [1, 1, 1], limits, prefix_bytes=1 << 20)
    await net.connected()
    shared = list(range(1, 41))
    await whole(net, Client(net, [*shared, 50], 5))
    first = Client(net, [*shared, 51], 40)
    await net.settle(lambda: len(first.items) == 5)
    before = {name: net.engine(name).nbytes for name in net.alive()}
    logged = {n: leaks_of(net.worker(n))["logged bytes"] for n in net.alive()[:-1]}
    others = [Client(net, [*shared, 60 + n], 5) for n in range(12)]
    await net.settle(lambda: len(first.items) == 20)
    (front, *_) = net.alive()
    assert net.worker(front).report().queued == 12
    for name in net.alive():
        assert net.engine(name).nbytes < 2 * before[name]
    for name, nbytes in logged.items():
        assert leaks_of(net.worker(name))["logged bytes"] <= 2 * nbytes
    await whole(net, first, *others)
    for name in net.alive():
        assert net.worker(name).counts["prefix_cache_hits"] == 13 * 40
    await freed(net)


# With these seeds, the report of the last stage is late.
@pytest.mark.parametrize("seed", [34, 46, 54, 76])
async def test_prefix_that_only_a_middle_stage_has_costs_no_attempt(seed: int) -> None:
    """Stage 0 waits for no report, so the stage may start before it has one, too."""
    net = Net(random.Random(seed), [1, 1, 1], LIMITS, prefix_bytes=1 << 20)
    await net.connected()
    shared = list(range(1, 41))
    await whole(net, Client(net, [*shared, 50], 5))
    first, _, last = net.alive()
    for name, stage in ((first, 0), (last, 2)):
        net.kill(name)
        net.start(stage)
    await net.connected()
    await whole(net, Client(net, [*shared, 60], 5))
    assert net.streams.counts["replayed"] == 0
    await freed(net)


async def test_stage_without_the_cached_prefix_computes_it_in_turn() -> None:
    """A replacement knows no prompts: all stages compute them when it is their turn."""
    limits = replace(LIMITS, max_num_seqs=1)
    net = Net(random.Random(8), [1, 1, 1], limits, prefix_bytes=1 << 20)
    await net.connected()
    shared = list(range(1, 41))
    await whole(net, Client(net, [*shared, 50], 5))
    net.kill(net.alive()[1])
    fresh = net.start(1)
    await net.connected()
    first = Client(net, [70] * 40, 40)
    await net.settle(lambda: len(first.items) == 5)
    before = net.engine(fresh).nbytes
    others = [Client(net, [*shared, 60 + n], 5) for n in range(12)]
    await net.settle(lambda: len(first.items) == 20)
    assert net.engine(fresh).nbytes < 2 * before
    await whole(net, first, *others)
    again = Client(net, [*shared, 80], 5)
    await whole(net, again)
    assert net.worker(fresh).counts["prefix_cache_hits"] == 40
    await freed(net)


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_loss_while_a_stream_starts_stalls_no_other(is_stopped: bool) -> None:
    """What a later stage holds may become known after the stream was returned."""
    limits = replace(LIMITS, max_num_batched_tokens=64)
    for seed in range(6):
        net = Net(random.Random(seed), [1, 1, 1], limits)
        await net.connected()
        _, middle, last = net.alive()
        net.probing = set()
        old = Client(net, [3, 4], 60)
        items = old.items
        await net.settle(lambda items=items: len(items) > 4)  # type: ignore[misc]
        new = Client(net, [1, 2, 3] * 40, 20)

        def has_told(net: Net = net, pair: tuple[str, str] = (last, middle)) -> bool:
            number = max(net.streams.router.streams)
            sent = [e[0] for e in net.queues.get(pair, ()) if isinstance(e, tuple)]
            told = [message for message in sent if isinstance(message, KvHeld)]
            return number in {message.key[1] for message in told}

        await net.settle(has_told)
        if is_stopped:
            net.stop(middle)
        with unittest.mock.patch.object(net.chance, "random", return_value=0.9):
            net.replace(last)  # what it sent arrives
        begun = net.now
        while net.now < begun + 0.3:
            await net.turn()
            await asyncio.sleep(0)
        net.resume(middle)
        await whole(net, old, new)
        for client in (old, new):
            first = min(at for at in client.times if at > begun)
            assert first - begun < 10.0, f"seed {seed}"
        await freed(net)


async def test_streams_with_a_complete_chain_are_not_affected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "multiworld.serve")
    net = Net(random.Random(11), [2, 2, 2], LIMITS)
    await net.connected()
    clients = [Client(net, [5, 6, n], 40) for n in range(6)]
    await net.settle(lambda: all(len(client.items) > 3 for client in clients))
    streams = dict(net.streams.router.streams)
    name = next(n for n in net.alive() if n.startswith("r1"))
    others = [s for s in streams.values() if name not in s.chain]
    assert 0 < len(others) < 6
    net.kill(name)
    net.start(1)
    await whole(net, *clients)
    again = {r.getMessage().split(" is retried: ")[0] for r in caplog.records}
    assert again == {s.name for s in streams.values() if s not in others}
    await freed(net)


async def test_sequence_waiting_for_its_grammar_delays_no_other() -> None:
    """It starts when compilation is done, even if its stages are replaced meanwhile."""
    net = Net(random.Random(9), [1, 1, 1], LIMITS)
    await net.connected()
    made: Future[None] = Future()
    net.engine(net.alive()[2]).compiled[1] = made
    slow = Client(net, [5, 6, 7], 20, grammar="g")
    other, gone = Client(net, [5, 6, 8], 20), Client(net, [5, 6, 9], 20, grammar="g")
    net.engine(net.alive()[2]).compiled[3] = made
    await whole(net, other)
    assert not slow.items
    gone.task.cancel()
    net.kill(net.alive()[1])
    net.start(1)
    for _ in range(200):
        await net.turn()
    assert not slow.items
    made.set_result(None)
    await whole(net, slow)
    await asyncio.gather(gone.task, return_exceptions=True)
    await freed(net)


async def test_cancelled_request_ends_and_others_go_on() -> None:
    """Whether it computes or waits; it does not count as cut."""
    net = Net(random.Random(2), [1, 1], LIMITS)
    await net.connected()
    clients = [Client(net, [5, 6, n], 40, request=f"r-{n}") for n in range(3)]
    await have_tokens(net, clients)
    assert net.streams.cancel("r-1") == 1
    assert net.streams.cancel("r-1") == net.streams.cancel("of nobody") == 0
    with pytest.raises(RequestCancelledError):
        await clients[1].task
    await whole(net, clients[0], clients[2])
    assert not net.streams.counts["cut"]
    net.kill(net.alive()[1])
    waiting = Client(net, [5, 6, 7], 5, request="r-9")
    for _ in range(20):
        await net.turn()
        await asyncio.sleep(0)
    net.streams.cancel("r-9")
    with pytest.raises(RequestCancelledError):
        await waiting.task
    await freed(net)


async def test_session_prefers_its_replicas_while_these_have_room() -> None:
    """Every gateway prefers the same ones; others take the excess."""
    chains = {await _chain_of_a_session(seed) for seed in range(6)}
    assert len(chains) == 1


async def _chain_of_a_session(seed: int) -> tuple[str, ...]:
    net = Net(random.Random(seed), [3, 3], LIMITS)
    await net.connected()
    await whole(net, Client(net, [seed], 3))
    client = Client(net, [5, seed], 20, session="chat 7")
    await net.settle(lambda: len(client.items) > 2)
    (stream,) = net.streams.router.streams.values()
    chain = stream.chain
    others = [Client(net, [6, n], 20, session="chat 7") for n in range(8)]
    await asyncio.sleep(0)
    first = [n for n in net.alive() if n.startswith("r0")]
    loads = [net.streams.router.load().get(name, 0) for name in first]
    assert max(loads) - min(loads) <= HOME + 1
    await whole(net, client, *others)
    return chain


@pytest.mark.parametrize("seed", some(range(20), 5))
async def test_stream_of_a_host_that_is_lost_is_no_poison(seed: int) -> None:
    net = Net(random.Random(seed), [3, 3, 3], LIMITS)
    clients = [Client(net, [5, 6, 7 + n], 20) for n in range(4)]
    await net.settle(lambda: any(len(client.items) > 3 for client in clients))
    gone = net.alive()
    for name in gone:
        net.die(name)
    await net.settle(lambda: not net.streams.router.view.connected)
    for name in gone:
        net.start(int(name[1]))
        net.forget(name)
    await whole(net, *clients)
    await freed(net)


async def test_stream_that_kills_its_replica_when_alone_is_poison() -> None:
    """Only the last two of its losses happen in isolation."""
    net = Net(random.Random(9), [1, 1], LIMITS)
    await net.connected()
    net.lie = lambda pair, entry: None if isinstance(entry[0], Tokens) else entry
    client = Client(net, [5, 6, 7], 20)
    await asyncio.sleep(0)
    (stream,) = net.streams.router.streams.values()
    lost: list[str] = []

    def is_due() -> bool:
        is_computed = not lost or stream.losses.has_begun
        return client.task.done() or bool(stream.chain and is_computed)

    while True:
        await net.settle(is_due)
        if client.task.done():
            break
        lost.append(stream.chain[0])
        net.kill(lost[-1])
        net.start(0)
        await net.settle(lambda: lost[-1] not in net.streams.router.view.connected)
    with pytest.raises(RequestPoisonedError, match="2 replicas died"):
        await client.task
    assert 5 <= len(lost) <= 6


@pytest.mark.parametrize("sources", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_suspects_that_alternate_with_a_poison_stream_are_not_poison(
    seed: int, sources: int
) -> None:
    """Each replica of the first stage runs one alone; all send to one of the second."""
    net = Net(random.Random(seed), [sources, 1], LIMITS)
    await net.connected()
    others = [Client(net, [1, 2, 3] * 40, 5) for _ in range(3)]
    await asyncio.sleep(0)
    killer = Client(net, [5, 6, 7], 5)
    killed: list[str] = []

    def lie(pair: tuple[str, str], entry: Any) -> Any:
        message = entry[0]
        kills = isinstance(message, ActivationRows) and message.key[1] == 4
        if isinstance(message, Step):
            kills = any(part.key[1] == 4 for part in message.parts)
        if kills:
            killed.append(pair[1])
        return None if kills else entry

    net.lie = lie
    while not all(c.task.done() for c in (killer, *others)):
        await net.turn()
        await asyncio.sleep(0)
        for name in {*killed} & {*net.alive()}:
            net.replace(name)
        killed.clear()
    with pytest.raises(RequestPoisonedError, match="replicas died"):
        await killer.task
    await whole(net, *others)


@pytest.mark.parametrize("seed", some(range(8), 3))
async def test_stream_that_kills_in_decoding_is_poison(seed: int) -> None:
    """Each attempt has a token, as part of a prefill, and then kills a replica."""
    net = Net(random.Random(seed), [2, 2], LIMITS)
    await net.connected()
    others = [Client(net, [1, 2, 3 + n], 40) for n in range(3)]
    await asyncio.sleep(0)
    killer = Client(net, [5, 6, 7], 400)
    killed: list[str] = []
    kills = 0

    def lie(pair: tuple[str, str], entry: Any) -> Any:
        parts = entry[0].parts if isinstance(entry[0], Step) else ()
        if not any(part.key[1] == 4 and part.count == 1 for part in parts):
            return entry
        killed.append(pair[1])
        return None

    net.lie = lie
    while not all(c.task.done() for c in (killer, *others)):
        await net.turn()
        await asyncio.sleep(0)
        for name in {*killed} & {*net.alive()}:
            net.replace(name)
            kills += 1
        killed.clear()
    with pytest.raises(RequestPoisonedError, match="replicas died"):
        await killer.task
    assert kills <= 8
    await whole(net, *others)


class Killer:
    """Kills each replica that decodes one of some streams."""

    def __init__(self, net: Net, *numbers: int) -> None:
        self._net, self._numbers = net, {*numbers}
        self._killed: list[str] = []
        self.kills = 0
        net.lie = self._lie

    def _lie(self, pair: tuple[str, str], entry: Any) -> Any:
        parts = entry[0].parts if isinstance(entry[0], Step) else ()
        if not any(part.key[1] in self._numbers and part.count == 1 for part in parts):
            return entry
        self._killed.append(pair[1])
        return None

    async def whole(self, clients: list[Client]) -> None:
        while not all(client.task.done() for client in clients):
            await self._net.turn()
            await asyncio.sleep(0)
            for name in {*self._killed} & {*self._net.alive()}:
                self._net.replace(name)
                self.kills += 1
            self._killed.clear()


CROWD = replace(LIMITS, max_num_seqs=64, max_num_batched_tokens=128, blocks=2000)


@pytest.mark.parametrize("seed", some(range(12), 1))
@pytest.mark.parametrize(
    ("replicas", "losses"),
    [([1, 1], 8), ([1, 1, 1], 8), ([1, 3], 8), ([2, 2], 8), ([2, 3, 2], 8)],
)
async def test_poison_stream_among_many_is_found_within_some_losses(
    seed: int, replicas: list[int], losses: int
) -> None:
    net = Net(random.Random(seed), replicas, CROWD)
    await net.connected()
    clients = [Client(net, [1, 2, 3 + n], 60) for n in range(64)]
    await asyncio.sleep(0)
    number = net.chance.randint(1, 64)
    poison = clients.pop(number - 1)
    killer = Killer(net, number)
    await killer.whole([poison, *clients])
    with pytest.raises(RequestPoisonedError, match="replicas died"):
        await poison.task
    assert killer.kills <= losses
    await whole(net, *clients)
    await freed(net)


@pytest.mark.parametrize("seed", some(range(6), 2))
async def test_two_poison_streams_among_many_are_found(seed: int) -> None:
    net = Net(random.Random(seed), [1, 1], CROWD)
    await net.connected()
    clients = [Client(net, [1, 2, 3 + n], 60) for n in range(32)]
    await asyncio.sleep(0)
    numbers = net.chance.sample(range(1, 33), 2)
    poison = [clients[number - 1] for number in numbers]
    others = [client for client in clients if client not in poison]
    killer = Killer(net, *numbers)
    await killer.whole(clients)
    for client in poison:
        with pytest.raises(RequestPoisonedError, match="replicas died"):
            await client.task
    assert killer.kills <= 16
    await whole(net, *others)
    await freed(net)


async def work_of(losses: int, streams: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the rows and the steps that each stage computed through some losses."""
    net = Net(random.Random(seed), [1, 1, 1], CROWD)
    await net.connected()
    clients = [Client(net, [5, 6, n] * 8, 60) for n in range(streams)]
    await net.settle(lambda: all(len(client.items) > 4 for client in clients))
    engines = {name: net.engine(name) for name in net.alive()}
    for loss in range(losses):
        lost = next(name for name in net.alive() if name[1] == str((loss + 1) % 3))
        known = {*net.alive()}
        net.replace(lost)
        (fresh,) = {*net.alive()} - known
        engines[fresh] = net.engine(fresh)
        until = net.now + 2.5  # so that the next loss counts
        before = [len(client.items) for client in clients]
        while net.now < until:
            await net.turn()
            await asyncio.sleep(0)
            made = [len(client.items) for client in clients]
            if all(now > old for now, old in zip(made, before, strict=True)):
                net.now = max(net.now, until)
    await whole(net, *clients)
    await freed(net)
    stages = [[e for n, e in engines.items() if n[1] == str(s)] for s in range(3)]
    return (
        [sum(engine.rows for engine in those) for those in stages],
        [sum(engine.steps for engine in those) for those in stages],
    )


@pytest.mark.parametrize("seed", some(range(4), 2))
@pytest.mark.parametrize("losses", [1, 2, 3, 4])
async def test_streams_that_lose_replicas_by_chance_recompute_little(
    seed: int, losses: int
) -> None:
    """Only what the lost stages held is recomputed, plus some steps for each split."""
    streams = 32
    rows, steps = await work_of(0, streams, seed)
    more_rows, more_steps = await work_of(losses, streams, seed)
    held = streams * (24 + 60)  # of one stage, at most
    assert sum(more_rows) - sum(rows) <= losses * held + 3 * streams * losses
    splits = max(0, losses - 2)
    extra = [b - a for a, b in zip(steps, more_steps, strict=True)]
    assert max(extra) <= 50 * losses + 80 * splits, extra


@pytest.mark.parametrize("seed", some(range(10), 4))
async def test_host_with_two_replicas_of_a_chain_makes_no_suspects(seed: int) -> None:
    net = Net(random.Random(seed), [2, 2, 2], LIMITS)
    await net.connected()
    clients = [Client(net, [5, 6, 7 + n] * 4, 30) for n in range(16)]
    await net.settle(lambda: sum(len(c.items) > 2 for c in clients) >= 4)
    alone: list[Any] = []

    def watch(pair: tuple[str, str], entry: Any) -> Any:
        if isinstance(entry[0], RunsAlone):
            alone.append(entry)
        return entry

    net.lie = watch
    chains = [s.chain for s in net.streams.router.streams.values() if s.chain]
    gone = net.chance.choice(chains)[:2]
    net.stop(CONTROLLER)  # it learns of the losses later than the gateway
    for name in gone:
        net.replace(name)
        for _ in range(net.chance.choice([0, 40])):
            await net.turn()
    await net.settle(lambda: not {*gone} & {*net.streams.router.view.connected})
    net.resume(CONTROLLER)
    await whole(net, *clients)
    assert not alone
    await freed(net)


async def test_loss_that_is_noticed_late_ends_the_next_attempt() -> None:
    """A later stage returned the stream, which runs elsewhere by now."""
    net = Net(random.Random(2), [2, 1], LIMITS)
    await net.connected()
    net.lie = lambda pair, entry: None if isinstance(entry[0], Tokens) else entry
    client = Client(net, [5, 6, 7], 20)
    await asyncio.sleep(0)
    (stream,) = net.streams.router.streams.values()
    await net.settle(lambda: bool(stream.chain))
    (other,) = {n for n in net.alive() if n.startswith("r0")} - {*stream.chain}
    stream.losses.counted, stream.losses.isolated = 3, 1
    stream.group = SuspectGroup(1, {stream.number: stream}, is_isolated=True)
    stream.losses.has_begun = True
    stream.returned = Returned((other,), True, 0.0)
    net.kill(other)
    await net.settle(client.task.done)
    with pytest.raises(RequestPoisonedError, match="2 replicas died"):
        await client.task
    await freed(net)


async def test_steps_of_a_suspect_and_of_the_others_alternate() -> None:
    """A long prompt that runs alone lets the others have a token in between."""
    net = Net(random.Random(4), [1, 1], LIMITS)
    await net.connected()
    others = [Client(net, [5, n], 60) for n in range(3)]
    suspect = Client(net, [1, 2, 3] * 40, 5)
    await net.settle(lambda: all(len(client.items) > 2 for client in others))
    stream = net.streams.router.streams[4]
    for _ in range(2):  # it may be the cause of two losses
        stream.losses.has_begun = True
        stream.losses.add(net.now - 4.0, is_alone=False)
        stream.losses.last_at = -9.0
    assert stream.losses.is_suspect
    stream.losses.has_begun = True
    net.replace(stream.chain[1])
    await net.settle(lambda: bool(stream.is_alone))
    made = [len(client.items) for client in others]
    await net.settle(lambda: len(suspect.items) > 0)
    chunks = 120 // LIMITS.max_num_batched_tokens
    for client, before in zip(others, made, strict=True):
        assert len(client.items) - before >= chunks - 2
    await whole(net, suspect, *others)
    await freed(net)


@pytest.mark.parametrize(
    "seed",
    some([12, *range(8)], 3),  # 12: evicted before it has begun
)
@pytest.mark.parametrize("count", [1, 2])
async def test_replica_holds_no_more_than_its_memory_when_another_is_gone(
    seed: int, count: int
) -> None:
    """The net checks the limit after every step."""
    limits = replace(LIMITS, blocks=60)
    net = Net(random.Random(seed), [2, 2, count], limits, gateways=2)
    await net.connected()
    clients = [
        Client(net, [5, 6, 7 + n] * 6, 60, gateway=f"gateway/{n % 2 + 1}")
        for n in range(12)
    ]
    await net.settle(lambda: sum(len(c.items) > 45 for c in clients) >= 4)
    name = next(n for n in net.alive() if n.startswith("r1."))
    if seed % 2:
        net.drain(name)
    else:
        net.die(name)  # the table changes later
        for _ in range(500):
            await net.turn()
        net.forget(name)
    await net.settle(lambda: sum(c.task.done() for c in clients) >= 6)
    if not seed % 2:
        net.start(1)
    await whole(net, *clients)
    left = [n for n in net.alive() if n.startswith("r1.")]
    assert max(net.engine(n).most_blocks for n in left) > 40, "it is used as well"
    await freed(net)


@pytest.mark.parametrize("seed", some(range(6), 3))
@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_gateway_that_reads_late_loses_nothing(seed: int, stages: int) -> None:
    """A replica is lost meanwhile, so streams start over before their end."""
    net = Net(random.Random(seed), [2] * stages, LIMITS)
    await net.connected()
    clients = [Client(net, [5, 6, 7 + n], 12) for n in range(6)]
    await net.settle(lambda: all(len(client.items) > 1 for client in clients))
    net.stop(GATEWAY)
    until = net.now + 1.5
    while await net.turn() and net.now < until:
        pass
    name = net.chance.choice([n for n in net.alive() if n[1] == str(seed % stages)])
    net.replace(name)
    net.resume(GATEWAY)
    await whole(net, *clients)
    await freed(net)


@pytest.mark.parametrize("seed", some(range(10), 4))
async def test_pause_of_a_gateway_replays_nothing(seed: int) -> None:
    """It reads what arrived meanwhile, and considers no peer silent."""
    net = Net(random.Random(seed), [2, 2, 2], LIMITS, gateways=2)
    await net.connected()
    clients = [
        Client(net, [5, 6, 7 + n], 40, gateway=f"gateway/{n % 2 + 1}") for n in range(8)
    ]
    await net.settle(lambda: all(len(client.items) > 1 for client in clients))
    for _ in range(3):
        name = net.chance.choice([*net.gateways, CONTROLLER])
        net.stop(name)
        for _ in range(net.chance.randint(20, 140)):
            await net.turn()
        net.resume(name)
        for _ in range(30):
            await net.turn()
    await whole(net, *clients)
    assert sum(s.counts["replayed"] for s in net.gateways.values()) == 0
    await freed(net)


async def test_gateway_to_which_all_replicas_are_silent_replays_nothing() -> None:
    """There is no other replica, and the gateway itself may be cut off."""
    net = Net(random.Random(3), [2, 2], LIMITS)
    await net.connected()
    clients = [Client(net, [5, 6, 7 + n], 30) for n in range(8)]
    await net.settle(lambda: all(len(client.items) > 1 for client in clients))
    names = net.alive()
    for name in names:
        net.stop(name)
    for _ in range(100):
        await net.turn()
    for name in names:
        net.resume(name)
    await whole(net, *clients)
    assert net.streams.counts["replayed"] == 0
    await freed(net)


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_streams_of_a_stopped_replica_continue_with_another(stage: int) -> None:
    net = Net(random.Random(stage), [2, 2, 2], LIMITS)
    await net.connected()
    clients = [Client(net, [5, 6, 7 + n], 40) for n in range(6)]
    await net.settle(lambda: all(len(client.items) > 1 for client in clients))
    name = next(n for n in net.alive() if n[1] == str(stage))
    net.stop(name)
    await net.settle(lambda: sum(client.task.done() for client in clients) >= 3)
    net.resume(name)
    await whole(net, *clients)
    assert net.streams.counts["replayed"] > 0
    await freed(net)


async def test_client_that_leaves_while_a_stage_is_missing_leaves_nothing() -> None:
    """Replicas that keep its state for the replacement are notified."""
    net = Net(random.Random(4), [1, 1, 1], LIMITS)
    client = Client(net, [1, 2, 3], 50)
    await net.settle(lambda: len(client.items) == 5)
    net.kill(net.alive()[1])
    for _ in range(200):
        await net.turn()
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)
    await freed(net)


@pytest.mark.parametrize("left", [0, 1, 2])
async def test_streams_of_a_drained_stage_continue_while_another_is_prepared(
    left: int,
) -> None:
    # While there are two first stages, each may have half of the blocks.
    limits = replace(LIMITS, blocks=2 * LIMITS.blocks)
    net = Net(random.Random(left), [1, 1, 1], limits)
    await net.connected()
    clients = [Client(net, [5, 6, 7] * 60, 60) for _ in range(2)]
    await net.settle(lambda: all(len(client.items) >= 12 for client in clients))
    (name,) = [n for n in net.alive() if n.startswith(f"r{left}.")]
    fresh = net.start(left)
    rows = {n: net.engine(n).rows for n in net.alive() if n not in (name, fresh)}
    made = sum(len(client.items) for client in clients)
    net.drain(name)
    counts = net.streams.counts
    await net.settle(lambda: counts["moved"] == 1)
    assert sum(len(client.items) for client in clients) - made >= 4
    await whole(net, *clients)
    assert counts["moved"] == 2
    assert counts["replayed"] == 0
    assert name not in net.alive()
    for other, before in rows.items():
        # The last stage computes the last token again, from which it samples.
        assert net.engine(other).rows - before <= 2 * 60 - made + 2 * 4
    await freed(net)


async def test_streams_continue_with_a_new_version_of_the_same_weights() -> None:
    net = Net(random.Random(5), [1, 1, 1], LIMITS)
    await net.connected()
    client = Client(net, [3, 1] * 40, 50)
    await net.settle(lambda: len(client.items) == 10)
    old = net.alive()
    update(net)
    await whole(net, client)
    assert net.streams.counts["moved"] == 1
    assert net.streams.counts["replayed"] == 0
    assert not set(old) & set(net.alive())
    await freed(net)


async def test_loss_in_an_update_to_other_weights_leaves_streams_their_version() -> (
    None
):
    """They continue on draining replicas while there are any."""
    net = Net(random.Random(5), [1, 2, 1], LIMITS)
    await net.connected()
    clients = [Client(net, [3, number] * 10, 40) for number in range(2)]
    await have_tokens(net, clients)
    streams = list(net.streams.router.streams.values())
    assert len({stream.chain[1] for stream in streams}) == 2
    net.weights = "other"
    update(net)
    net.kill(streams[0].chain[1])
    await whole(net, *clients)
    assert [stream.version for stream in streams] == ["1", "1"]
    assert net.streams.counts["replayed"] == 1
    await freed(net)


async def test_new_replica_takes_its_share_of_the_streams() -> None:
    net = Net(random.Random(6), [1, 1, 1], LIMITS)
    await net.connected()
    clients = [Client(net, [number] * 10, 90) for number in range(1, 7)]
    await net.settle(lambda: all(len(client.items) >= 2 for client in clients))
    fresh = net.start(1)
    await net.settle(lambda: leaks_of(net.worker(fresh)).get("sequences", 0) >= 2)
    await whole(net, *clients)
    assert 2 <= net.streams.counts["moved"] <= 3
    assert net.streams.counts["replayed"] == 0
    await freed(net)


@pytest.mark.parametrize("seed", range(3))
async def test_stream_without_a_log_moves_around_what_cannot_fill_its_neighbour(
    seed: int,
) -> None:
    """Other replicas of the stages before take their places, back to the tokens."""
    limits = replace(LIMITS, blocks=2 * LIMITS.blocks)
    net = Net(random.Random(seed), [2, 2, 2], limits, log_bytes=0)
    await net.connected()
    client = Client(net, [5, 6, 7] * 20, 60)
    await net.settle(lambda: len(client.items) >= 12)
    (stream,) = net.streams.router.streams.values()
    before = stream.chain
    net.drain(before[2])
    counts = net.streams.counts
    await net.settle(lambda: counts["moved"] == 1)
    assert not {*stream.chain} & {*before}
    await whole(net, client)
    assert (counts["moved"], counts["given_up"], counts["replayed"]) == (1, 0, 0)
    assert before[2] not in net.alive()
    await freed(net)


async def test_replica_that_cannot_be_prepared_leaves_the_stream_where_it_is() -> None:
    """Without a log there is nothing to prepare it from."""
    net = Net(random.Random(7), [1, 1, 1], LIMITS, log_bytes=0)
    await net.connected()
    client = Client(net, [3, 1] * 10, 40)
    await net.settle(lambda: len(client.items) == 10)
    net.start(1)
    net.drain(net.alive()[1])
    await whole(net, client)
    assert net.streams.counts["moved"] == 0
    assert net.streams.counts["given_up"] >= 1
    assert net.streams.counts["replayed"] == 0
    await freed(net)


@pytest.mark.timeout(240)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
@example(212906137)  # a prompt begins with a part of a cached block
@example(2025488)  # a replica of stage 0 has no room for what is prepared there
@example(597)  # a probe is longer than a step
@example(5263954)  # the only one that runs is preempted, and another is prepared
def test_streams_survive_random_faults(seed: int) -> None:
    asyncio.run(survive(random.Random(seed)))


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**32))
def test_streams_survive_random_faults_for_long(seed: int) -> None:
    asyncio.run(survive(random.Random(seed)))


async def survive(chance: random.Random) -> None:
    """Run streams through losses, broken edges, scaling and clients that leave."""
    stages = chance.randint(2, 4)
    replicas = [chance.randint(1, 2) for _ in range(stages)]
    limits = EngineLimits(
        max_num_seqs=chance.randint(1, 6),
        max_num_batched_tokens=chance.randint(2, 12),
        block_size=chance.randint(1, 4),
        blocks=chance.randint(40, 80),
        steps=stages,
    )
    log_bytes = chance.choice([0, 400, 1 << 20])
    prefix_bytes = chance.choice([0, 2000, 1 << 20])
    gateways = chance.choice([1, 1, 2])
    net = Net(chance, replicas, limits, log_bytes, prefix_bytes, gateways)
    net.probing = chance.choice([None, set()])
    shares = [Share("a"), Share("a"), Share("b", weight=2.0), Share("c", priority=1)]
    clients = [
        Client(
            net,
            [chance.randrange(3)] * chance.randint(1, 20),
            15,
            gateway=chance.choice([*net.gateways]),
            share=chance.choice(shares),
        )
        for _ in range(chance.randint(1, 6))
    ]
    gone: list[Client] = []
    for _ in range(chance.randint(0, 8)):
        for _ in range(chance.randint(0, 120)):
            await net.turn()
        for name in net.stopped():
            if chance.random() < 0.7:
                net.resume(name)
        what = chance.random()
        if what < 0.3:
            alive = net.alive()
            for name in chance.sample(alive, chance.choice([1, 1, 2, len(alive)])):
                net.replace(name)
            for name in net.stopped():
                net.resume(name)
            await moved_on(net, clients)
        elif what < 0.4:
            net.stop(chance.choice([*net.alive(), *net.gateways, CONTROLLER]))
            if chance.random() < 0.3:  # until everything is computed
                while await net.turn() and not chance.random() < 0.002:
                    pass
        elif CONTROLLER in net.stopped():
            continue  # nothing is started, drained or updated
        elif what < 0.55 and net.draining() == []:
            name = chance.choice(net.alive())
            net.start(int(name[1]))
            net.drain(name)
        elif what < 0.6 and net.version == "1":
            update(net)
        elif what < 0.75 and net.pairs():
            net.flap(*chance.choice(net.pairs()))
        elif what < 0.85:
            net.start(chance.randrange(stages))
        elif len(clients) > 1:
            left = clients.pop()
            left.task.cancel()
            gone.append(left)
    for name in net.stopped():
        net.resume(name)
    await whole(net, *clients)
    await asyncio.gather(*(c.task for c in gone), return_exceptions=True)
    await freed(net)


def update(net: Net) -> None:
    """Start version 2 of every stage; version 1 drains."""
    old, net.version = set(net.alive()) - set(net.draining()), "2"
    for stage in range(net.stages):
        net.start(stage)
    for name in old:
        net.drain(name)


async def moved_on(net: Net, clients: list[Client]) -> None:
    """Wait until every stream progressed and none runs alone.

    A stream that loses one lone replica after another counts as poison.
    """
    made = [len(client.items) for client in clients]

    def has_moved() -> bool:
        counts = zip(clients, made, strict=True)
        all_moved = all(c.task.done() or len(c.items) > before for c, before in counts)
        routers = [streams.router for streams in net.gateways.values()]
        return all_moved and not any(
            stream.is_single for router in routers for stream in router.streams.values()
        )

    await net.settle(has_moved)
