"""The scheduler of steps, in a simulated pipeline."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.replica.scheduling.scheduled_sequence import ScheduledSequence
from multiworld.serve.replica.scheduling.scheduler import (
    Scheduler,
    TooManyTokensError,
)
from multiworld.serve.replica.scheduling.step_planner import (
    SHARED_TOKENS,
    PlannedStep,
)
from multiworld.serve.replica.scheduling.tenant_step_limits import (
    BESIDE,
    cost_of,
    rows_of,
)
from multiworld.serve.replica.scheduling.token_shares import PRUNE_AT, TokenShares
from multiworld.serve.routing.poison_rules import PROOF_TOKENS
from multiworld.serve.text.engine_limits import EngineLimits
from multiworld.serve.wire.protocol import Key
from tests.unit.inner_state import counter_count


def key(number: int) -> Key:
    return "gateway/1", number, 0


def limits(
    *,
    seqs: int = 4,
    tokens: int = 8,
    block: int = 4,
    blocks: int = 100,
    steps: int = 1,
) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        block_size=block,
        blocks=blocks,
        steps=steps,
    )


class Pipeline:
    """A scheduler, and stages that compute the steps that it plans, in order."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.in_flight: deque[PlannedStep] = deque()
        self.computed: dict[Key, int] = {}
        self.made: dict[Key, int] = {}
        self.ended: set[Key] = set()

    def plan(self) -> PlannedStep | None:
        """Plan a step, and check its invariants."""
        step = self.scheduler.next_step()
        if step is None:
            return None
        limit = self.scheduler.limits
        alive = [
            one
            for one in self.in_flight
            if any(part.key not in self.ended for part in one.parts)
        ]
        assert len(alive) < limit.steps
        keys = [part.key for part in step.parts]
        assert len(set(keys)) == len(keys), "a sequence has one part at most"
        counts = [part.count for part in step.parts]
        assert sum(counts) <= limit.max_num_batched_tokens
        assert len(self.scheduler.pool.running) <= limit.max_num_seqs
        assert 0 <= self.scheduler.pool.used_blocks <= limit.blocks
        for part in step.parts:
            assert part.key not in self.ended
            assert part.begin in (0, self.computed.get(part.key, 0))
            self.computed[part.key] = part.begin + part.count
            tokens = self.scheduler.pool.known[part.key].tokens
            assert part.begin + part.count <= len(tokens)
            assert part.samples == (part.begin + part.count == len(tokens))
        self.in_flight.append(step)
        return step

    def finish_one(self, wanted: dict[Key, int]) -> None:
        step = self.in_flight.popleft()
        out: list[tuple[Key, int | None]] = []
        for part in step.parts:
            if part.key in self.ended:
                continue
            if not part.samples:
                out.append((part.key, None))
                continue
            self.made[part.key] = self.made.get(part.key, 0) + 1
            is_last = self.made[part.key] >= wanted[part.key]
            out.append((part.key, None if is_last else 7))
        self.scheduler.sampled(step.number, out)
        for number, _ in out:
            if self.made.get(number, 0) >= wanted[number]:
                self.end(number)

    def end(self, which: Key) -> None:
        self.ended.add(which)
        self.scheduler.pool.remove(which)

    def run(self, wanted: dict[Key, int], turns: int = 10_000) -> None:
        for _ in range(turns):
            while self.plan() is not None:
                pass
            if not self.in_flight:
                break
            self.finish_one(wanted)
        assert all(
            self.made.get(k, 0) >= n or k in self.ended for k, n in wanted.items()
        )


def test_long_prompt_is_computed_in_chunks_while_others_continue() -> None:
    pipeline = Pipeline(Scheduler(limits(tokens=8)))
    scheduler = pipeline.scheduler
    scheduler.add(ScheduledSequence(key(1), [1, 2]))
    first = pipeline.plan()
    assert first is not None
    scheduler.sampled(first.number, [(key(1), 5)])
    pipeline.in_flight.clear()
    scheduler.add(ScheduledSequence(key(2), list(range(20))))
    counts = []
    for _ in range(3):
        step = pipeline.plan()
        assert step is not None
        counts.append([(p.key[1], p.count, p.samples) for p in step.parts])
        pipeline.finish_one({key(1): 99, key(2): 99})
    assert counts == [
        [(1, 1, True), (2, 7, False)],
        [(1, 1, True), (2, 7, False)],
        [(1, 1, True), (2, 6, True)],
    ]


def planned(pipeline: Pipeline) -> list[dict[int, int]]:
    """Plan all steps that may be in flight; return the tokens of each sequence."""
    found = []
    while (step := pipeline.plan()) is not None:
        found.append({part.key[1]: part.count for part in step.parts})
    return found


def test_prompt_is_computed_in_all_stages_at_once() -> None:
    """Chunks have about the same size, unless they would be too small."""
    for tokens, parts in ((128, [43, 43, 42]), (50, [32, 18]), (300, [100] * 3)):
        pipeline = Pipeline(Scheduler(limits(tokens=512, steps=3, blocks=100)))
        pipeline.scheduler.add(ScheduledSequence(key(1), [0] * tokens))
        assert planned(pipeline) == [{1: count} for count in parts]
    pipeline = Pipeline(Scheduler(limits(tokens=512, blocks=100)))
    pipeline.scheduler.add(ScheduledSequence(key(1), [0] * 128))
    assert planned(pipeline) == [{1: 128}], "one stage"


