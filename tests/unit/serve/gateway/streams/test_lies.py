"""False and unauthorised messages between the processes of a service."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.text.engine_limits import EngineLimits
from multiworld.serve.wire import generation_messages as messages
from multiworld.serve.wire.frames import lay_out, unpack
from multiworld.serve.wire.generation_messages import (
    Sampling,
    SequenceStart,
    StepPart,
    TokenItem,
)
from multiworld.serve.wire.protocol import Key, MessageError
from tests.unit.inner_state import leaks_of
from tests.unit.serve.gateway.streams.simulated_chains import (
    GATEWAY,
    Client,
    FakeOutbox,
    Net,
)

LIMITS = EngineLimits(
    max_num_seqs=8, max_num_batched_tokens=16, block_size=4, blocks=200, steps=3
)
KEY: Key = (GATEWAY, 1, 0)
ROWS = [{"hidden": torch.zeros(2, 1)}]


async def begun(chance: int, replicas: list[int], count: int = 3) -> tuple[Net, Any]:
    """Return a service with some streams that have some tokens."""
    net = Net(random.Random(chance), replicas, LIMITS)
    await net.connected()
    clients = [Client(net, [5 + n, 6, 7] * 4, 20) for n in range(count)]
    await net.settle(lambda: all(len(client.items) >= 4 for client in clients))
    return net, clients


async def whole(net: Net, clients: list[Client]) -> None:
    await net.settle(lambda: all(client.task.done() for client in clients))
    for client in clients:
        await client.task
        client.check()


@pytest.mark.parametrize("seed", range(3))
async def test_sequence_missing_from_a_returned_step_delays_no_other(seed: int) -> None:
    """It is returned to its gateway, and finally starts over elsewhere."""
    net, clients = await begun(seed, [1, 1, 2], 4)
    liar = net.streams.router.streams[1].chain[2]

    def lie(pair: tuple[str, str], entry: Any) -> Any:
        message = entry[0]
        if pair[0] == liar and isinstance(message, messages.StepDone):
            told = [one for one in message.tokens if one[0][1] != 1]
            return messages.StepDone(message.number, tuple(told)), entry[1]
        return entry

    net.lie = lie
    await whole(net, clients)
    assert not net.refused


@pytest.mark.parametrize("kind", [messages.StepDone, messages.Step])
async def test_step_that_never_returns_is_abandoned(kind: type) -> None:
    """Some messages are lost although the connection is not."""
    net, clients = await begun(3, [1, 2, 1], 4)
    left = [3]

    def lie(pair: tuple[str, str], entry: Any) -> Any:
        if isinstance(entry[0], kind) and left[0]:
            left[0] -= 1
            return None
        return entry

    net.lie = lie
    await whole(net, clients)
    assert not left[0]


LIES: dict[str, Callable[[Key], Any]] = {
    "token": lambda key: messages.Tokens((TokenItem(key, 0, 1),)),
    "failed": lambda key: messages.SequenceFailed(key),
    "alone": lambda key: messages.RunsAlone(key),
}


@pytest.mark.parametrize("what", LIES)
async def test_gateway_accepts_messages_of_a_streams_chain_only(what: str) -> None:
    """A message of another replica of the same stage closes its edge."""
    net, clients = await begun(5, [2, 1, 2], 3)
    stream = net.streams.router.streams[1]
    place = 0 if what == "alone" else 2
    outside = [n for n in net.alive() if n.startswith(f"r{place}.")]
    outside.remove(stream.chain[place])
    key = (GATEWAY, 1, stream.attempt)
    net.queues[outside[0], GATEWAY].append((LIES[what](key), []))
    await whole(net, clients)
    assert len(net.refused) == 1


async def test_tokens_of_another_gateways_stream_are_not_ours() -> None:
    net, clients = await begun(5, [1, 1])
    stream = net.streams.router.streams[1]
    (last,) = [n for n in net.alive() if n.startswith("r1.")]
    index = len(stream.tokens) - stream.prompt
    other = TokenItem(("gateway/2", 1, stream.attempt), index, 1)
    net.queues[last, GATEWAY].append((messages.Tokens((other,)), []))
    late = TokenItem((GATEWAY, 1, stream.attempt), 20, 1)
    net.queues[last, GATEWAY].append((messages.Tokens((late,)), []))
    await whole(net, clients)
    assert [type(message) for message in net.refused] == [messages.Tokens]


def announced(key: Key) -> Any:
    """Return a step that begins another stream of the same chain."""
    other = (key[0], 99, 0)
    start = SequenceStart(other, (1, 2), 2, ("r0.1", "r1.2", "r2.3"), Sampling())
    return messages.Step("r0.1", 9, (StepPart(other, 0, 2, False),), (start,)), ROWS


TO_WORKERS: dict[str, tuple[int, int, Callable[[Key], Any]]] = {
    "step done": (1, 0, lambda key: (messages.StepDone(1, ((key, 3),)), [])),
    "resumed": (1, 0, lambda key: (messages.KvRebuilt(key, 3), [])),
    "held": (0, 1, lambda key: (messages.KvHeld(key, 3), [])),
    "rebuild": (2, 1, lambda key: (messages.ActivationRows(key, 0, True), ROWS)),
    "rebuild of the first": (1, 0, lambda key: (messages.ActivationRows(key, 0), ROWS)),
    "preempted": (2, 1, lambda key: (messages.PreemptSequences((key,)), [])),
    "end": (0, 1, lambda key: (messages.EndSequences((key,)), [])),
    "pause": (1, 0, lambda key: (messages.PauseSequences((key,)), [])),
    "outcome to a later stage": (0, 1, lambda key: (messages.StepDone(1, ()), [])),
    "step": (
        2,
        1,
        lambda key: (messages.Step("r0.1", 9, (StepPart(key, 0, 2, False),)), ROWS),
    ),
    "fewer rows": (
        0,
        1,
        lambda key: (messages.Step("r0.1", 9, (StepPart(key, 0, 9, False),)), ROWS),
    ),
    "twice": (
        0,
        1,
        lambda key: (messages.Step("r0.1", 9, (StepPart(key, 0, 1, False),) * 2), ROWS),
    ),
    "announced by another stage": (2, 1, announced),
    "announced elsewhere": (0, 2, announced),
    "no rows at all": (0, 1, lambda key: (messages.ActivationRows(key, 0), [{}])),
    "one dimension": (
        0,
        1,
        lambda key: (messages.ActivationRows(key, 0), [{"hidden": torch.zeros(2)}]),
    ),
}


@pytest.mark.parametrize("what", TO_WORKERS)
async def test_replica_accepts_messages_of_authorised_senders_only(what: str) -> None:
    """Messages that their sender is not authorised to send close its edge."""
    net, clients = await begun(7, [1, 1, 1])
    sender, receiver, make = TO_WORKERS[what]
    stream = net.streams.router.streams[1]
    entry = make((GATEWAY, 1, stream.attempt))
    here = stream.chain[receiver]
    with pytest.raises(MessageError):
        net.owners[here].received(FakeOutbox(net, here, stream.chain[sender]), [entry])
    await whole(net, clients)


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_step_that_fails_unexpectedly_costs_only_a_replay(place: int) -> None:
    """The process lives, and its sequences are returned to their gateway."""
    net, clients = await begun(7, [1, 1, 1])
    net.may_fail = True
    engine: Any = net.engine(net.alive()[place])
    compute, left = engine.compute, [2]

    async def fail(parts: Any, rows: Any, spans: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("unexpected")
        return await compute(parts, rows)

    engine.compute = fail
    await whole(net, clients)
    assert not left[0]
    assert net.streams.counts["replayed"]


@pytest.mark.parametrize(
    "message",
    [
        messages.StepDone(1, ((KEY, 2**63),)),
        messages.KvRebuilt(KEY, -1),
        messages.Tokens((TokenItem(KEY, 0, 2**31),)),
        messages.Tokens((TokenItem(KEY, -1, 5),)),
        messages.Tokens((TokenItem(KEY, 0, 5, "banana"),)),  # type: ignore[arg-type]
        messages.KvHeld(KEY, -5),
        messages.FetchActivations(KEY, 0, -5),
        messages.PreemptSequences((("gateway/1", 1),)),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_impossible_numbers_are_refused_on_arrival(message: Any) -> None:
    with pytest.raises(MessageError):
        unpack(packed(message))


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_share_without_weight_is_refused(weight: float) -> None:
    """Costs are divided by the weight."""
    share = Share("t", weight)
    start = messages.SequenceStart(KEY, (1,), 1, ("a",), messages.Sampling(), share)
    with pytest.raises(MessageError):
        unpack(packed(messages.BeginSequences((start,))))
    fine = messages.SequenceStart(KEY, (1,), 1, ("a",), messages.Sampling())
    ((found, _),) = unpack(packed(messages.BeginSequences((fine,))))
    assert found == messages.BeginSequences((fine,))


@pytest.mark.parametrize(
    "changes",
    [
        {"key": ("gateway/2", 9, 0)},
        {"chain": ("r0.1",)},
        {"chain": ("r0.1", "r0.1", "r2.3")},
        {"tokens": ()},
        {"prompt": 0},
        {"prompt": 3},
    ],
    ids=str,
)
async def test_impossible_sequence_does_not_start(changes: dict[str, Any]) -> None:
    net, clients = await begun(7, [1, 1, 1])
    given = {
        "key": (GATEWAY, 9, 0),
        "tokens": (1, 2),
        "prompt": 2,
        "chain": tuple(net.alive()),
        "sampling": messages.Sampling(),
    }
    start = messages.SequenceStart(**{**given, **changes})
    here = net.alive()[1]
    worker = net.worker(here)
    before = leaks_of(worker).get("sequences", 0)
    with pytest.raises(MessageError):
        worker.received(
            FakeOutbox(net, here, GATEWAY),  # type: ignore[arg-type]
            [(messages.BeginSequences((start,)), [])],
        )
    assert leaks_of(worker).get("sequences", 0) == before
    await whole(net, clients)


def packed(message: Any) -> torch.Tensor:
    return lay_out([(message, [])]).pack()
