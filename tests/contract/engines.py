"""Contract of engines: checks that every replica that generates text passes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.text.grammar import grammar_of_regex
from multiworld.serve.wire import generation_messages
from multiworld.serve.wire.generation_messages import (
    Sampling,
    SequenceStart,
    TokenItem,
)
from multiworld.serve.wire.protocol import Key, RemoteError
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)
from tests.unit.inner_state import leaks_of

GATEWAY, NAME = "gateway/1", "m/0/1"
PROMPT = [40, 78, 67, 69, 0, 85, 80, 79, 78, 0, 65, 0, 84, 73, 77, 69]
COUNT = 12
WAIT_S = 30.0

KINDS = {
    "greedy": Sampling(temperature=0.0, max_tokens=COUNT, ignore_eos=True),
    "sampled": Sampling(seed=7, max_tokens=COUNT, ignore_eos=True),
    "cut": Sampling(
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        seed=3,
        max_tokens=COUNT,
        ignore_eos=True,
    ),
    "penalised": Sampling(
        seed=5,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        repetition_penalty=1.2,
        logit_bias={70: 3.0, 71: -100.0},
        max_tokens=COUNT,
        ignore_eos=True,
    ),
    "repeated": Sampling(
        temperature=0.0,
        frequency_penalty=0.6,
        repetition_penalty=1.3,
        logit_bias={69: 2.0},
        max_tokens=COUNT,
        ignore_eos=True,
    ),
    "long": Sampling(
        seed=8,
        presence_penalty=0.4,
        min_tokens=COUNT,
        stop_token_ids=(66, 67, 68),
        max_tokens=COUNT,
        ignore_eos=True,
    ),
    "another choice": Sampling(seed=7, choice=1, max_tokens=COUNT, ignore_eos=True),
    "structured": Sampling(
        seed=9,
        max_tokens=COUNT,
        ignore_eos=True,
        grammar=grammar_of_regex("([a-f]{2}-)+", "regex"),
    ),
}
"""Sampling of each kind of request."""


@dataclass
class _Edge:
    peer: str


class Inbox:
    """The gateway's end of an edge: it collects what the replica sends."""

    def __init__(self) -> None:
        self.edge = _Edge(GATEWAY)
        self.messages: list[Any] = []
        self._grown = asyncio.Event()

    def put(self, message: Any, contents: Sequence[Any] = ()) -> None:
        self.messages.append(message)
        self._grown.set()

    def flush(self) -> None:
        pass

    async def wait_sent(self) -> None:
        pass

    async def until(self, is_there: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_there():
                self._grown.clear()
                await self._grown.wait()


class Bench:
    """A worker without its process, its gateway, and the sequences of that gateway."""

    def __init__(
        self, worker: Any, without: Sequence[str] = (), adapters: Sequence[str] = ()
    ) -> None:
        self.adapters = adapters
        self.worker, self.inbox = worker, Inbox()
        self.kinds = {name: KINDS[name] for name in KINDS if name not in without}
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = 0

    async def __aenter__(self) -> Bench:
        known = Replica(NAME, "m", "1", 0, ReplicaState.READY, weights="w")
        table = RoutingTable(1, (GATEWAY,), {"m": Route("1", {"1": 1})}, {NAME: known})
        self.worker.table_changed(table)
        self.worker.edge_up(self.inbox)
        bodies = (self.worker.run, self.worker.look)
        self._tasks = [asyncio.ensure_future(body()) for body in bodies]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def run_ended(self) -> None:
        await asyncio.wait(self._tasks[:1], timeout=WAIT_S)
        assert self._tasks[0].done()

    def send(self, message: Any) -> None:
        self.worker.received(self.inbox, [(message, ())])

    def begin(
        self, sampling: Sampling, made: Sequence[int] = (), **more: Any
    ) -> SequenceStart:
        """Start a sequence; ``made`` are the output tokens that it has already."""
        self._numbers += 1
        prompt = more.pop("prompt", PROMPT)
        key: Key = GATEWAY, self._numbers, 1
        start = SequenceStart(
            key, (*prompt, *made), len(prompt), (NAME,), sampling, **more
        )
        self.send(generation_messages.BeginSequences((start,)))
        return start

    def end(self, start: SequenceStart) -> None:
        self.send(generation_messages.EndSequences((start.key,)))

    def items(self, start: SequenceStart) -> list[TokenItem]:
        return [
            item
            for message in self.inbox.messages
            if isinstance(message, generation_messages.Tokens)
            for item in message.items
            if item.key == start.key
        ]

    def failure(self, start: SequenceStart) -> RemoteError | bool | None:
        """Return a sequence's error; None: it must be replayed; False: no failure."""
        for message in self.inbox.messages:
            match message:
                case generation_messages.SequenceFailed(key, error):
                    if key == start.key:
                        return error
        return False

    async def has(self, start: SequenceStart, count: int) -> list[TokenItem]:
        await self.inbox.until(lambda: len(self.items(start)) >= count)
        return self.items(start)

    async def whole(self, start: SequenceStart) -> list[int]:
        def is_over() -> bool:
            assert self.failure(start) is False, self.failure(start)
            return any(item.finish for item in self.items(start))

        await self.inbox.until(is_over)
        self.end(start)
        return [item.token for item in self.items(start)]

    async def is_at_rest(self) -> None:
        """Wait until nothing of ended sequences is left."""
        async with asyncio.timeout(WAIT_S):
            while not self.worker.is_idle or leaks_of(self.worker):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def failed(self, start: SequenceStart) -> RemoteError | None:
        await self.inbox.until(lambda: self.failure(start) is not False)
        found = self.failure(start)
        self.end(start)
        assert not isinstance(found, bool)
        return found


EngineCheck = Callable[[Bench], Awaitable[None]]


async def tokens_come_in_order(bench: Bench) -> None:
    start = bench.begin(KINDS["greedy"])
    await bench.whole(start)
    items = bench.items(start)
    assert [item.index for item in items] == [*range(COUNT)]
    assert [item.finish for item in items] == [""] * (COUNT - 1) + ["length"]


async def sequences_do_not_depend_on_others(bench: Bench) -> None:
    alone = {}
    for name, sampling in bench.kinds.items():
        alone[name] = await bench.whole(bench.begin(sampling))
    starts = {name: bench.begin(sampling) for name, sampling in bench.kinds.items()}
    for name, start in starts.items():
        assert await bench.whole(start) == alone[name], name
    assert len(set(map(tuple, alone.values()))) == len(bench.kinds), alone


async def every_kind_continues_from_every_token(bench: Bench) -> None:
    for name, sampling in bench.kinds.items():
        tokens = await bench.whole(bench.begin(sampling))
        for cut in range(1, COUNT):
            start = bench.begin(sampling, tokens[:cut])
            assert await bench.whole(start) == tokens[cut:], (name, cut)
            assert bench.items(start)[0].index == cut


async def every_token_has_log_probabilities(bench: Bench) -> None:
    for name in ("greedy", "sampled"):
        sampling = bench.kinds[name]
        plain = await bench.whole(bench.begin(sampling))
        start = bench.begin(replace_sampling(sampling, logprobs=3))
        assert await bench.whole(start) == plain
        for item in bench.items(start):
            assert item.logprob is not None, (name, item.index)
            values = [value for _, value in item.top]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert item.logprob <= values[0] + 1e-6
            known = dict(item.top).get(item.token, item.logprob)
            assert item.logprob == pytest.approx(known, abs=1e-6)
            assert name != "greedy" or item.token == item.top[0][0]


async def adapters_compute_otherwise(bench: Bench) -> None:
    sampling = bench.kinds["sampled"]
    names = ["", *bench.adapters, ""]
    starts = [bench.begin(sampling, adapter=name) for name in names]
    found = [await bench.whole(start) for start in starts]
    assert found[0] == found[-1]
    assert len(set(map(tuple, found))) == 1 + len(bench.adapters)
    for name, tokens in zip(bench.adapters, found[1:], strict=False):
        again = bench.begin(sampling, tokens[:5], adapter=name)
        assert await bench.whole(again) == tokens[5:]


async def ended_sequences_leave_nothing(bench: Bench) -> None:
    long = replace_count(KINDS["sampled"], 200)
    starts = [bench.begin(long) for _ in range(8)]
    await bench.has(starts[0], 3)
    for start in starts:
        bench.end(start)
    await bench.is_at_rest()
    counts = [len(bench.items(start)) for start in starts]
    await asyncio.sleep(0.1)
    later = [len(bench.items(start)) for start in starts]
    assert all(b <= a + 1 for a, b in zip(counts, later, strict=True))


async def more_than_fit_wait(bench: Bench) -> None:
    starts = [bench.begin(replace_count(KINDS["sampled"], 4)) for _ in range(40)]
    found = [await bench.whole(start) for start in starts]
    assert len(set(map(tuple, found))) == 1
    assert len(found[0]) == 4


async def ends_are_kept(bench: Bench) -> None:
    """A stop token ends a sequence, and is its last token."""
    tokens = await bench.whole(bench.begin(KINDS["greedy"]))
    stop = tokens[4]
    sampling = replace_sampling(KINDS["greedy"], stop_token_ids=(stop,))
    start = bench.begin(sampling)
    assert await bench.whole(start) == tokens[: tokens.index(stop) + 1]
    assert bench.items(start)[-1].finish == "stop"


async def prepared_sequences_are_reported(bench: Bench) -> None:
    """A sequence that will move here is prepared, then continues as another attempt."""
    tokens = await bench.whole(bench.begin(KINDS["sampled"]))
    key = GATEWAY, 1000, 2
    made = (*PROMPT, *tokens[:5])
    start = SequenceStart(key, made, len(PROMPT), (NAME,), KINDS["sampled"])
    bench.send(generation_messages.PrepareSequence(start, (0,)))
    prepared = generation_messages.SequencePrepared(key)
    await bench.inbox.until(lambda: prepared in bench.inbox.messages)
    assert not bench.items(start)
    later = SequenceStart(
        (GATEWAY, 1000, 3),
        (*PROMPT, *tokens[:7]),
        len(PROMPT),
        (NAME,),
        KINDS["sampled"],
        prepared=2,
    )
    bench.send(generation_messages.BeginSequences((later,)))
    assert await bench.whole(later) == tokens[7:]


async def suspects_run_alone(bench: Bench) -> None:
    long = replace_count(KINDS["sampled"], 60)
    other = bench.begin(long, share=Share("other"))
    await bench.has(other, 2)
    suspect = bench.begin(KINDS["greedy"], is_suspect=True)
    await bench.whole(suspect)
    alone = generation_messages.RunsAlone(suspect.key)
    over = generation_messages.RunsAlone(suspect.key, is_over=True)
    begin = bench.inbox.messages.index(alone)
    assert bench.inbox.messages.index(over) > begin
    assert len(await bench.whole(other)) == 60


def replace_count(sampling: Sampling, count: int) -> Sampling:
    return replace_sampling(sampling, max_tokens=count)


def replace_sampling(sampling: Sampling, **changes: Any) -> Sampling:
    return msgspec.structs.replace(sampling, **changes)


CHECKS: tuple[EngineCheck, ...] = (
    tokens_come_in_order,
    sequences_do_not_depend_on_others,
    every_kind_continues_from_every_token,
    every_token_has_log_probabilities,
    adapters_compute_otherwise,
    ended_sequences_leave_nothing,
    more_than_fit_wait,
    ends_are_kept,
    prepared_sequences_are_reported,
    suspects_run_alone,
)
"""All checks of the contract."""