def test_running_sequences_wait_for_the_prefill_of_one_step_in_all() -> None:
    """Steps are full only while no sequence waits for them."""
    pipeline = Pipeline(Scheduler(limits(tokens=120, steps=3, blocks=9000)))
    pipeline.scheduler.add(ScheduledSequence(key(1), [0] * 400))
    wanted = {key(1): 99, key(2): 99, key(3): 99}
    assert planned(pipeline) == [{1: 120}] * 3
    pipeline.scheduler.add(ScheduledSequence(key(2), [0] * 4000))
    pipeline.scheduler.add(ScheduledSequence(key(3), [0] * 4000))
    for _ in range(4):
        pipeline.finish_one(wanted)
        planned(pipeline)
    in_flight = [part for step in pipeline.in_flight for part in step.parts]
    assert len(pipeline.in_flight) == 3
    assert [part.count for part in in_flight if part.key == key(1)] == [1]
    assert sum(part.count for part in in_flight) == 121


def test_rebuilt_sequences_wait_for_those_still_being_rebuilt() -> None:
    """Steps are full until all are rebuilt; running sequences get a token in each."""
    pipeline = Pipeline(Scheduler(limits(seqs=9, tokens=120, steps=3, blocks=9000)))
    for number in range(1, 5):
        pipeline.scheduler.add(ScheduledSequence(key(number), [0] * 130, rebuild=130))
    wanted = {key(number): 99 for number in range(1, 5)}
    steps = planned(pipeline)
    assert steps == [{1: 120}, {1: 10, 2: 110}, {2: 20, 3: 100}]
    for _ in range(3):
        pipeline.finish_one(wanted)
    assert planned(pipeline) == [{1: 1, 2: 1, 3: 30, 4: 88}, {4: 42}]
    for _ in range(2):
        pipeline.finish_one(wanted)
    assert planned(pipeline) == [{1: 1, 2: 1, 3: 1, 4: 1}]
    pipeline.scheduler.add(ScheduledSequence(key(5), [0] * 300))
    assert planned(pipeline) == [{5: 40}, {5: 40}], "a new prompt is in small parts"


def test_rebuild_without_memory_delays_no_other_sequence() -> None:
    pipeline = Pipeline(Scheduler(limits(seqs=2, tokens=120, steps=3, blocks=9000)))
    wanted = {key(number): 99 for number in range(1, 4)}
    for number in (1, 2):
        pipeline.scheduler.add(ScheduledSequence(key(number), [0]))
    pipeline.scheduler.add(ScheduledSequence(key(3), [0] * 130, rebuild=130))
    assert planned(pipeline) == [{1: 1, 2: 1}]
    pipeline.finish_one(wanted)
    assert planned(pipeline) == [{1: 1, 2: 1}]


def started(count: int) -> Pipeline:
    """Return a pipeline of three stages with sequences that all decode."""
    scheduler = Scheduler(limits(seqs=count + 1, tokens=64, steps=3))
    pipeline = Pipeline(scheduler)
    for number in range(count):
        scheduler.add(ScheduledSequence(key(number), [1]))
    pipeline.plan()
    pipeline.finish_one({key(number): 99 for number in range(count)})
    return pipeline


def test_many_sequences_fill_the_pipeline_in_equal_steps() -> None:
    pipeline = started(24)
    steps = [pipeline.plan() for _ in range(4)]
    assert [len(s.parts) if s else None for s in steps] == [8, 8, 8, None]


def test_few_sequences_go_together_and_wait_for_each_other() -> None:
    pipeline = started(6)
    wanted = {key(number): 99 for number in range(7)}
    assert [
        len(s.parts) if s else None for s in (pipeline.plan(), pipeline.plan())
    ] == [
        6,
        None,
    ]
    pipeline.scheduler.add(ScheduledSequence(key(6), [1]))
    prompt = pipeline.plan()
    assert prompt is not None
    assert [part.key for part in prompt.parts] == [key(6)]
    pipeline.finish_one(wanted)
    assert pipeline.plan() is None, "the new one is still in flight"
    pipeline.finish_one(wanted)
    both = pipeline.plan()
    assert both is not None
    assert len(both.parts) == 7


def test_last_sequence_is_preempted_and_resumes_first() -> None:
    scheduler = Scheduler(limits(seqs=2, tokens=64, block=2, blocks=4))
    pipeline = Pipeline(scheduler)
    scheduler.add(ScheduledSequence(key(1), [1, 2, 3]))
    scheduler.add(ScheduledSequence(key(2), [1, 2]))
    pipeline.run({key(1): 4, key(2): 3})
    assert scheduler.pool.preemptions > 0
    assert pipeline.made == {key(1): 4, key(2): 3}
    assert scheduler.pool.used_blocks == 0


def test_blocks_that_others_need_are_left_to_them() -> None:
    scheduler = Scheduler(limits(tokens=64, block=2, blocks=8))
    pipeline = Pipeline(scheduler)
    for number in range(3):
        scheduler.add(ScheduledSequence(key(number), [1, 2, 3]))
    while pipeline.plan() is not None:
        pass
    assert scheduler.pool.used_blocks == 6
    scheduler.pool.withheld = 4
    wanted = {key(0): 12, key(1): 2, key(2): 2}
    pipeline.finish_one(wanted)
    pipeline.plan()
    assert scheduler.pool.preemptions == 1
    assert scheduler.pool.used_blocks == 4
    pipeline.run(wanted)
    assert pipeline.made == wanted
    assert scheduler.pool.used_blocks == 0


def test_sequence_that_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(limits(block=2, blocks=3))
    with pytest.raises(TooManyTokensError, match="6 tokens need 4 blocks of 2; there"):
        scheduler.add(ScheduledSequence(key(1), [0] * 6))
    assert not scheduler.pool.known


