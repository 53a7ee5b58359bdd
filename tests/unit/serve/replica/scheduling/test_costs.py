"""Costs of steps, arrivals and ends at a replica, beside many other sequences."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import pytest

from multiworld.serve.engine.compute.prefix_blocks import Block
from multiworld.serve.engine.external.whole_engine import EngineSettings
from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.replica.scheduling.sample_costs import costs_of
from multiworld.serve.replica.scheduling.scheduled_sequence import ScheduledSequence
from multiworld.serve.replica.scheduling.scheduler import Scheduler
from multiworld.serve.replica.sequences import prompt_prefixes
from multiworld.serve.replica.sequences.events import Received
from multiworld.serve.replica.sequences.prompt_prefixes import PrefixCache
from multiworld.serve.replica.whole_engines.engine_sequences import EngineSequences
from multiworld.serve.text.engine_limits import EngineLimits
from multiworld.serve.wire.generation_messages import (
    BeginSequences,
    EndSequences,
    Sampling,
    SequenceStart,
)
from tests.lines import lines_of


def scheduler_of(seqs: int, waiting: int, *, tenants: int = 1) -> Scheduler:
    limits = EngineLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=64,
        block_size=16,
        blocks=10**6,
        steps=1,
    )
    made = Scheduler(limits)
    for number in range(waiting):
        share = Share(f"t{number % tenants}")
        made.add(ScheduledSequence(("g", number, 0), [1] * 20, share))
    return made


def step(scheduler: Scheduler) -> None:
    planned = scheduler.next_step(1.0)
    assert planned is not None
    tokens = [(part.key, 5 if part.samples else None) for part in planned.parts]
    scheduler.sampled(planned.number, tokens)


def test_tenant_whose_prompts_are_scored_gets_a_smaller_part_of_a_step() -> None:
    """Scoring its tokens makes the step longer for the others, too."""
    scheduler = scheduler_of(4, 0)
    scored = Sampling(prompt_logprobs=20)
    for number, sampling in enumerate((scored, Sampling())):
        costs = costs_of(sampling, prompt=4000)
        share = Share(f"t{number}")
        scheduler.add(
            ScheduledSequence(("g", number, 0), [1] * 4000, share=share, costs=costs)
        )
    counts = [0, 0]
    for _ in range(40):
        planned = scheduler.next_step(1.0)
        assert planned is not None
        for part in planned.parts:
            counts[part.key[1]] += part.count
        scheduler.sampled(planned.number, [(part.key, None) for part in planned.parts])
    assert 0 < 1.1 * counts[0] < counts[1]


def work_beside_waiting(waiting: int, tenants: int = 1) -> int:
    """Return the lines of code run for a step of four sequences, while others wait."""
    scheduler = scheduler_of(4, waiting, tenants=tenants)
    for _ in range(8):
        step(scheduler)
    assert len(scheduler.pool.running) == 4
    return lines_of(partial(step, scheduler))


def test_work_for_a_step_does_not_grow_with_the_sequences_that_wait() -> None:
    assert work_beside_waiting(1000) == work_beside_waiting(10)


def test_work_for_a_step_grows_no_faster_than_the_tenants_that_wait() -> None:
    """It must not grow with their square, or with tenants times parts."""
    few, many = work_beside_waiting(100, 100), work_beside_waiting(400, 400)
    assert many < 4.5 * few
    parts = scheduler_of(100, 100, tenants=100)
    wide = lines_of(partial(step, parts))
    assert wide < 100 * 250


def arrival_beside(running: int) -> list[int]:
    """Return the lines of code run for an arrival and an end beside running tenants."""
    scheduler = scheduler_of(running + 1, running, tenants=running)
    while scheduler.pool.waiting:
        step(scheduler)
    # This lets the scheduler note the counters that have grown.
    scheduler.add(ScheduledSequence(("g", -2, 0), [1] * 9))
    scheduler.pool.remove(("g", -2, 0))
    new = ScheduledSequence(("g", -1, 0), [1] * 9, Share("new"))
    add = partial(scheduler.add, new)
    lines = [lines_of(add)]
    newcomer = scheduler.pool.known["g", -1, 0]
    lines.append(lines_of(partial(scheduler.pool.admit, newcomer)))
    return [*lines, lines_of(partial(scheduler.pool.remove, ("g", -1, 0)))]


def test_work_for_an_arrival_does_not_grow_with_the_sequences_that_run() -> None:
    assert arrival_beside(200) == arrival_beside(10)


def lines_of_preemption(waiting: int) -> int:
    """Return the lines of code run for a step that admits sequences of a priority."""
    scheduler = scheduler_of(2, 2)
    step(scheduler)
    for number in range(waiting):
        share = Share("high", 1.0, 1)
        scheduler.add(ScheduledSequence(("g", 9 + number, 0), [1] * 20, share=share))
    lines = lines_of(partial(step, scheduler))
    assert {s.share.tenant for s in scheduler.pool.running.values()} == {"high"}
    return lines


def test_higher_priorities_are_admitted_without_a_look_at_all_of_them() -> None:
    """The step looks at as many as it admits, and one more."""
    assert lines_of_preemption(1000) < lines_of_preemption(20) + 100


class CountedName(str):
    """A name of a gateway that counts how often it is compared."""

    comparisons = 0
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)


def comparisons_beside(suspects: int) -> int:
    """Return the comparisons of keys for the start and end of a sequence."""
    settings = EngineSettings(replica="r", path="", vocabulary=9, max_num_seqs=2)
    sequences = EngineSequences(settings, lambda _: None, lambda *_: "")

    def begin(number: int, *, is_suspect: bool) -> None:
        key = CountedName("g"), number, 0
        start = SequenceStart(key, (1,), 1, ("r",), Sampling(), is_suspect=is_suspect)
        sequences.handle(Received("g", BeginSequences((start,))))

    for number in range(suspects):
        begin(number, is_suspect=True)
    before = CountedName.comparisons
    begin(suspects, is_suspect=False)
    begin(suspects + 1, is_suspect=True)
    for number in (suspects, suspects + 1):
        ended = EndSequences(((CountedName("g"), number, 0),))
        sequences.handle(Received("g", ended))
    return CountedName.comparisons - before


def test_work_for_an_end_does_not_grow_with_the_suspects_that_wait() -> None:
    """This is about a replica with a whole engine."""
    assert comparisons_beside(500) == comparisons_beside(5)


class Unread(OrderedDict[bytes, Block]):
    """Blocks that must not be read one by one."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("all blocks are read")

    items = __iter__


def test_cached_blocks_are_not_read_while_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_prefixes, "OrderedDict", Unread)
    cache = PrefixCache(100)
    cache.put(b"a", Block({}))
    assert cache.has(b"a")
