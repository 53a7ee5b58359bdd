"""One replica of one stage: receives work, computes it and sends it on. Shell.

``BatchQueue`` forms the batches, and ``Forwarder`` chooses the next replica. The last
stage answers to the router of each request. Before a batch is computed, the replica
announces it to the routers, so that they know what a lost replica was computing. A
quick stage computes on the event loop, without an announcement.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import random
import sys
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from multiworld.errors import InvalidRequestError, ServeError
from multiworld.serve.transport import protocol
from multiworld.serve.transport.edges import SILENT_S, Outbox
from multiworld.serve.transport.frames import Entry
from multiworld.serve.transport.protocol import (
    ROWS_BOUNDS,
    SECONDS_BOUNDS,
    AnswerItem,
    Attempt,
    Key,
    RemoteError,
    WorkerReport,
    WorkItem,
)
from multiworld.serve.transport.routing_table import RoutingTable
from multiworld.serve.worker.batch_queue import BatchQueue, Work
from multiworld.serve.worker.executor import Executor, Outcome
from multiworld.serve.worker.forwarder import FinishedWork, Forwarder
from multiworld.serve.worker.hang_guard import HangGuard
from multiworld.serve.worker.intake import works_of

logger = logging.getLogger("multiworld.serve")

RELEASE_S = 0.05
"""Seconds after which the credit of a quick stage's work is returned."""

RELEASE_SHARE = 4
"""Credit is returned at once when this part of ``max_ongoing_requests`` is owed."""

LOOK_S = 0.1
"""Seconds between checks of deadlines and of silent replicas."""

MAX_CANCELLED = 4096
"""Most cancelled requests that are remembered, in case their work arrives later."""

TELL_S = 0.1
"""Most seconds that a batch waits until its announcement is sent; a router that is
stopped does not read."""

HUNG_S, OVERDUE_S = 30.0, 10.0
"""Seconds of computing, and seconds after the last deadline of its requests, after
which a batch is taken to hang."""

EXIT_HUNG = 70
"""Exit code of a replica that exits because its model hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of one replica.

    Attributes:
        max_batch_size: Most rows in a batch.
        max_wait_s: Most seconds that the oldest work waits for more work to batch.
        max_ongoing_requests: Credit: most requests that this replica may have sent to
            one replica of the next stage and that are not begun there.
        compute_s: Most seconds for one batch; None: a batch hangs after ``HUNG_S`` and
            ``OVERDUE_S``.
    """

    max_batch_size: int = 16
    max_wait_s: float = 0.0
    max_ongoing_requests: int = 32
    compute_s: float | None = None