def test_sequence_that_ends_in_a_step_does_not_hold_it_up() -> None:
    scheduler = Scheduler(limits(tokens=64))
    scheduler.add(ScheduledSequence(key(1), [1]))
    scheduler.add(ScheduledSequence(key(2), [1]))
    step = scheduler.next_step()
    assert step is not None
    assert scheduler.next_step() is None
    scheduler.pool.remove(key(1))
    assert scheduler.next_step() is None, "the other one is still in flight"
    scheduler.pool.remove(key(2))
    scheduler.add(ScheduledSequence(key(3), [1]))
    assert scheduler.next_step() is not None


def test_token_of_a_step_that_is_not_known_changes_nothing() -> None:
    """It may come from a faulty member, or from before a loss."""
    scheduler = Scheduler(limits())
    scheduler.add(ScheduledSequence(key(1), [1]))
    scheduler.sampled(77, [(key(1), 5), (key(9), 5)])
    assert scheduler.pool.known[key(1)].tokens == [1]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_sequence_gets_its_tokens_and_every_block_is_freed(
    data: st.DataObject,
) -> None:
    block = data.draw(st.integers(1, 5), "block")
    blocks = data.draw(st.integers(4, 12), "blocks")
    limit = limits(
        seqs=data.draw(st.integers(1, 5), "seqs"),
        tokens=data.draw(st.integers(1, 12), "tokens"),
        block=block,
        blocks=blocks,
        steps=data.draw(st.integers(1, 4), "steps"),
    )
    scheduler = Scheduler(limit)
    pipeline = Pipeline(scheduler)
    wanted: dict[Key, int] = {}
    room = blocks * block
    for number in range(data.draw(st.integers(1, 10), "sequences")):
        for _ in range(data.draw(st.integers(0, 3), "turns")):
            if pipeline.plan() is None and pipeline.in_flight:
                pipeline.finish_one(wanted)
        scheduler.pool.withheld = data.draw(st.integers(0, blocks - 1), "withheld")
        if wanted and data.draw(st.integers(0, 4), "lost") == 0:
            pipeline.end(data.draw(st.sampled_from(sorted(wanted)), "which"))
        prompt = data.draw(st.integers(1, room - 2), "prompt")
        made = data.draw(st.integers(1, max(1, room - prompt - 1)), "made")
        wanted[key(number)] = made
        is_suspect = data.draw(st.booleans(), "suspect")
        rebuild = data.draw(st.integers(0, prompt + 2), "rebuild")
        tokens = [0] * prompt
        scheduler.add(
            ScheduledSequence(
                key(number), tokens, rebuild=rebuild, is_suspect=is_suspect
            )
        )
    pipeline.run(wanted)
    assert not scheduler.pool.known
    assert scheduler.pool.used_blocks == 0
    assert len(scheduler.pool.running) == scheduler.pool.waiting == 0


def test_sequence_that_has_ended_in_the_last_stage_delays_no_other() -> None:
    """Its blocks stay allocated until its gateway ends it."""
    scheduler = Scheduler(limits(seqs=8, tokens=64))
    for number in range(8):
        scheduler.add(ScheduledSequence(key(number), [1]))
    first = scheduler.next_step()
    assert first is not None
    done = [(part.key, None if part.key == key(3) else 5) for part in first.parts]
    scheduler.sampled(first.number, done)
    assert scheduler.pool.used_blocks == 8
    second = scheduler.next_step()
    assert second is not None
    assert [part.key[1] for part in second.parts] == [0, 1, 2, 4, 5, 6, 7]
    scheduler.pool.remove(key(3))
    assert scheduler.pool.used_blocks == 7


def test_sequence_whose_end_its_gateway_did_not_see_continues_without_a_step() -> None:
    """All its tokens are computed, so the last stage only samples the next one."""
    scheduler = Scheduler(limits(tokens=64))
    scheduler.add(ScheduledSequence(key(1), [1, 2]))
    step = scheduler.next_step()
    assert step is not None
    scheduler.sampled(step.number, [(key(1), None)])
    assert scheduler.next_step() is None
    again = ("gateway/1", 1, 1)
    assert key(1) in scheduler.pool.reserved
    scheduler.take_over(
        key(1), ScheduledSequence(again, [1, 2], computed=2, share=Share())
    )
    assert scheduler.next_step() is None
    scheduler.resume(again, 7)
    step = scheduler.next_step()
    assert step is not None
    assert [(p.key, p.begin, p.count) for p in step.parts] == [(again, 2, 1)]
    scheduler.pool.remove(again)
    assert scheduler.pool.used_blocks == 0


def test_sequence_with_nothing_to_compute_is_refused() -> None:
    """It would never be in a step."""
    scheduler = Scheduler(limits())
    with pytest.raises(ValueError, match="all 3 tokens of"):
        scheduler.add(ScheduledSequence(key(1), [1, 2, 3], computed=3))
    assert not scheduler.pool.known


