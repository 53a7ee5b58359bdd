"""One replica of one stage of a model that generates text.

The replica of stage 0 schedules; the others compute the steps that arrive, in order.
The gateway of a sequence decides when it ends and which replicas compute it: a replica
only tells it what it cannot go on with, and keeps what it has until the gateway says
more. If a replica of a chain is replaced, the others fill it from what they have sent
before; see ``generation.links``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

import torch
from torch import Tensor

from multiworld.errors import InvalidRequestError, ModelFailedError
from multiworld.liveness.pause_detector import PauseDetector
from multiworld.serve.generation.replica.activation_log import RowLog
from multiworld.serve.generation.replica.engine_thread import (
    HUNG_S,
    EngineThread,
    when_made,
)
from multiworld.serve.generation.replica.hardware_fingerprint import fingerprint
from multiworld.serve.generation.replica.kv_budget import KvBudget
from multiworld.serve.generation.replica.kv_cache import MissingTokensError
from multiworld.serve.generation.replica.message_validation import check
from multiworld.serve.generation.replica.outboxes import Mail
from multiworld.serve.generation.replica.pipeline_share import adapt_to
from multiworld.serve.generation.replica.prompt_prefixes import Prompts
from multiworld.serve.generation.replica.recovery import (
    Link,
    Links,
    StreamId,
    neighbours_of,
)
from multiworld.serve.generation.replica.sample_costs import sample_rows_of
from multiworld.serve.generation.replica.scheduler import (
    PlannedStep,
    Scheduler,
    TooManyTokensError,
)
from multiworld.serve.generation.replica.stage_engine import Computed
from multiworld.serve.generation.replica.step_inputs import lacking
from multiworld.serve.generation.replica.step_outputs import (
    NO_ROWS,
    by_gateway,
    outcome,
    steps_on,
)
from multiworld.serve.generation.replica.step_queue import (
    ArrivedStep,
    Inbox,
    RefillRows,
)
from multiworld.serve.generation.replica.steps_in_flight import GRACE_S
from multiworld.serve.spec.stage import Generation, Stage, StageContext
from multiworld.serve.transport import generation_messages
from multiworld.serve.transport.edges import Outbox
from multiworld.serve.transport.frames import Entry
from multiworld.serve.transport.generation_messages import Opening, StepPart, TokenItem
from multiworld.serve.transport.protocol import (
    Key,
    Loaded,
    RemoteError,
    WorkerReport,
)
from multiworld.serve.transport.routing_table import RoutingTable

logger = logging.getLogger("multiworld.serve")


class GenerationWorker:
    """A replica, as the owner of its process's edges.

    Args:
        name: Its name in the routing table.
        number: Number of its stage, from 0.
        is_last: Whether its stage is the last one.
        stage: The stage.
        stage_name: Name of the stage, for errors.
        threads: Threads that torch uses for one operation.
        scheduler: Scheduler of steps, used in stage 0.
        log_bytes: Most bytes of the log of what was sent to the next stage.
        model: Facts about the model.
        prefix_bytes: Most bytes of the beginnings of prompts that are kept.
        is_deterministic: Whether texts are not to depend on what they are computed
            with.
        compute_s: Most seconds for one step; None: ``engine_thread.HUNG_S``.
        clock: Returns the monotonic time in seconds.

    Attributes:
        counts: Number of events since the start, by kind.
    """

    def __init__(
        self,
        name: str,
        number: int,
        is_last: bool,
        stage: Stage,
        stage_name: str,
        threads: int,
        scheduler: Scheduler,
        model: Generation,
        log_bytes: int,
        prefix_bytes: int = 0,
        is_deterministic: bool = False,
        compute_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._number, self._is_last = name, number, is_last
        self._stage_name, self._scheduler, self._clock = stage_name, scheduler, clock
        self._threads, self._is_deterministic = threads, is_deterministic
        self._overdue_s = 2 * (compute_s or HUNG_S)
        self._weights, self._dtype = model.weights, model.dtype
        self._engine = EngineThread(
            stage, is_last, threads, model, compute_s, is_deterministic, clock
        )
        self._mail = Mail()
        self._links = Links(is_last=is_last)
        self._log = RowLog(log_bytes)
        self._sampled: dict[Key, int | None] = {}
        self._watched: set[Key] = set()
        self._inbox = Inbox(scheduler.limits.max_num_batched_tokens, self._links)
        self._memory = KvBudget(
            scheduler.limits.blocks, scheduler.blocks_of, self._rank_of
        )
        self._evicted: list[generation_messages.KvEvicted] = []
        self._is_turn_of_inbox = False
        self._has_work = asyncio.Event()
        self._pauses = PauseDetector(GRACE_S)
        self.counts: Counter[str] = Counter()
        block = scheduler.limits.block_size
        self._prompts = Prompts(prefix_bytes, block, self.counts)

    # The life of the process.

    async def load(self, context: StageContext) -> None:
        """Load the stage, in its thread.

        Raises:
            Exception: Any error that the model's code raises.

        Cancellation: Loading goes on in its thread; call ``close`` afterwards.
        """
        await self._engine.load(context)
        self._scheduler.granule = self._engine.granule

    def close(self) -> None:
        """Stop the thread, without waiting for a running computation."""
        self._engine.close()

    async def run(self) -> None:
        """Compute steps until cancelled.

        Cancellation: Safe; a computation goes on in its thread, its result is dropped.
        """
        while True:
            self._has_work.clear()
            if not await self._compute_next():
                await self._has_work.wait()

    async def look(self) -> None:
        """Give back, again and again, what does not come back from later stages.

        Cancellation: Safe.
        """
        while True:
            await asyncio.sleep(GRACE_S)
            self.tick()

    def tick(self) -> None:
        """Give back what has not come back; let the scheduler try full replicas."""
        now = self._clock()
        if self._pauses.look(now):
            self._scheduler.excuse(now)
        for key in self._scheduler.overdue(now, self._overdue_s):
            logger.warning("%s does not come back from later stages", key)
            self._give_back(key)
        if self._scheduler.has_full:
            self._has_work.set()

    def table_changed(self, table: RoutingTable) -> None:
        """Use a new routing table; end the sequences of gateways that are gone."""
        self._mail.table_changed(table)
        adapt_to(self._scheduler, table, self.name)
        known = {*table.gateways, *self._mail}
        for link in self._links:
            if link.key[0] not in known:
                self._end(link.key)

    def loaded(self, device: str) -> Loaded:
        """Return what the controller is told of the loaded stage.

        Args:
            device: Torch device of the stage.
        """
        kind = [fingerprint(self._threads, device)] if self._is_deterministic else []
        kind += [self._dtype] if self._dtype else []
        return Loaded(", ".join(kind), self._weights())

    @property
    def has_router(self) -> bool:
        """True while a gateway is connected."""
        return any(name in self._mail for name in self._mail.table.gateways)

    @property
    def is_idle(self) -> bool:
        """True if it knows no sequence."""
        return not len(self._links)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the log, and of the prefixes that are kept."""
        return self._log.nbytes + self._prompts.nbytes

    async def wait_sent(self) -> None:
        """Wait until all messages were sent.

        Cancellation: Safe.
        """
        await self._mail.wait_sent()

    def report(self) -> WorkerReport:
        """Return what it does at this moment."""
        waiting, running = len(self._inbox), len(self._links)
        if self._number == 0:
            waiting, running = self._scheduler.waiting, self._scheduler.running
        began = self._engine.began_at
        return WorkerReport(
            queued=waiting,
            computing=running,
            computing_s=0.0 if began is None else self._clock() - began,
            computed_s=self._engine.computed_s,
            counts={**self.counts, "preemptions": self._scheduler.preemptions},
            upstream=self._mail.of_stage(self._number - 1),
            routers=tuple(sorted({*self._mail.table.gateways} & {*self._mail})),
            downstream=self._mail.of_stage(self._number + 1),
            kv_usage=self._scheduler.usage,
        )

    # Edges.

    def edge_up(self, outbox: Outbox) -> None:
        """Use a new incarnation of an edge."""
        self._mail.up(outbox)

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        """Stop using an incarnation of an edge.

        Sequences of a gateway that is gone are dropped; of those that go through a
        replica that is gone, their gateways are told.

        Args:
            outbox: The incarnation.
            is_polite: Whether the peer left; otherwise it was lost.
        """
        peer = outbox.edge.peer
        if not self._mail.down(outbox):
            return
        for link in self._links:
            if link.key[0] == peer:
                self._end(link.key)
            elif peer in link.opening.chain:
                self._give_back(link.key)

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        """Handle the messages of a frame that has arrived."""
        peer = outbox.edge.peer
        for message, contents in frame:
            check(message, contents, peer, self.name, self._number, self._links)
            match message:
                case generation_messages.Begin(openings):
                    for opening in openings:
                        self._begin(opening)
                case generation_messages.Prepare(opening, stages):
                    self._begin(opening, stages)
                case generation_messages.Fetch(key, previous, begin):
                    self._feed(peer, key, previous, begin)
                case generation_messages.Held(key, count):
                    self._told(key, count)
                case generation_messages.Pause(keys):
                    for key in keys:
                        self._scheduler.pause(key)
                case generation_messages.End(keys):
                    for key in keys:
                        self._end(key)
                case generation_messages.Step():
                    # The frame's memory is reused once its tensors are gone.
                    self._inbox.add(ArrivedStep(message, contents[0]["hidden"]))
                case generation_messages.Refill():
                    self._inbox.refill(message, contents[0]["hidden"])
                case generation_messages.Preempted():
                    self._inbox.add(message)
                case generation_messages.KvEvicted(key):
                    self._pass_back(message)
                case generation_messages.StepDone(number, tokens):
                    self._scheduler.sampled(number, tokens)
                case generation_messages.Resumed(key, token):
                    self._scheduler.resume(key, token)
        self._has_work.set()

    # Sequences.

    def _begin(self, opening: Opening, stages: Sequence[int] = ()) -> None:
        """Take a sequence in, and tell the stage before what is here of it.

        Args:
            opening: The sequence.
            stages: Stages that are prepared for it while it goes on elsewhere; none if
                it begins now.
        """
        link, told = self._links.begin(opening, stages)
        self._watched.difference_update(link.earlier)
        if opening.is_watched:
            self._watched.add(opening.key)
        made = self._engine.open(opening)
        if not link.held:
            self._prompts.find(link)
        has_room = self._number > 0 or self._schedule(link)
        neighbours = neighbours_of(opening.chain, self._number)
        if not has_room:  # nothing of it may be computed here, whoever asks
            self._give_back(opening.key)
            self._end(opening.key)
        elif not neighbours <= {*self._mail}:
            self._give_back(opening.key)  # not connected yet, or no more
        elif self._is_end(link):
            when_made(made, lambda: self._resolve_known(link))
        elif told is not None:
            self._told(opening.key, told)

    def _resolve_known(self, link: Link) -> None:
        if self._links.get(link.key) is link:
            self._resolve(link)
            self._has_work.set()

    def _schedule(self, link: Link) -> bool:
        """Let the scheduler know a sequence that was here; return if it has room."""
        key, tokens, earlier = link.key, link.opening.tokens, link.earlier
        route = link.opening.chain
        if link.stages:
            return self._scheduler.reserve(earlier, key, len(tokens))
        for old in earlier:
            if self._scheduler.knows(old):
                self._scheduler.move(old, key, tokens, link.held, route)
            elif self._scheduler.has_reserved(old):
                self._scheduler.take_over(
                    old,
                    key,
                    tokens,
                    link.held,
                    link.opening.share,
                    route,
                    sample_rows_of(link.opening.sampling),
                )
        return True

    def _is_end(self, link: Link) -> bool:
        """Tell whether the next stage needs nothing of a sequence that begins."""
        is_prepared = link.stages and self._number + 1 not in link.stages
        return self._is_last or bool(is_prepared)

    def _feed(self, peer: str, key: Key, previous: int, begin: int) -> None:
        """Send a replica that is prepared what it lacks."""
        link = self._links.get((*key[:2], previous))
        if link is None or begin < link.logged:
            self._mail.tell(key[0], generation_messages.SequenceFailed(key))
            return
        rows = NO_ROWS
        if begin < link.held:
            rows = self._log.rows(link.stream, begin, link.held)
        self._mail.tell(peer, generation_messages.Refill(key, begin, True), rows)

    def _restore(self, links: Iterable[Link | None]) -> None:
        """Let sequences begin with what is known of their prompts."""
        for link in links:
            if link is not None and link.is_known:
                rows = self._prompts.restore(link, self._engine)
                if rows is not None:
                    link.logged = 0
                    self._log_rows(link, 0, rows)

    def _told(self, key: Key, count: int) -> None:
        """Send the next stage what it lacks, as far as it is here."""
        resolved = self._links.told(key, count)
        if resolved is None:
            return
        link, begin, end = resolved.link, resolved.begin, resolved.end
        is_moved = self._scheduler.knows(key)
        if begin < end or is_moved:
            self._refill(link, begin, end, is_end=is_moved)
        self._resolve(link)

    def _refill(self, link: Link, begin: int, end: int, *, is_end: bool) -> None:
        """Send rows of the log to the next stage; it is the end in stage 0."""
        message = generation_messages.Refill(link.key, begin, is_end)
        rows = self._log.rows(link.stream, begin, end) if begin < end else NO_ROWS
        self._mail.tell(link.opening.chain[self._number + 1], message, rows)
        link.sent = end

    def _resolve(self, link: Link) -> None:
        """Go on with a sequence, now that the stages after this one can."""
        key, opening = link.key, link.opening
        before = self._number - 1
        if link.stages and before not in link.stages:
            self._fill(link)
            return
        if before >= 0:
            held = generation_messages.Held(key, link.held)
            self._mail.tell(opening.chain[before], held)
            return
        if self._scheduler.knows(key):
            self._scheduler.rewind(key, link.held)
            return
        try:
            self._scheduler.add(
                key,
                opening.tokens,
                computed=link.held,
                refill=link.sent or 0,
                share=opening.share,
                is_probe=opening.is_probe,
                is_suspect=opening.is_suspect,
                route=opening.chain,
                sample_rows=sample_rows_of(opening.sampling),
            )
        except TooManyTokensError as error:
            self._fail(key, InvalidRequestError(str(error)))

    def _fill(self, link: Link) -> None:
        """Get what this stage lacks of a sequence for which it is prepared."""
        key, opening, held = link.key, link.opening, link.held
        if self._number > 0:
            fetch = generation_messages.Fetch(key, opening.previous, held)
            self._mail.tell(opening.chain[self._number - 1], fetch)
            return
        rows = torch.tensor(opening.tokens[held:], dtype=torch.int64)
        self._inbox.refill(generation_messages.Refill(key, held, True), rows)

    def _end(self, key: Key) -> None:
        link = self._links.end(key)
        if link is None:
            return
        is_counted = not link.opening.is_probe and not link.stages
        self.counts["requests"] += is_counted
        stream = key[:2]
        self._scheduler.remove(key)
        self._sampled.pop(key, None)
        self._watched.discard(key)
        self._log.drop(stream)
        self._prompts.forget(stream)
        self._engine.free(stream)
        self._memory.free(stream)
        self._has_work.set()

    def _give_back(self, key: Key) -> None:
        """Tell its gateway that a sequence cannot go on; it says what to do."""
        self._scheduler.pause(key)
        self._mail.tell(key[0], generation_messages.SequenceFailed(key))

    def _fail(self, key: Key, error: Exception) -> None:
        if not isinstance(error, InvalidRequestError | ModelFailedError):
            text = f"stage {self._stage_name!r} raised {type(error).__name__}: {error}"
            error = ModelFailedError(text, stage=self._stage_name)
        self._end(key)
        failed = generation_messages.SequenceFailed(key, RemoteError.of(error))
        self._mail.tell(key[0], failed)

    # Computing.

    async def _compute_next(self) -> bool:
        """Compute one step; return False if there is none."""
        self._evict_at_once()
        if self._number == 0 and not (self._is_turn_of_inbox and len(self._inbox)):
            planned = self._scheduler.next_step(self._clock())
            if planned is not None:
                self._is_turn_of_inbox = True
                work = self._compute_planned(planned)
                await self._or_give_back([part.key for part in planned.parts], work)
                return True
        self._is_turn_of_inbox = False
        match self._inbox.next():
            case None:
                await self._engine.tidy()
                return False
            case generation_messages.Preempted(keys):
                self._preempt(keys)
            case ArrivedStep(step, hidden):
                parts, rows, gone = lacking(step.parts, hidden, self._links)
                for key in gone:
                    self._give_back(key)
                parts, rows = self._that_fit(parts, rows)
                work = self._compute_step(step.origin, step.number, parts, rows)
                await self._or_give_back([part.key for part in parts], work)
            case refills:
                work = self._compute_refills(refills)
                await self._or_give_back([refill.key for refill in refills], work)
        return True

    async def _or_give_back(self, keys: Sequence[Key], work: Awaitable[None]) -> None:
        """Compute something; if that fails unexpectedly, only its sequences suffer."""
        try:
            await work
        except Exception:
            logger.exception("a step failed; its sequences are given back")
            self.counts["failed_steps"] += 1
            for key in keys:
                self._give_back(key)

    def _preempt(self, keys: Sequence[Key]) -> None:
        """Free the memory of sequences, here and in later stages of their chains."""
        by_peer: dict[str, list[Key]] = {}
        for key in keys:
            link = self._links.get(key)
            if link is None:
                continue
            self._forget_computed(link)
            if not self._is_last:
                peer = link.opening.chain[self._number + 1]
                by_peer.setdefault(peer, []).append(key)
        for peer, those in by_peer.items():
            self._mail.tell(peer, generation_messages.Preempted(tuple(those)))

    # Memory of the stages after the first.

    def _rank_of(self, stream: StreamId) -> tuple[bool, int, int, str]:
        """Return the rank of a sequence, the same in all stages.

        What is only prepared is dropped first, then what came last.
        """
        link = self._links.of(stream)
        if link is None:
            return True, 0, stream[1], stream[0]
        return bool(link.stages), -link.opening.share.priority, stream[1], stream[0]

    def _that_fit(
        self, parts: list[StepPart], rows: Tensor
    ) -> tuple[list[StepPart], Tensor]:
        """Return the parts that there is memory for; drop sequences for them."""
        for part in parts:
            if part.begin == 0:  # its memory is freed before it is computed anew
                self._memory.free(part.key[:2])
        wanted = {part.key[:2]: part.begin + part.count for part in parts if part.count}
        evicted = {*self._memory.take(wanted)}
        for stream in evicted:
            self._drop(stream)
        if not any(part.key[:2] in evicted for part in parts):
            return parts, rows
        pieces = torch.split(rows, [part.count for part in parts])
        kept = [n for n, part in enumerate(parts) if part.key[:2] not in evicted]
        left = torch.cat([pieces[n] for n in kept]) if kept else rows[:0]
        return [parts[n] for n in kept], left

    def _drop(self, stream: StreamId) -> None:
        """Drop the keys and values of a sequence for lack of memory."""
        link = self._links.of(stream)
        if link is None:
            return
        self.counts["evicted"] += 1
        key = link.key
        self._forget_computed(link)
        link.is_evicted = True
        if link.stages:
            self._mail.tell(key[0], generation_messages.SequenceFailed(key))
        else:
            self._pass_back(generation_messages.KvEvicted(key, self.name))

    def _forget_computed(self, link: Link) -> None:
        """Drop all that was computed of a sequence here."""
        link.reset()
        self._sampled.pop(link.key, None)
        self._prompts.release(link.stream)
        self._log.drop(link.stream)
        self._engine.drop(link.stream)
        self._memory.free(link.stream)

    def _pass_back(self, evicted: generation_messages.KvEvicted) -> None:
        """Tell stage 0, through the stages before."""
        if self._number == 0:
            self._evicted.append(evicted)  # no step is computed when it is handled
            return
        link = self._links.get(evicted.key)
        if link is None:  # perhaps it is yet to begin here; its gateway knows
            self._give_back(evicted.key)
        else:
            self._mail.tell(link.opening.chain[self._number - 1], evicted)

    def _evict_at_once(self) -> None:
        """Preempt what later stages had no memory for; in stage 0."""
        evicted, self._evicted = self._evicted, []
        for each in evicted:
            if self._links.get(each.key) is None:
                self._give_back(each.key)
                continue
            now = self._clock()
            is_elsewhere = self._scheduler.evict(each.key, each.replica, now)
            self._preempt([each.key])
            if is_elsewhere:
                self._give_back(each.key)

    async def _compute_planned(self, planned: PlannedStep) -> None:
        if planned.preempted:
            self._preempt(planned.preempted)
        if planned.is_alone:
            key = planned.parts[0].key
            self._mail.tell(key[0], generation_messages.Alone(key))
            self._mail.flush(key[0])  # before it can end this process
        ids: list[int] = []
        for part in planned.parts:
            tokens = self._scheduler.tokens(part.key)
            ids += tokens[part.begin : part.begin + part.count]
        rows = torch.tensor(ids, dtype=torch.int64)
        await self._compute_step(self.name, planned.number, planned.parts, rows)

    async def _compute_step(
        self, origin: str, number: int, parts: Sequence[StepPart], rows: Tensor
    ) -> None:
        """Compute the parts of a step, and send them on."""
        found = await self._compute([part for part in parts if part.count], rows)
        if self._is_last:
            self._deliver(found.tokens)
            self._done(origin, outcome(number, parts, found.tokens, self._sampled))
            return
        ons = steps_on(self._number, origin, number, parts, found, self._links)
        for peer, step, hidden in ons:
            self._mail.tell(peer, step, hidden)

    async def _compute_refills(self, refills: Sequence[RefillRows]) -> None:
        """Compute rows that this stage lacks, and send on what later ones lack."""
        parts: list[StepPart] = []
        rows: list[Tensor] = []
        for refill in refills:
            link = self._links.get(refill.key)
            if link is None:
                continue
            end = refill.begin + len(refill.rows)
            if link.is_evicted:
                continue
            lacking = link.lacks(refill.begin, len(refill.rows))
            if lacking is None:
                self._give_back(refill.key)
            elif lacking:
                is_all = end == len(link.opening.tokens)
                samples = self._is_last and is_all and not link.stages
                parts.append(StepPart(link.key, end - lacking, lacking, samples))
                rows.append(refill.rows[-lacking:])
        whole = torch.cat(rows) if rows else NO_ROWS
        if self._number > 0:  # stage 0 has reserved the memory
            parts, whole = self._that_fit(parts, whole)
        computed = await self._compute(parts, whole)
        self.counts["refilled"] += sum(part.count for part in parts)
        self._deliver(computed.tokens)
        self._sampled.update(
            {t.key: None if t.finish else t.token for t in computed.tokens}
        )
        outputs = computed.rows()
        for refill in refills:
            link = self._links.get(refill.key)
            if link is None or link.is_evicted:
                continue
            if link.stages and self._is_end(link):
                if refill.is_end:
                    prepared = generation_messages.Prepared(link.key)
                    self._mail.tell(link.key[0], prepared)
            elif not self._is_last:
                out = outputs.get(link.key, NO_ROWS)
                count = link.unsent(link.held - len(out), len(out))
                begin = link.held - count
                message = generation_messages.Refill(link.key, begin, refill.is_end)
                peer = link.opening.chain[self._number + 1]
                self._mail.tell(peer, message, out[len(out) - count :])
            elif refill.is_end:
                token = self._sampled.pop(link.key, None)
                resumed = generation_messages.Resumed(link.key, token)
                self._mail.tell(link.opening.chain[0], resumed)

    async def _compute(self, parts: Sequence[StepPart], rows: Tensor) -> Computed:
        """Compute rows in the thread, and log what comes out."""
        if not parts:
            return Computed(())
        self._restore(self._links.get(part.key) for part in parts)
        self._tell_began(parts)
        found = await self._engine.compute(parts, rows)
        self._scheduler.granule = self._engine.granule
        self.counts["steps"] += 1
        self.counts["rows"] += len(rows)
        self.counts["tokens"] += len(found.tokens)
        for key, error in found.failed:
            if self._links.get(key) is None:
                continue
            if isinstance(error, MissingTokensError):
                self._give_back(key)
            else:
                self._fail(key, error)
        outputs = found.rows()
        for part in found.parts:
            link = self._links.get(part.key)
            if link is None:
                continue
            link.held = part.begin + part.count
            if part.key in outputs:
                self._log_rows(link, part.begin, outputs[part.key])
            log = None if self._is_last else self._log
            self._prompts.keep(link, part, self._engine, log)
        return found

    def _tell_began(self, parts: Sequence[StepPart]) -> None:
        """Tell the gateways of watched sequences, before these can end this process."""
        if not self._watched:
            return
        began: dict[str, list[Key]] = {}
        for part in parts:
            if part.key in self._watched:
                self._watched.discard(part.key)
                began.setdefault(part.key[0], []).append(part.key)
        for gateway, keys in began.items():
            self._mail.tell(gateway, generation_messages.ComputeBegan(tuple(keys)))
            self._mail.flush(gateway)

    def _log_rows(self, link: Link, begin: int, rows: Tensor) -> None:
        """Log the output of a sequence, for a replica that is to replace the next.

        Args:
            link: The sequence.
            begin: Position of the first row.
            rows: Shape [rows, hidden].
        """
        link.held = begin + len(rows)
        for stream in self._log.append(link.stream, begin, rows):
            self._links.unlogged(stream)

    def _deliver(self, tokens: Iterable[TokenItem]) -> None:
        for gateway, message in by_gateway(tokens):
            self._mail.tell(gateway, message)

    def _done(self, origin: str, done: generation_messages.StepDone) -> None:
        """Tell the scheduler of a step what came out of it."""
        if origin == self.name:
            self._scheduler.sampled(done.number, done.tokens)
            self._has_work.set()
        else:
            self._mail.tell(origin, done)
