"""Worker of one replica of a model that generates text. Stage 0 schedules steps; later
stages compute the steps that arrive, in order. ``Recovery`` makes all decisions; this
shell has the edges, the engine and all rows."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from multiworld.liveness.pause_detector import PauseDetector
from multiworld.serve.deadlines import GRACE_S
from multiworld.serve.engine.compute.kv_cache import MissingTokensError
from multiworld.serve.engine.compute.stage_engine import Computed
from multiworld.serve.replica.scheduling.pipeline_share import adapt_to
from multiworld.serve.replica.scheduling.scheduler import Scheduler
from multiworld.serve.replica.scheduling.step_planner import PlannedStep
from multiworld.serve.replica.sequences import actions as act
from multiworld.serve.replica.sequences import events
from multiworld.serve.replica.sequences.activation_log import ActivationLog
from multiworld.serve.replica.sequences.engine import Engine
from multiworld.serve.replica.sequences.message_validation import check
from multiworld.serve.replica.sequences.outboxes import Outboxes
from multiworld.serve.replica.sequences.prompt_prefixes import PromptPrefixes
from multiworld.serve.replica.sequences.recovery import Recovery, ReplicaSettings
from multiworld.serve.replica.sequences.sequence_state import SequenceState
from multiworld.serve.replica.sequences.step_outputs import (
    NO_ROWS,
    by_gateway,
    outcome,
    steps_on,
)
from multiworld.serve.replica.sequences.step_queue import (
    ArrivedStep,
    RebuildRows,
    StepQueue,
)
from multiworld.serve.spec.stage import StageContext
from multiworld.serve.tracing.stage_trace import StageTrace
from multiworld.serve.wire import generation_messages
from multiworld.serve.wire.control_messages import WorkerReport
from multiworld.serve.wire.edges import Outbox
from multiworld.serve.wire.frames import Entry
from multiworld.serve.wire.generation_messages import StepPart, TokenItem
from multiworld.serve.wire.protocol import Key
from multiworld.serve.wire.routing_table import RoutingTable

logger = logging.getLogger("multiworld.serve")


class GenerationWorker:
    """A replica of a model that generates text; it owns the edges of its process."""

    def __init__(
        self,
        settings: ReplicaSettings,
        engine: Engine,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._stage = settings.name, settings.stage
        self._is_last = settings.is_last
        self._engine, self._scheduler, self._clock = engine, scheduler, clock
        block = scheduler.limits.block_size
        self._prefixes = PromptPrefixes(settings.prefix_bytes, block)
        self.recovery = Recovery(settings, scheduler, self._prefixes.find)
        self._table, self.counts = self.recovery.table, self.recovery.counts
        self._prefixes.counts = self.counts
        self._outboxes = Outboxes()
        self._log = ActivationLog(settings.log_bytes)
        self._queue = StepQueue(scheduler.limits.max_num_batched_tokens, self._table)
        self._is_turn_of_queue = False
        self._has_work = asyncio.Event()
        self._pauses = PauseDetector(GRACE_S)
        self.trace: StageTrace | None = None  # None: nothing is traced

    # Life cycle of the process.

    async def load(self, context: StageContext) -> None:
        """Load the stage, in its thread; call ``close`` if this is cancelled."""
        await self._engine.load(context)
        self._scheduler.pool.granule = self._engine.granule

    def close(self) -> None:
        """Stop the thread, without waiting for a running computation."""
        self._engine.close()

    async def run(self) -> None:
        """Compute steps until cancelled; a running step finishes, but is not used."""
        while True:
            self._has_work.clear()
            if await self.compute_next():
                # Lets the event loop send the results before the next step.
                await asyncio.sleep(0)
            else:
                await self._wait()

    async def _wait(self) -> None:
        """Wait for a message, or until time alone makes a step possible."""
        timer = None
        if math.isfinite(self.wakes_at):
            wait_s = max(0.0, self.wakes_at - self._clock())
            timer = asyncio.get_running_loop().call_later(wait_s, self._has_work.set)
        try:
            await self._has_work.wait()
        finally:
            if timer is not None:
                timer.cancel()

    @property
    def wakes_at(self) -> float:
        """Time at which a step may be possible without a message; may be infinite."""
        return self._scheduler.wakes_at

    async def look(self) -> None:
        while True:
            await asyncio.sleep(GRACE_S)
            self.tick()

    def tick(self) -> None:
        """Return overdue sequences to their gateways."""
        self._handle(events.Ticked(self._pauses.look(self._clock())))

    def table_changed(self, table: RoutingTable) -> None:
        """Use a new routing table; end the sequences of gateways that are gone."""
        self._outboxes.table_changed(table)
        adapt_to(self._scheduler, table, self.name)
        self._handle(events.GatewaysChanged({*table.gateways, *self._outboxes}))

    @property
    def has_gateway(self) -> bool:
        return bool(self._outboxes.gateways())

    @property
    def is_idle(self) -> bool:
        return not len(self._table)

    async def wait_sent(self) -> None:
        await self._outboxes.wait_sent()

    def report(self) -> WorkerReport:
        pool = self._scheduler.pool
        waiting, running = len(self._queue), len(self._table)
        if self._stage == 0:
            waiting, running = pool.waiting, len(pool.running)
        began = self._engine.began_at
        return WorkerReport(
            queued=waiting,
            computing=running,
            computing_s=0.0 if began is None else self._clock() - began,
            computed_s=self._engine.computed_s,
            counts={**self.counts, "preemptions": pool.preemptions},
            upstream=self._outboxes.of_stage(self._stage - 1),
            gateways=self._outboxes.gateways(),
            downstream=self._outboxes.of_stage(self._stage + 1),
            kv_usage=pool.usage,
            kv_blocks=pool.limits.blocks,
            kv_block_tokens=pool.limits.block_size,
        )

    # Edges.

    def edge_up(self, outbox: Outbox) -> None:
        self._outboxes.up(outbox)
        self._handle(events.Connected(outbox.edge.peer))

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        if self._outboxes.down(outbox):
            self._handle(events.Disconnected(outbox.edge.peer))

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        """Handle the messages of a frame; MessageError if one is not allowed here."""
        peer = outbox.edge.peer
        for message, contents in frame:
            check(message, contents, peer, self.name, self._stage, self._table)
            match message:
                case generation_messages.Step():
                    if message.starts:
                        self._handle(events.Received(peer, message))
                    # The step keeps the memory of its frame, which is reused once its
                    # tensors are gone.
                    self._queue.add(ArrivedStep(message, contents[0]["hidden"]))
                case generation_messages.ActivationRows():
                    self._queue.rebuild(message, contents[0]["hidden"])
                case generation_messages.PreemptSequences():
                    self._queue.add(message)
                case _:
                    self._handle(events.Received(peer, message))
        self._has_work.set()

    # Decisions.

    def _handle(self, event: events.Event) -> None:
        self._act(self.recovery.handle(event, self._clock()))

    def _act(self, actions: Iterable[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Warn(text):
                    logger.warning(text)
                case act.Send(peer, message, is_urgent):
                    self._outboxes.send(peer, message)
                    if is_urgent:
                        self._outboxes.flush(peer)
                case act.SendLogged(peer, key, begin, end, is_end):
                    replay = generation_messages.ActivationRows(key, begin, is_end)
                    rows = NO_ROWS
                    if begin < end:
                        rows = self._log.rows(key[:2], begin, end)
                    self._outboxes.send(peer, replay, rows)
                case act.Rebuild(key, begin, tokens):
                    rows = torch.tensor(tokens, dtype=torch.int64)
                    replay = generation_messages.ActivationRows(key, begin, True)
                    self._queue.rebuild(replay, rows)
                case act.Open(start):
                    self._open(start)
                    if self.trace is not None:
                        self.trace.opened(start.key, start.origin, self._clock())
                case act.Forget(stream):
                    if self.trace is not None:
                        self.trace.closed(stream, self._clock())
                    self._log.drop(stream)
                    self._prefixes.forget(stream)
                    self._engine.free(stream)
                    self._has_work.set()
                case act.DropComputed(stream):
                    self._prefixes.release(stream)
                    self._log.drop(stream)
                    self._engine.drop(stream)

    def _open(self, start: generation_messages.SequenceStart) -> None:
        made = self._engine.open(start)
        compiled = partial(self._compiled, start.key)
        if made is None or made.done():
            compiled()
            return
        loop = asyncio.get_running_loop()
        made.add_done_callback(lambda _: loop.call_soon_threadsafe(compiled))

    def _compiled(self, key: Key) -> None:
        self._handle(events.Compiled(key))
        self._has_work.set()

    # Computing.

    async def compute_next(self) -> bool:
        """Compute one step; return False if there is none."""
        self.recovery.preempt_evicted(self._clock())
        self._act(self.recovery.take())
        if self._stage == 0 and not (self._is_turn_of_queue and len(self._queue)):
            planned = self.recovery.next_step(self._clock())
            self._act(self.recovery.take())
            if planned is not None:
                self._is_turn_of_queue = True
                work = self._compute_planned(planned)
                await self._or_return([part.key for part in planned.parts], work)
                return True
        self._is_turn_of_queue = False
        match self._queue.next():
            case None:
                await self._engine.tidy()
                return False
            case generation_messages.PreemptSequences(keys):
                self.recovery.preempt(keys)
            case ArrivedStep(step, hidden):
                parts, rows = self._that_fit(*self._still_lacking(step.parts, hidden))
                work = self._compute_step(step.origin, step.number, parts, rows)
                await self._or_return([part.key for part in parts], work)
            case pieces:
                work = self._rebuild(pieces)
                await self._or_return([piece.key for piece in pieces], work)
        self._act(self.recovery.take())
        return True

    async def _or_return(self, keys: Sequence[Key], work: Awaitable[None]) -> None:
        """Await ``work``; after an unexpected error, return ``keys`` to gateways."""
        try:
            await work
        except Exception:
            states = (self._table.get(key) for key in keys)
            of = ", ".join(s.start.origin.request for s in states if s is not None)
            logger.exception(
                "a step failed; its sequences return to their gateways (requests %s)",
                of,
            )
            self.counts["failed_steps"] += 1
            self.recovery.return_to_gateway(keys)
            self._act(self.recovery.take())

    def _still_lacking(
        self, parts: Sequence[StepPart], hidden: Tensor
    ) -> tuple[list[StepPart], Tensor]:
        """Return the parts of known sequences, without rows computed earlier."""
        kept, rows, end = [], [], 0
        for part in parts:
            self.recovery.ignore_cached(part.key)
        self._act(self.recovery.take())
        for part in parts:
            state, end = self._table.get(part.key), end + part.count
            if state is None or state.is_evicted:
                continue
            count = state.lacking(part.begin, part.count)
            if count is None:  # rows before this part are missing
                self.recovery.return_to_gateway([part.key])
                continue
            # Keep the part even if none of its rows must be computed: later stages may
            # lack the rows, and the scheduler waits for the sequence.
            begin = part.begin + part.count - count
            kept.append(StepPart(part.key, begin, count, part.samples))
            rows.append(hidden[end - count : end])
        if sum(len(each) for each in rows) == len(hidden):
            return kept, hidden
        return kept, torch.cat(rows) if rows else hidden[:0]

    def _that_fit(
        self, parts: list[StepPart], rows: Tensor
    ) -> tuple[list[StepPart], Tensor]:
        kept = self.recovery.fit(parts)
        self._act(self.recovery.take())
        if len(kept) == len(parts):
            return parts, rows
        pieces = torch.split(rows, [part.count for part in parts])
        left = torch.cat([pieces[n] for n in kept]) if kept else rows[:0]
        return [parts[n] for n in kept], left

    async def _compute_planned(self, planned: PlannedStep) -> None:
        ids: list[int] = []
        for part in planned.parts:
            tokens = self._scheduler.pool.known[part.key].tokens
            ids += tokens[part.begin : part.begin + part.count]
        rows = torch.tensor(ids, dtype=torch.int64)
        await self._compute_step(self.name, planned.number, planned.parts, rows)

    async def _compute_step(
        self, origin: str, number: int, parts: Sequence[StepPart], rows: Tensor
    ) -> None:
        found = await self._compute([part for part in parts if part.count], rows)
        # Send the results before recording anything, because other processes wait for
        # them.
        if self._is_last:
            done = outcome(number, parts, found.tokens, self.recovery.sampled)
            if origin == self.name:
                self._handle(events.Received(self.name, done))
                self._has_work.set()
            else:
                self._outboxes.send(origin, done)
                self._outboxes.flush(origin)
            self._deliver(found.tokens)
        else:
            ons = steps_on(self._stage, origin, number, parts, found, self._table)
            for peer, step, hidden in ons:
                self._outboxes.send(peer, step, hidden)
                self._outboxes.flush(peer)
        self._record(found)

    async def _rebuild(self, pieces: Sequence[RebuildRows]) -> None:
        """Compute rows that this stage lacks, and send rows that later stages lack."""
        parts: list[StepPart] = []
        rows: list[Tensor] = []
        for piece in pieces:
            part = self.recovery.rebuild_part(piece.key, piece.begin, len(piece.rows))
            if part is not None:
                parts.append(part)
                rows.append(piece.rows[-part.count :])
        parts, whole = self._that_fit(parts, torch.cat(rows) if rows else NO_ROWS)
        found = await self._compute(parts, whole, "rebuilding KV")
        self._record(found)
        self.counts["refilled"] += sum(part.count for part in parts)
        self._deliver(found.tokens)
        self.recovery.sampled.update(
            {
                t.key: None if t.finish else t.token
                for t in found.tokens
                # The sequence may have ended in the meantime.
                if self.recovery.table.get(t.key)
            }
        )
        outputs = found.rows()
        counts = {key: len(made) for key, made in outputs.items()}
        for piece in pieces:
            on = self.recovery.rebuilt(piece.key, counts, is_end=piece.is_end)
            if on is not None:
                peer, begin, count = on
                replay = generation_messages.ActivationRows(
                    piece.key, begin, piece.is_end
                )
                made = outputs.get(piece.key, NO_ROWS)
                self._outboxes.send(peer, replay, made[len(made) - count :])

    async def _compute(
        self, parts: Sequence[StepPart], rows: Tensor, what: str = ""
    ) -> Computed:
        """Compute rows; call ``_record`` afterwards. ``what``: for the trace."""
        if not parts:
            return Computed(())
        self._restore(self._table.get(part.key) for part in parts)
        self.recovery.begun(parts)
        self._act(self.recovery.take())
        spans = self._prefixes.spans(parts)
        began_at = self._clock()
        found = await self._engine.compute(parts, rows, spans)
        if self.trace is not None:
            counts = ((part.key[:2], part.count) for part in parts)
            self.trace.step(counts, began_at, self._clock(), what)
        self._scheduler.pool.granule = self._engine.granule
        self.counts["steps"] += 1
        self.counts["rows"] += len(rows)
        self.counts["tokens"] += len(found.tokens)
        return found

    def _record(self, found: Computed) -> None:
        """Record what was computed, and log the outputs."""
        for key, error in found.failed:
            if self._table.get(key) is None:
                continue
            if isinstance(error, MissingTokensError):
                self.recovery.return_to_gateway([key])
            else:
                self.recovery.fail(key, error)
        outputs = found.rows()
        for part in found.parts:
            state = self._table.get(part.key)
            if state is None:
                continue
            state.held = part.begin + part.count
            if part.key in outputs:
                rows = outputs[part.key]
                dropped = self._log.append(state.stream, part.begin, rows)
                self.recovery.unlogged(dropped)
        for span, block in found.blocks:
            state = self._table.get(span.key)
            if state is not None:
                self._prefixes.keep(state, span, block, self._log)
        self._act(self.recovery.take())

    def _restore(self, states: Iterable[SequenceState | None]) -> None:
        """Restore cached prefixes of sequences that were not computed yet."""
        for state in states:
            if state is not None and state.is_cached:
                blocks = self._prefixes.restore(state, self._engine)
                if blocks:
                    state.logged = 0
                    self.recovery.unlogged(self._log.share(state.stream, blocks))

    def _deliver(self, tokens: Iterable[TokenItem]) -> None:
        for gateway, message in by_gateway(tokens):
            self._outboxes.send(gateway, message)