def test_blocks_are_taken_from_a_sequence_although_no_step_is_planned() -> None:
    """They count as free at once and may be reserved for another sequence."""
    scheduler = Scheduler(limits(tokens=64, block=2, blocks=8))
    scheduler.add(ScheduledSequence(key(1), [1, 2]))
    scheduler.add(ScheduledSequence(key(2), [1, 2]))
    step = scheduler.next_step()
    assert step is not None
    scheduler.sampled(step.number, [(key(1), 5), (key(2), None)])
    scheduler.pool.remove(key(2))
    scheduler.add(ScheduledSequence(key(3), [1, 2]))
    scheduler.pool.withheld = 7  # one of them loses its blocks
    step = scheduler.next_step()
    assert step is not None
    scheduler.sampled(step.number, [(p.key, 5) for p in step.parts])
    scheduler.add(ScheduledSequence(key(4), [1, 2]))
    scheduler.pool.withheld = 0
    step = scheduler.next_step()
    assert step is not None
    scheduler.sampled(step.number, [(p.key, 5) for p in step.parts])
    scheduler.pause(key(1))
    scheduler.pool.take_preempted()
    scheduler.pool.withheld = 7
    assert scheduler.next_step() is None, "it is planned without the one that is paused"
    assert {*scheduler.pool.take_preempted()} == {key(3), key(4)}
    assert scheduler.pool.take_preempted() == ()


def test_probe_skips_the_queue() -> None:
    scheduler = Scheduler(limits(seqs=1, tokens=64, steps=2))
    scheduler.add(ScheduledSequence(key(1), [1]))
    assert scheduler.next_step() is not None
    scheduler.add(ScheduledSequence(key(2), [1]))
    scheduler.add(ScheduledSequence(key(3), [1], is_probe=True))
    step = scheduler.next_step()
    assert step is not None
    assert [part.key for part in step.parts] == [key(3)]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("tenants", [1, 2])
def test_probe_waits_for_no_memory(steps: int, tenants: int) -> None:
    """The running sequences hold all memory and need no more for a long time."""
    scheduler = Scheduler(limits(tokens=256, block=16, blocks=96, steps=steps))
    scheduler.pool.granule = 512
    pipeline, probe = Pipeline(scheduler), key(9)
    wanted = {key(number): 300 for number in range(3)} | {probe: 2}
    for number in range(3):
        share = Share(f"t{number % tenants}")
        scheduler.add(ScheduledSequence(key(number), [1] * 100, share=share))
    while len(pipeline.made) < 3:
        pipeline.plan()
        pipeline.finish_one(wanted)
    assert scheduler.pool.used_blocks == 96
    scheduler.add(ScheduledSequence(probe, [1] * 4, is_probe=True))
    for _ in range(2 * steps + 4):
        pipeline.plan()
        if pipeline.in_flight:
            pipeline.finish_one(wanted)
    assert pipeline.made[probe] == 2


@pytest.mark.parametrize("tokens", [4, 5])
def test_probe_longer_than_a_step_is_in_it_once(tokens: int) -> None:
    pipeline = Pipeline(Scheduler(limits(tokens=tokens)))
    pipeline.scheduler.add(ScheduledSequence(key(1), [1] * 6, is_probe=True))
    pipeline.scheduler.add(ScheduledSequence(key(2), [1] * 6))
    pipeline.run({key(1): 2, key(2): 2})


def test_probes_do_not_hold_each_other_up() -> None:
    """Each probe has grown until no memory is left."""
    scheduler = Scheduler(limits(tokens=16, block=4, blocks=4))
    pipeline = Pipeline(scheduler)
    wanted = {key(number): 8 for number in range(2)}
    for which in wanted:
        scheduler.add(ScheduledSequence(which, [1] * 6, is_probe=True))
    pipeline.run(wanted)


def test_suspect_is_computed_alone_until_it_has_some_tokens() -> None:
    scheduler = Scheduler(limits(seqs=4, tokens=4, steps=2))
    scheduler.add(ScheduledSequence(key(1), [1]))
    first = scheduler.next_step()
    assert first is not None
    scheduler.add(ScheduledSequence(key(2), [1] * 6, is_suspect=True))
    scheduler.add(ScheduledSequence(key(3), [1]))
    assert scheduler.next_step() is None
    scheduler.sampled(first.number, [(key(1), 5)])
    later = [(1, 5)] * (PROOF_TOKENS - 1)
    for number, (count, token) in enumerate([(4, None), (2, 5), *later]):
        step = scheduler.next_step()
        assert step is not None
        assert step.is_alone
        assert [(p.key, p.count) for p in step.parts] == [(key(2), count)]
        assert scheduler.next_step() is None
        scheduler.sampled(step.number, [(key(2), token)])
        step = scheduler.next_step()
        assert step is not None
        assert not step.is_alone
        is_proven = number == PROOF_TOKENS
        others = {key(1), key(3)} | ({key(2)} if is_proven else set())
        assert {p.key for p in step.parts} == others
        scheduler.sampled(step.number, [(which, 5) for which in others])


# Tenants.


def test_flood_of_long_prompts_delays_another_tenant_by_the_step_in_flight() -> None:
    scheduler = Scheduler(limits(seqs=8, tokens=8))
    pipeline = Pipeline(scheduler)
    wanted = {key(number): 3 for number in range(5)}
    for number in range(4):
        scheduler.add(ScheduledSequence(key(number), [0] * 40, share=Share("flood")))
    pipeline.plan()
    pipeline.finish_one(wanted)
    scheduler.add(ScheduledSequence(key(4), [0] * 4, share=Share("other")))
    for count in (4, 1, 1):
        step = pipeline.plan()
        assert step is not None
        counts = {part.key: part.count for part in step.parts}
        assert counts.get(key(4), 0) == count
        rest = int(cost_of(count) * (1 + BESIDE) - cost_of(0))
        assert sum(counts.values()) == min(8, rest), "the flood gets the rest"
        pipeline.finish_one(wanted)
    pipeline.run(wanted)


