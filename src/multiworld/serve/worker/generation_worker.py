"""One replica of one stage of a model that generates text. Shell.

The replica of stage 0 schedules; the others compute the steps that arrive, in order.
The gateway of a sequence decides when it ends and where it is computed again: a replica
only tells it what it cannot go on with.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multiworld.errors import InvalidRequestError, ModelFailedError
from multiworld.serve.generation.kv_cache import MissingTokensError
from multiworld.serve.generation.scheduler import PlannedStep, Scheduler
from multiworld.serve.generation.stage_engine import Computed, StageEngine
from multiworld.serve.spec.stage import Stage, StageContext
from multiworld.serve.transport import generation_messages
from multiworld.serve.transport.edge_messages import EdgeMessage
from multiworld.serve.transport.edges import Outbox
from multiworld.serve.transport.frames import Entry
from multiworld.serve.transport.generation_messages import Opening, StepPart, TokenItem
from multiworld.serve.transport.protocol import Key, RemoteError, WorkerReport
from multiworld.serve.transport.routing_table import RoutingTable
from multiworld.serve.worker.compute_thread import ComputeThread
from multiworld.serve.worker.hang_guard import EXIT_HUNG, HangGuard

logger = logging.getLogger("multiworld.serve")

HUNG_S = 30.0
"""Seconds after which a step is taken to hang. A stage with larger steps says so with
``compute_s``."""

HELD = 4096
"""Most messages that wait for a gateway which is still to connect."""

ENDED = 65536
"""Ended sequences that are remembered, because a step of them may still arrive."""


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A step that waits to be computed."""

    step: generation_messages.Step | generation_messages.Preempted
    hidden: Tensor | None = None


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
        end_tokens: Tokens that end a text, by the model.
        compute_s: Most seconds for one step; None: ``HUNG_S``.
        clock: Returns the monotonic time in seconds.

    Attributes:
        counts: Number of events since the start, by kind.
        computed_s: Total computing time, in seconds.
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
        end_tokens: tuple[int, ...],
        compute_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._number, self._is_last = name, number, is_last
        self._stage, self._stage_name, self._threads = stage, stage_name, threads
        self._scheduler, self._end_tokens = scheduler, end_tokens
        self._clock, self._compute_s = clock, compute_s or HUNG_S
        self._thread: ComputeThread | None = None
        self._engine: StageEngine | None = None
        self._edges: dict[str, Outbox] = {}
        self._openings: dict[Key, Opening] = {}
        self._told: set[Key] = set()
        self._ended: OrderedDict[Key, None] = OrderedDict()
        self._to_free: list[Key] = []
        self._to_drop: list[Key] = []
        self._held: dict[str, deque[EdgeMessage]] = {}
        self._guard = HangGuard(self._end_if_hung)
        self._arrived: deque[_Arrived] = deque()
        self._has_work = asyncio.Event()
        self._began_at: float | None = None
        self._table = RoutingTable()
        self.counts: Counter[str] = Counter()
        self.computed_s = 0.0

    # The life of the process.

    async def load(self, context: StageContext) -> None:
        """Load the stage, in its thread.

        Raises:
            Exception: Any error that the model's code raises.

        Cancellation: Loading goes on in its thread; call ``close`` afterwards.
        """
        self._thread = ComputeThread()
        await self._thread.call(self._load, context)

    def _load(self, context: StageContext) -> None:
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            function: Any = self._stage.load(context)
        self._engine = StageEngine(function, self._is_last, self._end_tokens)
        self._guard.start()

    def _end_if_hung(self) -> None:
        """Exit the process if the running step is taken to hang; any thread calls it.

        The gateways see it at once, and compute its sequences elsewhere.
        """
        began = self._began_at
        if began is not None and self._clock() - began > self._compute_s:
            logger.error("a step takes more than %g s: it hangs", self._compute_s)
            faulthandler.dump_traceback(sys.stderr)
            os._exit(EXIT_HUNG)

    def close(self) -> None:
        """Stop the thread, without waiting for a running computation."""
        if self._thread is not None:
            self._thread.close()

    async def run(self) -> None:
        """Compute steps until cancelled.

        Cancellation: Safe; a computation goes on in its thread, its result is dropped.
        """
        while True:
            self._has_work.clear()
            if not await self._compute_next():
                await self._has_work.wait()

    async def look(self) -> None:
        """Do nothing: gateways watch over the deadlines of their streams.

        Cancellation: Safe.
        """

    def table_changed(self, table: RoutingTable) -> None:
        """Use a new routing table; end the sequences of gateways that are gone."""
        self._table = table
        known = {*table.gateways, *self._edges}
        for key in [key for key in self._openings if key[0] not in known]:
            self._end(key)
        for name in self._held.keys() - known:
            del self._held[name]

    @property
    def has_router(self) -> bool:
        """True while a gateway is connected."""
        return any(name in self._edges for name in self._table.gateways)

    @property
    def is_idle(self) -> bool:
        """True if it knows no sequence."""
        return not self._openings

    async def wait_sent(self) -> None:
        """Wait until all messages were sent.

        Cancellation: Safe.
        """
        for outbox in list(self._edges.values()):
            await outbox.wait_sent()

    def report(self) -> WorkerReport:
        """Return what it does at this moment."""
        waiting, running = len(self._arrived), len(self._openings)
        if self._number == 0:
            waiting, running = self._scheduler.waiting, self._scheduler.running
        began = self._began_at
        return WorkerReport(
            queued=waiting,
            computing=running,
            computing_s=0.0 if began is None else self._clock() - began,
            computed_s=self.computed_s,
            counts={**self.counts, "preemptions": self._scheduler.preemptions},
            upstream=self._connected(self._number - 1),
            routers=tuple(sorted(set(self._table.gateways) & self._edges.keys())),
            downstream=self._connected(self._number + 1),
            kv_usage=self._scheduler.used_blocks / self._scheduler.limits.blocks,
        )

    def _connected(self, stage: int) -> tuple[str, ...]:
        known = self._table.replicas
        return tuple(
            sorted(n for n in self._edges if n in known and known[n].stage == stage)
        )

    # Edges.

    def edge_up(self, outbox: Outbox) -> None:
        """Use a new incarnation of an edge."""
        peer = outbox.edge.peer
        self._edges[peer] = outbox
        for message in self._held.pop(peer, ()):
            outbox.put(message)

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        """Stop using an incarnation of an edge.

        Sequences of a gateway that is gone are dropped; those that go through a replica
        that is gone are returned to their gateways.

        Args:
            outbox: The incarnation.
            is_polite: Whether the peer left; otherwise it was lost.
        """
        peer = outbox.edge.peer
        if self._edges.get(peer) is not outbox:
            return
        del self._edges[peer]
        for key, opening in list(self._openings.items()):
            if key[0] == peer:
                self._end(key)
            elif peer in opening.chain:
                self._give_back(key)

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        """Handle the messages of a frame that has arrived."""
        for message, contents in frame:
            match message:
                case generation_messages.Begin(openings):
                    for opening in openings:
                        self._begin(opening)
                case generation_messages.End(keys):
                    for key in keys:
                        self._end(key)
                case generation_messages.Step():
                    # The frame's memory is reused once its tensors are gone.
                    self._arrived.append(_Arrived(message, contents[0]["hidden"]))
                case generation_messages.Preempted():
                    self._arrived.append(_Arrived(message))
                case generation_messages.StepDone(number, tokens):
                    self._scheduler.sampled(number, tokens)
        self._has_work.set()

    # Sequences.

    def _begin(self, opening: Opening) -> None:
        if opening.key in self._ended or opening.key in self._openings:
            return
        others = {*opening.chain[1:2], *opening.chain[1:][-1:]}
        if not others <= self._edges.keys():  # it is not connected yet, or no more
            self._give_back(opening.key)
            return
        try:
            self._scheduler.add(
                opening.key,
                opening.tokens,
                is_probe=opening.is_probe,
                is_suspect=opening.is_suspect,
            )
        except ValueError as error:
            self._fail(opening.key, InvalidRequestError(str(error)))
            return
        self._openings[opening.key] = opening

    def _end(self, key: Key) -> None:
        self._ended[key] = None
        while len(self._ended) > ENDED:
            self._ended.popitem(last=False)
        self._told.discard(key)
        if self._openings.pop(key, None) is not None:
            self._scheduler.remove(key)
            self._to_free.append(key)
            self._has_work.set()

    def _give_back(self, key: Key) -> None:
        self._end(key)
        self._tell(key[0], generation_messages.SequenceFailed(key))

    def _fail(self, key: Key, error: Exception) -> None:
        if not isinstance(error, InvalidRequestError | ModelFailedError):
            text = f"stage {self._stage_name!r} raised {type(error).__name__}: {error}"
            error = ModelFailedError(text, stage=self._stage_name)
        self._end(key)
        failed = generation_messages.SequenceFailed(key, RemoteError.of(error))
        self._tell(key[0], failed)

    def _tell(self, peer: str, message: EdgeMessage) -> None:
        outbox = self._edges.get(peer)
        if outbox is not None:
            outbox.put(message)
        elif peer in self._table.gateways:  # it is still to connect
            self._held.setdefault(peer, deque(maxlen=HELD)).append(message)

    # Computing.

    async def _compute_next(self) -> bool:
        """Compute one step; return False if there is none."""
        if self._number == 0:
            planned = self._scheduler.next_step()
            if planned is None:
                await self._free_ended()
                return False
            await self._compute_planned(planned)
            return True
        if not self._arrived:
            await self._free_ended()
            return False
        arrived = self._arrived.popleft()
        step = arrived.step
        if isinstance(step, generation_messages.Preempted):
            self._preempt(step.keys)
            return True
        assert arrived.hidden is not None
        for opening in step.openings:
            if opening.key not in self._ended:
                self._openings[opening.key] = opening
        parts, rows = self._known_parts(step.parts, arrived.hidden)
        if parts:
            await self._compute(step.origin, step.number, parts, rows, step.openings)
        elif self._is_last:  # the scheduler counts it as under way
            self._done(step.origin, step.number, step.parts, ())
        return True

    def _preempt(self, keys: Sequence[Key]) -> None:
        """Free the memory of sequences, here and in later stages of their chains."""
        self._to_drop += keys
        by_peer: dict[str, list[Key]] = {}
        for key in keys:
            opening = self._openings.get(key)
            if opening is not None and not self._is_last:
                by_peer.setdefault(opening.chain[self._number + 1], []).append(key)
        for peer, those in by_peer.items():
            self._tell(peer, generation_messages.Preempted(tuple(those)))

    async def _compute_planned(self, planned: PlannedStep) -> None:
        if planned.preempted:
            self._preempt(planned.preempted)
        if planned.is_alone:
            key = planned.parts[0].key
            self._tell(key[0], generation_messages.Alone(key))
            if key[0] in self._edges:  # before it can end this process
                self._edges[key[0]].flush()
        parts = planned.parts
        ids: list[int] = []
        for part in parts:
            tokens = self._scheduler.tokens(part.key)
            ids += tokens[part.begin : part.begin + part.count]
        openings = [self._openings[p.key] for p in parts if p.key not in self._told]
        self._told.update(part.key for part in parts)
        rows = torch.tensor(ids, dtype=torch.int64)
        await self._compute(self.name, planned.number, parts, rows, openings)

    def _known_parts(
        self, parts: Sequence[StepPart], hidden: Tensor
    ) -> tuple[list[StepPart], Tensor]:
        """Return the parts of sequences that have not ended, and their rows."""
        if all(part.key in self._openings for part in parts):
            return list(parts), hidden
        kept, rows, offset = [], [], 0
        for part in parts:
            if part.key in self._openings:
                kept.append(part)
                rows.append(hidden[offset : offset + part.count])
            offset += part.count
        return kept, torch.cat(rows) if rows else hidden[:0]

    async def _compute(
        self,
        origin: str,
        number: int,
        parts: Sequence[StepPart],
        rows: Tensor,
        openings: Sequence[Opening],
    ) -> None:
        assert self._thread is not None
        ended, self._to_free = self._to_free, []
        dropped, self._to_drop = self._to_drop, []
        began_at = self._began_at = self._clock()
        try:
            found = await self._thread.call(
                self._run, ended, dropped, parts, rows, openings
            )
        finally:
            self._began_at = None
        self.computed_s += self._clock() - began_at
        self.counts["steps"] += 1
        self.counts["rows"] += len(rows)
        self.counts["tokens"] += len(found.tokens)
        for key, error in found.failed:
            if isinstance(error, MissingTokensError):
                self._give_back(key)
            else:
                self._fail(key, error)
        if self._is_last:
            self._deliver(found.tokens)
            self._done(origin, number, parts, found.tokens)
        else:
            self._send_on(origin, number, found, openings)

    def _run(
        self,
        ended: Sequence[Key],
        dropped: Sequence[Key],
        parts: Sequence[StepPart],
        rows: Tensor,
        openings: Sequence[Opening],
    ) -> Computed:
        assert self._engine is not None
        self._engine.free(ended)
        self._engine.drop(dropped)
        return self._engine.compute(parts, rows, openings)

    async def _free_ended(self) -> None:
        if self._to_free and self._engine is not None and self._thread is not None:
            ended, self._to_free = self._to_free, []
            await self._thread.call(self._engine.free, ended)

    # What goes on.

    def _deliver(self, tokens: Iterable[TokenItem]) -> None:
        by_gateway: dict[str, list[TokenItem]] = {}
        for item in tokens:
            by_gateway.setdefault(item.key[0], []).append(item)
        for gateway, items in by_gateway.items():
            self._tell(gateway, generation_messages.Tokens(tuple(items)))

    def _done(
        self,
        origin: str,
        number: int,
        parts: Sequence[StepPart],
        tokens: Sequence[TokenItem],
    ) -> None:
        """Tell the scheduler of a step what came out of it."""
        sampled = {t.key: None if t.finish else t.token for t in tokens}
        done = tuple((part.key, sampled.get(part.key)) for part in parts)
        if origin == self.name:
            self._scheduler.sampled(number, done)
            self._has_work.set()
        elif origin in self._edges:
            self._tell(origin, generation_messages.StepDone(number, done))
        else:  # its scheduler would wait for ever
            for part in parts:
                if part.key in self._openings:
                    self._give_back(part.key)

    def _send_on(
        self,
        origin: str,
        number: int,
        found: Computed,
        openings: Sequence[Opening],
    ) -> None:
        """Send the parts of a step on, each to the next replica of its chain."""
        assert found.hidden is not None or not found.parts
        by_peer: dict[str, list[tuple[StepPart, int]]] = {}
        offset = 0
        for part in found.parts:
            opening = self._openings.get(part.key)
            if opening is not None:
                peer = opening.chain[self._number + 1]
                by_peer.setdefault(peer, []).append((part, offset))
            offset += part.count
        new = {opening.key: opening for opening in openings}
        for peer, pieces in by_peer.items():
            outbox = self._edges.get(peer)
            if outbox is None:
                for part, _ in pieces:
                    self._give_back(part.key)
                continue
            hidden = found.hidden
            assert hidden is not None
            if len(by_peer) > 1 or len(pieces) < len(found.parts):
                hidden = torch.cat([hidden[at : at + p.count] for p, at in pieces])
            parts = tuple(part for part, _ in pieces)
            begins = tuple(new[p.key] for p in parts if p.key in new)
            step = generation_messages.Step(origin, number, parts, begins)
            outbox.put(step, [{"hidden": hidden}])
