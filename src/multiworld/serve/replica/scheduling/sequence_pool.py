"""Sequences of a scheduler, with their slots and KV blocks. Pure.

If a running sequence needs a block and none is free, the latest sequence is preempted:
its blocks are freed, and it is recomputed from its tokens when there is room
(preemption by recompute, as in vLLM: Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", 2023). A sequence of a higher
priority may also preempt one of a lower priority for its slot.

Slots and blocks are shared by weight between the tenants that have sequences; a tenant
alone may use everything. A tenant that has less than its share preempts others. A probe
preempts any sequence, and no client's sequence preempts a probe: clients may be waiting
for the replica that the probe makes ready.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from multiworld.serve.replica.scheduling.scheduled_sequence import ScheduledSequence
from multiworld.serve.replica.scheduling.steps_in_flight import StepsInFlight
from multiworld.serve.replica.scheduling.tenant_step_limits import STEP_ROWS
from multiworld.serve.replica.scheduling.tenant_use import TenantUse
from multiworld.serve.replica.scheduling.token_shares import TokenShares
from multiworld.serve.replica.scheduling.waiting_queue import WaitingQueue
from multiworld.serve.routing.poison_rules import PROOF_TOKENS
from multiworld.serve.text.engine_limits import EngineLimits
from multiworld.serve.wire.protocol import Key

# Minimum and maximum seconds for which nothing is sent to a replica that had no KV
# blocks for a sequence. The time doubles each time that the replica still has none.
FULL_S, LONGEST_FULL_S = 0.1, 2.0


class FullReplicas:
    """Replicas that lacked KV blocks; those in ``names`` receive nothing for now."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._pauses: dict[str, tuple[float, float]] = {}

    def add(self, replica: str, now: float) -> None:
        until, pause_s = self._pauses.get(replica, (now, 0.0))
        if now >= until:  # until then, reports are about work sent earlier
            pause_s = min(LONGEST_FULL_S, max(FULL_S, 2 * pause_s))
            self._pauses[replica] = now + pause_s, pause_s
        self.update(now)

    @property
    def ends_at(self) -> float:
        """Time at which the first pause of a replica ends; infinite without any."""
        return min((self._pauses[name][0] for name in self.names), default=math.inf)

    def update(self, now: float) -> None:
        """End pauses; forget a replica if no report follows for equally long."""
        pauses = self._pauses.items()
        self._pauses = {name: (t, p) for name, (t, p) in pauses if now < t + p}
        self.names = {name for name, (t, _) in self._pauses.items() if now < t}