def test_parts_of_prompts_are_small_beside_a_sequence_that_decodes() -> None:
    """Within a tenant, all chunks in flight together are as large as one full step."""
    scheduler = Scheduler(limits(seqs=3, tokens=240, steps=3, blocks=9000))
    pipeline = Pipeline(scheduler)
    scheduler.add(ScheduledSequence(key(1), [0], share=Share("own")))
    assert planned(pipeline) == [{1: 1}]
    scheduler.add(ScheduledSequence(key(2), [0] * 900, share=Share("own")))
    assert planned(pipeline) == [{2: 80}, {2: 80}]
    pipeline.finish_one({key(1): 99})
    assert planned(pipeline) == [{1: 1, 2: 80}]


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.25])
@pytest.mark.parametrize("steps", [1, 3])
def test_token_takes_as_much_longer_as_a_tenants_share_is_smaller(
    steps: int, weight: float
) -> None:
    """Work in flight costs at most 1 + BESIDE / weight times the tenant's own step."""
    scheduler = Scheduler(limits(seqs=90, tokens=240, steps=steps, blocks=9000))
    pipeline = Pipeline(scheduler)
    wanted = {key(number): 99 for number in range(80)}
    scheduler.add(ScheduledSequence(key(0), [0], share=Share("quiet", weight)))
    assert planned(pipeline) == [{0: 1}]
    scheduler.add(ScheduledSequence(key(1), [0] * 900, share=Share("loud")))
    for number in range(2, 72):
        scheduler.add(ScheduledSequence(key(number), [0], share=Share("loud")))
    limit = cost_of(1) * (1 + BESIDE / weight)
    for _ in range(40):
        pipeline.finish_one(wanted)
        planned(pipeline)
        parts = [step.parts for step in pipeline.in_flight]
        cost = sum(cost_of(sum(p.count for p in those)) for those in parts)
        assert 0.7 * limit <= cost <= limit
        assert any(p.key == key(0) for those in parts for p in those), "in every turn"


def test_tenant_that_was_here_lately_finds_little_in_flight() -> None:
    """After a minute alone, another tenant has full steps again."""
    scheduler = Scheduler(limits(seqs=9, tokens=240, blocks=9000))
    scheduler.add(ScheduledSequence(key(1), [0], share=Share("quiet")))
    assert scheduler.next_step(0.0) is not None
    scheduler.pool.remove(key(1))
    here = (1.0, SHARED_TOKENS), (59.0, SHARED_TOKENS), (61.0, 240)
    for number, (now, rows) in enumerate(here, 2):
        scheduler.add(ScheduledSequence(key(number), [0] * 900, share=Share("loud")))
        step = scheduler.next_step(now)
        assert step is not None
        assert sum(part.count for part in step.parts) == rows
        scheduler.pool.remove(key(number))


def test_tenant_below_its_share_preempts_for_slots_and_for_blocks() -> None:
    for seqs, blocks in ((6, 900), (90, 6)):
        scheduler = Scheduler(limits(seqs=seqs, tokens=64, block=64, blocks=blocks))
        pipeline = Pipeline(scheduler)
        wanted = {key(number): 3 for number in range(12)}
        for number in range(6):
            scheduler.add(ScheduledSequence(key(number), [0], share=Share("loud")))
        pipeline.plan()
        pipeline.finish_one(wanted)
        for number in range(6, 12):
            scheduler.add(
                ScheduledSequence(key(number), [0], share=Share("quiet", weight=2.0))
            )
        step = pipeline.plan()
        assert step is not None
        assert {part.key[1] for part in step.parts} == {0, 1, 6, 7, 8, 9}
        preempted = scheduler.pool.take_preempted()
        assert {which[1] for which in preempted} == {2, 3, 4, 5}
        pipeline.finish_one(wanted)
        pipeline.run(wanted)
        assert scheduler.pool.preemptions == 4, "nobody is preempted in turns"


def test_tenants_get_tokens_by_their_weights() -> None:
    """Prompt and output tokens count the same."""
    scheduler = Scheduler(limits(seqs=100, tokens=6, blocks=10_000))
    for number in range(30):
        scheduler.add(
            ScheduledSequence(key(number), [0] * 60, share=Share("a", weight=2.0))
        )
    for number in range(30, 60):
        scheduler.add(
            ScheduledSequence(key(number), [0] * 60, share=Share("b", weight=1.0))
        )
    served = {True: 0, False: 0}
    for _ in range(200):
        step = scheduler.next_step()
        assert step is not None
        for part in step.parts:
            served[part.key[1] < 30] += part.count
        scheduler.sampled(step.number, [(p.key, 5) for p in step.parts])
    assert served[True] / served[False] == pytest.approx(2.0, rel=0.15)


def test_tenant_that_was_away_gets_no_credit_for_it() -> None:
    scheduler = Scheduler(limits(seqs=100, tokens=10, blocks=10_000))
    for number in range(20):
        scheduler.add(ScheduledSequence(key(number), [0] * 50, share=Share("a")))
    for _ in range(40):
        step = scheduler.next_step()
        assert step is not None
        scheduler.sampled(step.number, [(p.key, 5) for p in step.parts if p.samples])
        for part in step.parts:
            scheduler.sampled(step.number, [(part.key, None)])
    for number in range(20, 40):
        scheduler.add(ScheduledSequence(key(number), [0] * 50, share=Share("b")))
    served = {True: 0, False: 0}
    for _ in range(40):
        step = scheduler.next_step()
        assert step is not None
        for part in step.parts:
            served[part.key[1] < 20] += part.count
        for part in step.parts:
            scheduler.sampled(step.number, [(part.key, None)])
    assert served[True] > 0.3 * served[False]