class Worker:
    """A replica, as the owner of its process's edges.

    Args:
        name: Its name in the routing table.
        number: Number of its stage, from 0.
        is_last: Whether its stage is the last one.
        runner: Executor of its stage.
        limits: Limits of the replica.
        clock: Returns the monotonic time in seconds.

    Attributes:
        counts: Number of events since the start, by kind.
        computed_s: Total computing time of all batches, in seconds.
    """

    def __init__(
        self,
        name: str,
        number: int,
        is_last: bool,
        runner: Executor,
        limits: WorkerLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.name, self._number, self._is_last = name, number, is_last
        self._runner, self._limits = runner, limits
        self._batcher = BatchQueue(limits.max_batch_size, limits.max_wait_s)
        self._forwarder = Forwarder(
            number + 1, limits.max_ongoing_requests, random.random
        )
        self._table = RoutingTable()
        self._routers: dict[str, Outbox] = {}
        self._upstream: dict[str, Outbox] = {}
        self._downstream: dict[str, Outbox] = {}
        self._source: dict[Key, Outbox] = {}
        self._owed: dict[Outbox, list[Key]] = {}
        self._paying: asyncio.TimerHandle | None = None
        self._guard = HangGuard(self._end_if_hung)
        self._cancelled: OrderedDict[Key, None] = OrderedDict()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._running: list[Work] = []
        self._running_since = 0.0
        self.counts: Counter[str] = Counter()
        self.computed_s = 0.0
        self._batch_rows = [0] * (len(ROWS_BOUNDS) + 1)
        self._batch_seconds = [0] * (len(SECONDS_BOUNDS) + 1)

    # For the process around it.

    def table_changed(self, table: RoutingTable) -> None:
        """Apply a new routing table."""
        self._table = table
        me = table.replicas.get(self.name)
        if me is not None:
            following = table.stage(me.model, me.version, self._number + 1)
            self._forwarder.table_changed(following)
            self._return(self._forwarder.give_back())
            self._hand([])

    @property
    def is_idle(self) -> bool:
        """True if the replica has no work left."""
        busy = len(self._batcher) + len(self._forwarder) + len(self._running)
        return busy + self._forwarder.handed_count == 0

    @property
    def has_router(self) -> bool:
        """True if a router is connected, so that work may arrive."""
        return bool(self._routers)

    async def wait_sent(self) -> None:
        """Wait until all queued messages were sent.

        Cancellation: Safe.
        """
        outboxes = {*self._routers.values(), *self._upstream.values()}
        for outbox in {*outboxes, *self._downstream.values()}:
            await outbox.wait_sent()

    def report(self) -> WorkerReport:
        """Return the replica's current state, for ``status`` and ``explain``.

        The process adds its CPU time and memory.
        """
        now = self._clock()
        return WorkerReport(
            queued=len(self._batcher),
            computing=len(self._running),
            probing=self._batcher.probes
            + sum(work.via is not None for work in self._running),
            computing_s=now - self._running_since if self._running else 0.0,
            waiting_for_next=len(self._forwarder),
            handed=self._forwarder.handed_count,
            computed_s=self.computed_s,
            counts=dict(self.counts),
            batch_rows=tuple(self._batch_rows),
            batch_seconds=tuple(self._batch_seconds),
            upstream=tuple(sorted(self._upstream)),
            routers=tuple(sorted(self._routers)),
            downstream=tuple(sorted(self._downstream)),
        )

    # Edges.

    def edge_up(self, outbox: Outbox) -> None:
        """Handle a new incarnation of an edge."""
        peer = outbox.edge.peer
        if not outbox.edge.is_upstream:
            self._downstream[peer] = outbox
            self._forwarder.connected(peer)
            self._hand([])
        elif peer in self._table.gateways:
            self._routers[peer] = outbox
        else:
            self._upstream[peer] = outbox

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        """Handle the messages of a frame that has arrived."""
        has_credit = False
        for message, contents in frame:
            match message:
                case protocol.Work():
                    stage = self._runner.stage
                    works = works_of(message, contents, self._clock(), stage)
                    self._take(works, outbox)
                case protocol.Cancel(key):
                    self._cancel(key)
                case protocol.Released(keys):
                    self._forwarder.begun(outbox.edge.peer, keys)
                    has_credit = True
                case protocol.Refused(keys):
                    self._forwarder.refused(outbox.edge.peer, keys, self._clock())
                    self._return(keys)
                    has_credit = True
        if has_credit:
            self._hand([])

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        """Handle the end of an incarnation of an edge."""
        peer = outbox.edge.peer
        if self._downstream.get(peer) is outbox:
            del self._downstream[peer]
            self._drop(self._forwarder.lost(peer))
        elif self._routers.get(peer) is outbox:
            del self._routers[peer]
            # Nobody waits for this work any more: a router that reconnects sends it
            # again.
            self._release(self._batcher.cancel_of(peer))
            self._forwarder.cancel_of(peer)
        else:
            self._upstream.pop(peer, None)

    def _take(self, works: list[Work], source: Outbox) -> None:
        refused: list[Work] = []
        for work in works:
            self._source[work.key] = source
            if work.key in self._cancelled:  # the cancel was faster
                self._release([work])
            elif work.rows > self._limits.max_batch_size:
                self._fail(work.key, self._too_many(work.rows))
                self._release([work])
            elif work.key[0] in self._routers:
                self._batcher.add(work)
            else:
                refused.append(work)
        # Work whose router is not connected here goes back to its sender.
        for source, keys in self._by_source(refused).items():
            source.put(protocol.Refused(tuple(keys)))
        self._arrived.set()

    def _too_many(self, rows: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"a request with {rows} rows does not fit into a batch of at most "
            f"{self._limits.max_batch_size} (max_batch_size of stage {self._number}); "
            "send fewer rows in one request"
        )

    def _cancel(self, key: Key) -> None:
        """Cancel a request here, and at the next stage if it was sent there."""
        self._cancelled[key] = None
        while len(self._cancelled) > MAX_CANCELLED:
            self._cancelled.popitem(last=False)
        work = self._batcher.cancel(key)
        if work is not None:
            self.counts["cancelled"] += 1
            self._release([work])
        self._forwarder.cancel(key)
        holder = self._downstream.get(self._forwarder.holder(key) or "")
        if holder is not None:
            holder.put(protocol.Cancel(key))

    # Computing.

    async def run(self) -> None:
        """Compute batches until cancelled.

        Cancellation: A batch that is being computed goes on in its thread; its outputs
            are dropped.
        """
        while True:
            batch = await self._next_batch()
            is_quick = self._runner.is_quick and not batch[0].is_isolated
            self._start(batch)
            try:
                outcomes: Sequence[Outcome] | None = None
                if is_quick:
                    self._guard.start()
                    outcomes = self._runner.run_here(batch)
                if outcomes is None:
                    await self._announce(batch)
                    outcomes = await self._runner.run(batch)
                    if is_quick and not any(isinstance(o, Exception) for o in outcomes):
                        self._runner.needs_its_thread()
                    is_quick = False
            finally:
                self._running = []
            took_s = self._clock() - self._running_since
            self.computed_s += took_s
            rows = sum(work.rows for work in batch)
            self._batch_rows[bisect_left(ROWS_BOUNDS, rows)] += 1
            self._batch_seconds[bisect_left(SECONDS_BOUNDS, took_s)] += 1
            self._end(batch, outcomes)
            if is_quick:
                # Only now: until then, the senders report it as lost or stuck with us.
                self._release_soon(batch)
                if len(self._batcher):
                    await asyncio.sleep(0)

    async def _next_batch(self) -> list[Work]:
        while True:
            while len(self._forwarder) >= self._limits.max_ongoing_requests:
                self._room.clear()
                await self._room.wait()
            now = self._clock()
            self._release(self._batcher.expired(now))
            if batch := self._batcher.take(now):
                return batch
            self._arrived.clear()
            due_at = self._batcher.due_at()
            if due_at is None:
                await self._arrived.wait()
                continue
            try:
                async with asyncio.timeout(max(0.0, due_at - now)):
                    await self._arrived.wait()
            except TimeoutError:
                pass

    def _start(self, batch: list[Work]) -> None:
        self._running, self._running_since = batch, self._clock()
        self.counts["batches"] += 1
        self.counts["rows"] += sum(work.rows for work in batch)
        self.counts["requests"] += len(batch)

    async def _announce(self, batch: list[Work]) -> None:
        """Announce a batch to its routers before it is computed.

        If the batch kills this process, they know which requests it had. A batch of a
        quick stage is not announced. If it kills this process, all its work counts as
        queued here; a request that this happens to twice is computed alone, and
        announced.
        """
        is_isolated = batch[0].is_isolated
        by_router = _by_router(work.key for work in batch)
        for router, keys in by_router.items():
            self._tell(router, protocol.Begun(tuple(keys), is_isolated))
        boxes = [self._routers[r] for r in by_router if r in self._routers]
        for box in boxes:
            box.flush()
        untold = [box.wait_sent() for box in boxes if not box.is_idle]
        if untold:
            try:
                async with asyncio.timeout(TELL_S):
                    await asyncio.gather(*untold)
            except TimeoutError:
                pass  # compute anyway if a router does not read
        self._release(batch)

    def _release(self, works: list[Work]) -> None:
        """Return the credit of this work to its senders."""
        for source, keys in self._by_source(works).items():
            source.put(protocol.Released(tuple(keys)))

    def _release_soon(self, works: list[Work]) -> None:
        """Return the credit of computed work, with that of other work."""
        for source, keys in self._by_source(works).items():
            self._owed.setdefault(source, []).extend(keys)
        if not self._owed:
            return
        most = max(map(len, self._owed.values()))
        if RELEASE_SHARE * most >= self._limits.max_ongoing_requests:
            self._pay()
        elif self._paying is None:
            loop = asyncio.get_running_loop()
            self._paying = loop.call_later(RELEASE_S, self._pay)

    def _pay(self) -> None:
        if self._paying is not None:
            self._paying.cancel()
            self._paying = None
        owed, self._owed = self._owed, {}
        for source, keys in owed.items():
            if self._upstream.get(source.edge.peer) is source:
                source.put(protocol.Released(tuple(keys)))

    def _by_source(self, works: list[Work]) -> dict[Outbox, list[Key]]:
        """Remove the senders of this work; return its keys by sender.

        Routers are omitted: they give no credit and get notes instead.
        """
        found: dict[Outbox, list[Key]] = {}
        for work in works:
            source = self._source.pop(work.key, None)
            if source is not None and source.edge.peer in self._upstream:
                found.setdefault(source, []).append(work.key)
        return found

    def _end(self, batch: list[Work], outcomes: Sequence[Outcome]) -> None:
        now = self._clock()
        finished: list[FinishedWork] = []
        for work, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, ServeError):
                self._fail(work.key, outcome)
            elif work.key[0] in self._routers and work.key not in self._cancelled:
                finished.append(
                    FinishedWork(
                        work.key,
                        work.deadline_at,
                        work.is_isolated,
                        work.session,
                        work.via,
                        outcome,
                        work.share,
                        work.rows,
                    )
                )
        if self._is_last:
            self._answer(finished)
        else:
            self._hand(finished, now)

    def _answer(self, finished: list[FinishedWork]) -> None:
        by_router: dict[str, list[FinishedWork]] = {}
        for piece in finished:
            by_router.setdefault(piece.key[0], []).append(piece)
        for router, pieces in by_router.items():
            items = tuple(AnswerItem((p.key[1], p.key[2])) for p in pieces)
            outbox = self._routers[router]
            outbox.put(protocol.Answers(items), [piece.content for piece in pieces])
            outbox.flush()

    def _hand(self, finished: list[FinishedWork], now: float | None = None) -> None:
        if self._is_last:
            return
        now = self._clock() if now is None else now
        for name, pieces in self._forwarder.hand(finished, now).items():
            items = tuple(
                WorkItem(
                    piece.key,
                    piece.deadline_at - now,
                    piece.is_isolated,
                    piece.session,
                    piece.via,
                    piece.share,
                )
                for piece in pieces
            )
            outbox = self._downstream[name]
            outbox.put(protocol.Work(items), [piece.content for piece in pieces])
            outbox.flush()
        if len(self._forwarder) < self._limits.max_ongoing_requests:
            self._room.set()

    # Notes to the routers.

    def _fail(self, key: Key, error: ServeError) -> None:
        self.counts["failed"] += 1
        failed = protocol.Failed((key[1], key[2]), RemoteError.of(error))
        self._tell(key[0], failed)

    def _drop(self, keys: Iterable[Key]) -> None:
        self._tell_of(keys, "dropped", protocol.Dropped)

    def _return(self, keys: Iterable[Key]) -> None:
        self._tell_of(keys, "returned", protocol.Returned)

    def _tell_of(
        self,
        keys: Iterable[Key],
        what: str,
        kind: type[protocol.Dropped | protocol.Returned | protocol.Stuck],
    ) -> None:
        """Count attempts, and report to their routers what the next stage did."""
        for router, attempts in _by_router(keys).items():
            self.counts[what] += len(attempts)
            self._tell(router, kind(tuple(attempts), self._number + 1))

    def _tell(self, router: str, note: protocol.Note) -> None:
        outbox = self._routers.get(router)
        if outbox is not None:
            outbox.put(note)

    async def look(self) -> None:
        """Check deadlines, silent replicas and a hung model until cancelled.

        Exits the process if the model hangs.

        Cancellation: Safe.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            self._end_if_hung()
            now = self._clock()
            self._release(self._batcher.expired(now))
            for name, outbox in list(self._downstream.items()):
                is_silent = outbox.silent_s() > SILENT_S
                stuck = self._forwarder.silent(name, is_silent=is_silent)
                self._tell_of(stuck, "stuck", protocol.Stuck)
            self._return(self._forwarder.give_back())
            self._hand([])

    def _end_if_hung(self) -> None:
        """Exit the process if the running batch is taken to hang.

        The loop calls this, and the guard's thread, in case the loop itself computes.
        """
        running, now = self._running, self._clock()
        if running and self._is_hung(running, now):
            self._end_process(now)

    def _is_hung(self, running: list[Work], now: float) -> bool:
        running_s = now - self._running_since
        if self._limits.compute_s is not None:
            return running_s > self._limits.compute_s
        last = max(work.deadline_at for work in running)
        return running_s > HUNG_S and now - last > OVERDUE_S

    def _end_process(self, now: float) -> None:
        """Exit at once, because a computing thread cannot be stopped otherwise.

        The routers see a lost replica, and know which requests it was computing.
        """
        logger.error(
            "the model of stage %d hangs: it has computed %d request(s) for %.1f s; "
            "this replica exits; stack traces of its threads follow",
            self._number,
            len(self._running),
            now - self._running_since,
        )
        faulthandler.dump_traceback(sys.stderr)
        os._exit(EXIT_HUNG)


def _by_router(keys: Iterable[Key]) -> dict[str, list[Attempt]]:
    found: dict[str, list[Attempt]] = {}
    for router, number, attempt in keys:
        found.setdefault(router, []).append((number, attempt))
    return found