class SequencePool:
    """Waiting, running and paused sequences; running ones have a slot and blocks."""

    def __init__(self, limits: EngineLimits, steps: StepsInFlight) -> None:
        self.limits, self._steps = limits, steps
        self.known: dict[Key, ScheduledSequence] = {}
        self.queue = WaitingQueue()  # sequences that neither run nor are paused
        # By number: running sequences, and all suspects, running or not. Suspects run
        # alone.
        self.running: dict[int, ScheduledSequence] = {}
        self.suspects: dict[int, ScheduledSequence] = {}
        # By number: sequences whose KV later stages had, at least in part, when the
        # sequence arrived here.
        self.rebuilt: dict[int, ScheduledSequence] = {}
        self.planned: set[Key] = set()  # sequences in the step that is being planned
        self.full = FullReplicas()  # replicas of later stages that have no KV blocks
        self.shares = TokenShares()
        # ``preemptions``: number of preemptions so far. ``granule``: unit of memory
        # allocation, in tokens. ``withheld``: number of blocks left to other
        # schedulers; the only running sequence may use them, so that it can finish.
        self.preemptions, self.granule, self.withheld = 0, 1, 0
        self._use = TenantUse(limits.max_num_seqs, limits.blocks)
        self._free = limits.blocks
        self.reserved: dict[Key, int] = {}  # number of reserved blocks, by sequence
        # Sequences preempted since the last ``take_preempted``.
        self.preempted: list[Key] = []
        self._arrivals = 0

    def is_paused(self, key: Key) -> bool:
        sequence = self.known.get(key)
        return sequence is not None and sequence.is_paused

    @property
    def waiting(self) -> int:
        return len(self.known) - len(self.running)

    def enter(self, sequence: ScheduledSequence) -> None:
        """Add a sequence; it neither runs nor waits yet."""
        self._arrivals += 1
        sequence.number = self._arrivals
        self.known[sequence.key] = sequence
        self.shares.enter(sequence.share, self._steps.cost + STEP_ROWS)
        if sequence.is_suspect:
            self.suspects[sequence.number] = sequence
        if sequence.rebuild:
            self.rebuilt[sequence.number] = sequence

    def wait(self, sequence: ScheduledSequence) -> None:
        """Queue a sequence, unless it is paused or a suspect."""
        if not sequence.is_paused and not sequence.is_suspect:
            self.queue.add(sequence)

    def run(self, sequence: ScheduledSequence) -> None:
        self.queue.remove(sequence)
        self.running[sequence.number] = sequence
        self._use.add(sequence.share, slots=1, blocks=sequence.blocks)

    def _leave(self, sequence: ScheduledSequence) -> int:
        """Stop running a sequence; return the number of its blocks."""
        blocks, sequence.blocks = sequence.blocks, 0
        if self.running.pop(sequence.number, None) is not None:
            self._use.add(sequence.share, slots=-1, blocks=-blocks)
        return blocks

    def append(self, sequence: ScheduledSequence, token: int) -> None:
        """Append a token; a suspect with ``PROOF_TOKENS`` tokens is cleared."""
        sequence.tokens.append(token)
        sequence.proof += sequence.is_suspect
        if sequence.proof >= PROOF_TOKENS:
            sequence.is_suspect = False
            self.suspects.pop(sequence.number, None)

    def suspect(
        self,
        sequence: ScheduledSequence,
        group: tuple[str, int] | None,
        *,
        is_suspect: bool,
    ) -> None:
        """Set whether a sequence is a suspect, which runs alone or with ``group``."""
        sequence.is_suspect, sequence.group, sequence.proof = is_suspect, group, 0
        self.suspects.pop(sequence.number, None)
        if is_suspect:
            self.suspects[sequence.number] = sequence

    def rename(self, sequence: ScheduledSequence, key: Key) -> None:
        self.known[key] = self.known.pop(sequence.key)
        sequence.key = key

    def remove(self, key: Key) -> None:
        self._free += self.reserved.pop(key, 0)
        self._free += self._forget(key)

    def _forget(self, key: Key) -> int:
        sequence = self.known.pop(key, None)
        if sequence is None:
            return 0
        self.shares.leave(sequence.share)
        self.queue.remove(sequence)
        self.suspects.pop(sequence.number, None)
        self.rebuilt.pop(sequence.number, None)
        self._steps.leave(key)
        return self._leave(sequence)

    def reserve(self, earlier: Iterable[Key], key: Key, tokens: int) -> bool:
        """Free reservations of ``earlier`` keys; reserve blocks if there is room."""
        self._free += sum(self.reserved.pop(old, 0) for old in earlier)
        needed = self.blocks_of(tokens + 1)
        if needed > self._free - self.withheld or self._slots <= 0:
            return False
        self._free -= needed
        self.reserved[key] = needed
        return True

    def reserve_own(self, key: Key) -> None:
        """Forget a sequence, but keep its blocks reserved."""
        self.reserved[key] = self._forget(key)

    def run_reserved(self, sequence: ScheduledSequence, old: Key) -> None:
        """Run a sequence in the blocks that are reserved for ``old``."""
        sequence.blocks = self.reserved.pop(old)
        self.run(sequence)

    # Admission and preemption.

    def admit(self, sequence: ScheduledSequence) -> bool:
        """Run a sequence if all its tokens fit; return whether it runs."""
        victims = self._victims_for(sequence)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim)
        self.run(sequence)
        return True

    def may_run(self, sequence: ScheduledSequence) -> bool:
        """Return whether a sequence runs, or ``admit`` would run it."""
        is_running = sequence.number in self.running
        return is_running or self._victims_for(sequence) is not None

    def _victims_for(
        self, newcomer: ScheduledSequence
    ) -> list[ScheduledSequence] | None:
        """Return the sequences to preempt for a waiting one; None: it cannot run."""
        if newcomer.waits_for(self.full.names):
            return None
        needed = self.blocks_of(len(newcomer.tokens) + 1)
        found: list[ScheduledSequence] = []
        if self._fits(newcomer):
            return found
        use, idle = self._use.copy(), self._idle()
        while not self._fits(newcomer, found):
            if newcomer.is_probe:
                victim = self._victim_for_probe(newcomer, found)
            else:
                victim = _victim_for(newcomer, needed, use, idle)
            if victim is None:
                return None
            if victim in idle:
                idle.remove(victim)
            found.append(victim)
            use.add(victim.share, slots=-1, blocks=-victim.blocks)
        return found

    def _fits(
        self, sequence: ScheduledSequence, gone: Sequence[ScheduledSequence] = ()
    ) -> bool:
        if sequence.waits_for(self.full.names):
            return False
        # Require room for all its tokens: otherwise it would soon preempt earlier
        # sequences.
        needed = self.blocks_of(len(sequence.tokens) + 1)
        room = self._room(sequence, is_only=len(gone) == len(self.running))
        has_slot = sequence.is_probe or self._slots + len(gone) > 0
        return has_slot and needed <= room + sum(s.blocks for s in gone)

    def has_room(self, sequence: ScheduledSequence, count: int) -> bool:
        """Allocate blocks for ``count`` more tokens, preempting others if necessary."""
        needed = self.blocks_of(sequence.computed + count) - sequence.blocks
        while needed > self._room(sequence, is_only=len(self.running) == 1):
            if sequence.is_probe:
                victim = self._victim_for_probe(sequence)
            else:
                victim = self._use.last(sequence, self._idle())
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        self._free -= needed
        sequence.blocks += needed
        self._use.add(sequence.share, blocks=needed)
        return True

    def _room(self, sequence: ScheduledSequence, *, is_only: bool) -> int:
        """Return the free blocks for a sequence; most may not use the withheld ones."""
        may_use_all = is_only or sequence.is_probe
        return self._free if may_use_all else self._free - self.withheld

    def _idle(self) -> list[ScheduledSequence]:
        """Return the running sequences that may be preempted for any other."""
        found = self._unplanned()
        return [s for s in found if not (s.is_paused or s.is_probe)]

    def _unplanned(self) -> list[ScheduledSequence]:
        return [
            s
            for s in self.running.values()
            if s.key not in self.planned and s.key not in self._steps
        ]

    def _victim_for_probe(
        self, probe: ScheduledSequence, gone: Collection[ScheduledSequence] = ()
    ) -> ScheduledSequence | None:
        """Return an idle sequence to preempt, or else a paused one or a later probe."""
        # Paused sequences may be waiting for the replica that the probe makes ready, so
        # the probe may preempt them.
        found = [s for s in self._unplanned() if s not in gone]
        for those in (
            [s for s in found if not (s.is_paused or s.is_probe)],
            [s for s in found if s.is_paused and not s.is_probe],
            [s for s in found if s.is_probe and s.number > probe.number],
        ):
            if those:
                return _last_of(those)
        return None

    def shrink(self) -> None:
        """Preempt until the withheld blocks are free."""
        while self._free < self.withheld and len(self.running) > 1:
            victim = _last_of(self._idle())
            if victim is None:
                return
            self._preempt(victim)

    def _preempt(self, sequence: ScheduledSequence) -> None:
        self.free(sequence)
        self.preempted.append(sequence.key)

    def free(self, sequence: ScheduledSequence) -> None:
        """Free the blocks of a sequence, which must be recomputed from its tokens."""
        sequence.computed = sequence.rebuild = 0
        self.rebuilt.pop(sequence.number, None)
        if sequence.number in self.running:
            self.preemptions += 1
            self._free += self._leave(sequence)
            self.wait(sequence)

    def take_preempted(self) -> tuple[Key, ...]:
        preempted, self.preempted = tuple(self.preempted), []
        return preempted

    # State.

    def blocks_of(self, tokens: int) -> int:
        return self.limits.blocks_of(tokens, self.granule)

    @property
    def used_blocks(self) -> int:
        return self.limits.blocks - self._free

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that are in use, from 0 to 1."""
        return min(1.0, self.used_blocks / (self.limits.blocks - self.withheld))

    @property
    def _slots(self) -> int:
        taken = len(self.running) + len(self.reserved)
        return self.limits.max_num_seqs - taken

    @property
    def is_rebuilding(self) -> bool:
        """True while a sequence lacks tokens here that the other stages have."""
        lacking = (s for s in self.rebuilt.values() if s.computed < s.rebuild)
        return any(
            not s.is_paused and (s.number in self.running or self._fits(s))
            for s in lacking
        )


def _last_of(sequences: Iterable[ScheduledSequence]) -> ScheduledSequence | None:
    """Return the latest sequence of the lowest priority."""
    return max(sequences, key=lambda s: (-s.share.priority, s.number), default=None)


def _victim_for(
    newcomer: ScheduledSequence,
    blocks: int,
    use: TenantUse,
    idle: list[ScheduledSequence],
) -> ScheduledSequence | None:
    below = _last_of(s for s in idle if s.share.priority < newcomer.share.priority)
    if below is not None:
        return below
    level = [s for s in idle if s.share.priority == newcomer.share.priority]
    return use.victim_for(newcomer, blocks, level)