def test_higher_priority_preempts_a_lower_one_for_its_slot() -> None:
    scheduler = Scheduler(limits(seqs=2, tokens=64))
    pipeline = Pipeline(scheduler)
    wanted = {key(number): 3 for number in (1, 2, 3)}
    for number in (1, 2):
        scheduler.add(ScheduledSequence(key(number), [0] * 4, share=Share("low")))
    pipeline.plan()
    pipeline.finish_one(wanted)
    scheduler.add(ScheduledSequence(key(3), [0] * 4, share=Share("high", priority=1)))
    step = pipeline.plan()
    assert step is not None
    assert {part.key for part in step.parts} == {key(1), key(3)}
    assert scheduler.pool.take_preempted() == (key(2),)
    pipeline.finish_one(wanted)
    pipeline.run(wanted)
    assert scheduler.pool.preemptions == 1
    assert pipeline.made == wanted


def test_prompts_that_preempt_each_other_complete() -> None:
    """Two half-computed prompts once preempted each other forever."""
    scheduler = Scheduler(limits(seqs=4, tokens=6, block=2, blocks=8))
    pipeline = Pipeline(scheduler)
    wanted = {key(number): 2 for number in range(3)}
    scheduler.add(ScheduledSequence(key(0), [0] * 5, share=Share("a")))
    scheduler.add(ScheduledSequence(key(1), [0] * 6, share=Share("b")))
    scheduler.add(ScheduledSequence(key(2), [0] * 7, share=Share("c")))
    pipeline.run(wanted)
    assert pipeline.made == wanted


# Stages that are replaced.


def test_paused_sequence_lets_others_continue_and_resumes_with_its_token() -> None:
    scheduler = Scheduler(limits(seqs=4, tokens=64, steps=1))
    for number in (1, 2):
        scheduler.add(ScheduledSequence(key(number), [0] * 4))
    first = scheduler.next_step()
    assert first is not None
    assert scheduler.next_step() is None
    moved = ("gateway/1", 1, 1)
    scheduler.move(key(1), ScheduledSequence(moved, [0] * 5, computed=4))
    scheduler.sampled(first.number, [(key(2), 7)])
    second = scheduler.next_step()
    assert second is not None
    assert [part.key for part in second.parts] == [key(2)]
    scheduler.sampled(second.number, [(key(2), 7)])
    scheduler.resume(moved, 9)
    assert scheduler.pool.known[moved].tokens == [0] * 5 + [9]
    third = scheduler.next_step()
    assert third is not None
    assert {(p.key, p.begin, p.count) for p in third.parts} == {
        (moved, 4, 2),
        (key(2), 5, 1),
    }


def test_rewound_sequence_is_recomputed_from_its_position() -> None:
    """A later stage lacks rows that only these tokens can produce."""
    scheduler = Scheduler(limits(seqs=4, tokens=64))
    scheduler.add(ScheduledSequence(key(1), [0] * 6))
    assert scheduler.next_step() is not None
    moved = ("gateway/1", 1, 1)
    scheduler.move(key(1), ScheduledSequence(moved, [0] * 6, computed=6))
    scheduler.rewind(moved, 2)
    assert scheduler.next_step() is None
    scheduler.resume(moved, None)
    step = scheduler.next_step()
    assert step is not None
    assert [(p.begin, p.count, p.samples) for p in step.parts] == [(2, 4, True)]


@pytest.mark.parametrize("is_suspect", [True, False])
def test_moved_sequence_runs_as_its_next_attempt_says(is_suspect: bool) -> None:
    """A group of suspects is isolated at a stage that was not lost, too."""
    group = ("gateway/1", 5)
    scheduler = Scheduler(limits(seqs=8, tokens=64))
    for number in range(1, 5):
        scheduler.add(ScheduledSequence(key(number), [1], is_suspect=not is_suspect))
    for number in (1, 2):
        moved = ScheduledSequence(
            (*key(number)[:2], 1), [1], is_suspect=is_suspect, group=group
        )
        scheduler.move(key(number), moved)
        scheduler.resume(moved.key, None)
    found: dict[bool, set[Key]] = {}
    for _ in range(2):
        step = scheduler.next_step()
        assert step is not None
        found[step.is_alone] = {part.key for part in step.parts}
        scheduler.sampled(step.number, [(part.key, 5) for part in step.parts])
    assert found[is_suspect] == {("gateway/1", 1, 1), ("gateway/1", 2, 1)}


def test_reserved_sequence_has_its_blocks_and_its_slot() -> None:
    scheduler = Scheduler(limits(seqs=2, block=4, blocks=6))
    assert scheduler.pool.reserve([], key(1), 10)
    assert scheduler.pool.used_blocks == 3
    assert not scheduler.pool.reserve([], key(2), 12)
    assert scheduler.pool.reserve([key(1)], key(3), 14)
    assert key(1) not in scheduler.pool.reserved
    scheduler.add(ScheduledSequence(key(4), [1, 2]))
    scheduler.add(ScheduledSequence(key(5), [1, 2]))
    step = scheduler.next_step()
    assert step is not None
    assert [part.key for part in step.parts] == [key(4)], "one slot is taken"
    scheduler.take_over(
        key(3), ScheduledSequence(key(6), list(range(14)), computed=14, share=Share())
    )
    scheduler.pool.remove(key(4))
    scheduler.pool.remove(key(5))
    assert scheduler.next_step() is None, "it is paused"
    scheduler.resume(key(6), 7)
    step = scheduler.next_step()
    assert step is not None
    assert [(p.key, p.begin, p.count) for p in step.parts] == [(key(6), 14, 1)]
    scheduler.pool.remove(key(6))
    assert scheduler.pool.used_blocks == 0


def test_reservation_of_a_sequence_that_does_not_arrive_is_freed() -> None:
    scheduler = Scheduler(limits(blocks=2))
    assert scheduler.pool.reserve([], key(1), 7)
    assert not scheduler.pool.reserve([], key(2), 1)
    scheduler.pool.remove(key(1))
    assert scheduler.pool.reserve([], key(2), 1)


@pytest.mark.parametrize("steps", [1, 3])
def test_tenant_beside_a_heavier_one_makes_progress(steps: int) -> None:
    """It has at least one row in each step."""
    scheduler = Scheduler(limits(seqs=9, tokens=240, blocks=9000, steps=steps))
    pipeline = Pipeline(scheduler)
    wanted = {key(0): 999, key(1): 1}
    scheduler.add(ScheduledSequence(key(0), [0], share=Share("heavy", 16.0)))
    assert planned(pipeline) == [{0: 1}]
    scheduler.add(ScheduledSequence(key(1), [0] * 60, share=Share("light")))
    for _ in range(200):
        pipeline.finish_one(wanted)
        planned(pipeline)
    assert key(1) in pipeline.ended


def test_long_sequence_is_not_preempted_for_later_ones_of_other_tenants() -> None:
    """A sequence alone of its tenant ends, though the tenant uses the most."""
    scheduler = Scheduler(limits(seqs=9, tokens=64, block=16, blocks=100, steps=1))
    pipeline = Pipeline(scheduler)
    wanted = {key(0): 100}
    scheduler.add(ScheduledSequence(key(0), [0] * 960, share=Share("long")))
    for number in range(1, 20):
        share = Share("other", 1.0) if number % 2 else Share("third", 1.0)
        wanted[key(number)] = 100
        scheduler.add(ScheduledSequence(key(number), [0] * 400, share=share))
    for _ in range(1_500):
        pipeline.plan()
        pipeline.finish_one(wanted)
        if key(0) in pipeline.ended:
            break
    assert key(0) in pipeline.ended
    assert scheduler.pool.preemptions < 50


def test_no_sequence_is_preempted_for_one_that_cannot_run() -> None:
    """It has a higher priority, but its replica has no memory now."""
    scheduler = Scheduler(limits(seqs=20, tokens=64, blocks=100))
    pipeline = Pipeline(scheduler)
    for number in range(20):
        scheduler.add(ScheduledSequence(key(number), [0], route=("front", "back")))
    planned(pipeline)
    pipeline.finish_one({key(number): 9 for number in range(20)})
    scheduler.evict(key(30), "other back", 0.0)
    first = Share("first", priority=1)
    scheduler.add(
        ScheduledSequence(key(21), [0], share=first, route=("front", "other back"))
    )
    planned(pipeline)
    assert scheduler.pool.preemptions == 0
    assert len(scheduler.pool.running) == 20


def test_replica_without_memory_is_tried_again_less_and_less_often() -> None:
    """Several sequences that it returns at once count as one attempt."""
    scheduler = Scheduler(limits(seqs=9, blocks=100))
    now, pauses = 0.0, []
    for _ in range(4):
        for number in range(3):
            scheduler.evict(key(number), "back", now)
        begun = now
        while scheduler.pool.full.names:
            now += 0.01
            scheduler.next_step(now)
        pauses.append(round(now - begun, 1))
    assert pauses == [0.1, 0.2, 0.4, 0.8]
    scheduler.next_step(now + 0.9)
    scheduler.evict(key(1), "back", now + 0.9)
    scheduler.next_step(now + 1.05)
    assert not scheduler.pool.full.names


def test_rows_cost_more_with_context() -> None:
    assert rows_of(1, 0) == 1
    assert rows_of(64, 0) == 64
    assert rows_of(1, 1024) > 2
    assert rows_of(64, 1024) < 64 * rows_of(1, 1024)


@pytest.mark.parametrize("extra", [Share("light"), Share("low", priority=-1)])
def test_newcomer_gets_half_beside_one_that_takes_less_than_its_share(
    extra: Share,
) -> None:
    """It starts at the counter of the next tenant, not of one with few requests."""
    scheduler = Scheduler(limits(seqs=9, tokens=64, blocks=9000))
    pipeline, wanted = Pipeline(scheduler), dict[Key, int]()
    flood, newcomer = Share("flood"), Share("newcomer")
    served = dict.fromkeys((flood, newcomer, extra), 0)

    def add(share: Share, prompt: int, tokens: int) -> None:
        number = key(len(wanted))
        wanted[number] = tokens
        scheduler.add(ScheduledSequence(number, [1] * prompt, share))

    def step(*busy: Share) -> None:
        for share in busy:
            waiting = [s for s in scheduler.pool.known.values() if s.share == share]
            for _ in range(len(waiting), 12):
                add(share, 100, 20)
        planned = pipeline.plan()
        assert planned is not None
        for part in planned.parts:
            served[scheduler.pool.known[part.key].share] += part.count
        pipeline.finish_one(wanted)

    add(extra, 10, 10_000)
    for _ in range(500):
        step(flood)
    served.update(dict.fromkeys(served, 0))
    for _ in range(200):
        step(flood, newcomer)
    assert 0.8 < served[flood] / served[newcomer] < 1.25


def test_step_that_is_late_holds_up_no_other_sequences() -> None:
    """A replica of its chain was stopped."""
    scheduler = Scheduler(limits(seqs=9, tokens=64, steps=1))
    for number in range(4):
        scheduler.add(ScheduledSequence(key(number), [1]))
    first = scheduler.next_step(0.0)
    assert first is not None
    scheduler.sampled(first.number, [(key(n), 5) for n in range(4)], 0.05)
    second = scheduler.next_step(0.05)
    assert second is not None
    scheduler.sampled(second.number, [(key(n), 5) for n in range(3)], 0.1)
    assert scheduler.next_step(0.1) is None
    assert scheduler.wakes_at == pytest.approx(0.2)
    now = 0.21
    for _ in range(3):
        step = scheduler.next_step(now)
        assert step is not None
        assert [part.key for part in step.parts] == [key(n) for n in range(3)]
        assert scheduler.next_step(now) is None
        now += 0.05
        scheduler.sampled(step.number, [(key(n), 5) for n in range(3)], now)
    scheduler.sampled(second.number, [(key(3), 5)], now)
    step = scheduler.next_step(now)
    assert step is not None
    assert {part.key for part in step.parts} == {key(n) for n in range(4)}
    assert scheduler.wakes_at > now + 0.1


def test_replica_without_memory_is_tried_again_when_its_pause_ends() -> None:
    scheduler = Scheduler(limits())
    assert scheduler.wakes_at == float("inf")
    scheduler.evict(key(1), "back", 5.0)
    assert scheduler.wakes_at == pytest.approx(5.1)


def test_suspect_that_finds_no_room_delays_no_other_sequence() -> None:
    """The steps of others need not finish first."""
    scheduler = Scheduler(limits(seqs=2, steps=2, tokens=64))
    pipeline = Pipeline(scheduler)
    for number in range(2):
        scheduler.add(ScheduledSequence(key(number), [1] * 40))
    assert pipeline.plan() is not None
    scheduler.add(ScheduledSequence(key(2), [1], is_suspect=True))
    assert pipeline.plan() is not None


def stuck(scheduler: Scheduler, prompt: int = 1) -> int:
    """Begin a step of two routes of which only one returns; return its number."""
    for number, route in enumerate(("fast", "slow")):
        sequence = ScheduledSequence(key(number), [1] * prompt, route=("s0", route))
        scheduler.add(sequence)
    first = scheduler.next_step(0.0)
    assert first is not None
    assert len(first.parts) == 2
    sample = 5 if first.parts[0].samples else None
    scheduler.sampled(first.number, [(key(0), sample)], 0.05)
    return first.number


def test_sequence_of_a_step_that_others_passed_gets_no_further_steps() -> None:
    """Otherwise a slow replica would get all chunks of a prompt at once."""
    scheduler = Scheduler(limits(seqs=9, tokens=8, steps=3))
    stuck(scheduler, prompt=4)
    long = ScheduledSequence(key(2), [1] * 80, route=("s0", "slow"))
    scheduler.add(long)
    now, parts = 0.05, 0
    for _ in range(20):
        now += 0.3
        step = scheduler.next_step(now)
        if step is None:
            continue
        parts += sum(part.key == key(2) for part in step.parts)
        back = [(p.key, 5) for p in step.parts if p.key == key(0)]
        scheduler.sampled(step.number, back, now + 0.05)
    assert len(scheduler.pool.known[key(0)].tokens) > 15
    assert parts <= 3


def test_suspect_waits_for_a_stuck_step_but_others_do_not() -> None:
    """A suspect can run alone only once the stuck step has returned."""
    scheduler = Scheduler(limits(seqs=9, tokens=64, steps=2))
    number = stuck(scheduler)
    suspect = ScheduledSequence(key(2), [1], is_suspect=True, route=("s0", "fast"))
    scheduler.add(suspect)
    now = 0.05
    for _ in range(5):
        now += 0.3
        step = scheduler.next_step(now)
        assert step is not None
        assert [part.key for part in step.parts] == [key(0)]
        scheduler.sampled(step.number, [(key(0), 5)], now + 0.05)
    scheduler.sampled(number, [(key(1), 5)], now + 0.1)
    step = scheduler.next_step(now + 0.1)
    assert step is not None
    assert step.is_alone


def test_running_sequences_continue_beside_a_prompt_after_another_tenant() -> None:
    """Steps stay small while the other tenant counts as present."""
    scheduler = Scheduler(limits(seqs=9, tokens=64, steps=2, blocks=900))
    pipeline, wanted = Pipeline(scheduler), {key(n): 10**6 for n in range(3)}
    scheduler.add(ScheduledSequence(key(1), [1], share=Share("b")))
    pipeline.plan()
    pipeline.finish_one(wanted)
    pipeline.end(key(1))
    scheduler.add(ScheduledSequence(key(0), [1]))
    pipeline.plan()
    pipeline.finish_one(wanted)
    scheduler.add(ScheduledSequence(key(2), [1] * 2000))
    for _ in range(40):
        while pipeline.plan() is not None:
            pass
        pipeline.finish_one(wanted)
    assert pipeline.made[key(0)] > 10


def test_counters_of_tenants_that_have_left_are_forgotten() -> None:
    shares = TokenShares()
    for number in range(4 * PRUNE_AT):
        share = Share(f"tenant {number}")
        shares.enter(share, 9.0)
        shares.reach(share)
        shares.charge(share, 5.0)
        shares.leave(share)
    assert counter_count(shares) <= PRUNE_AT + 1
