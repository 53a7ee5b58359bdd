"""Worker of one replica: receives work, computes it, and forwards it or answers. The
worker announces batches, so that gateways know which work a lost replica was computing.
A quick stage computes on the event loop, without announcements."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from multiworld.errors import InvalidRequestError, ServeError
from multiworld.liveness.pause_detector import PauseDetector
from multiworld.serve.deadlines import SILENT_S
from multiworld.serve.replica.batches.batch import Batch, BatchCounts
from multiworld.serve.replica.batches.batch_queue import BatchQueue, Work
from multiworld.serve.replica.batches.credit_returns import CreditReturns
from multiworld.serve.replica.batches.executor import Executor, Outcome
from multiworld.serve.replica.batches.forwarder import Forwarder
from multiworld.serve.replica.hang_guard import HangGuard, exit_hung
from multiworld.serve.spec.stage import Stage, Tensors
from multiworld.serve.tracing.stage_trace import StageTrace
from multiworld.serve.wire import control_messages as messages
from multiworld.serve.wire import inference_messages
from multiworld.serve.wire.collation import group_of, rows_of
from multiworld.serve.wire.edges import Outbox
from multiworld.serve.wire.frames import Entry
from multiworld.serve.wire.inference_messages import (
    AnswerItem,
    Attempt,
    Spent,
    WorkItem,
)
from multiworld.serve.wire.protocol import Key, RemoteError
from multiworld.serve.wire.routing_table import RoutingTable

logger = logging.getLogger("multiworld.serve")

# If the previous batch began at least this many seconds ago, arriving work is computed
# at once. Otherwise it waits for one iteration of the event loop, so that more work can
# join its batch.
CALM_S = 0.001

LOOK_S = 0.1  # seconds between checks of deadlines and of silent replicas
# Maximum number of cancelled requests to remember, because their work may still arrive.
MAX_CANCELLED = 4096
# Maximum seconds to announce a batch, because a stopped gateway does not read.
TELL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    max_batch_size: int = 16  # maximum number of rows in a batch
    # Maximum seconds that work waits for more work to share its batch.
    max_wait_s: float = 0.0
    # Credit: maximum number of requests that were sent to a replica of the next stage
    # and that it has not begun.
    max_ongoing_requests: int = 32
    own_ongoing_requests: int = 32  # the same, of this stage: the credit of senders
    # Maximum seconds of a call of the model; None: see ``OVERDUE_S``.
    compute_s: float | None = None


class Worker:
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
        self._gateways: dict[str, Outbox] = {}
        self._upstream: dict[str, Outbox] = {}
        self._downstream: dict[str, Outbox] = {}
        self._credit = CreditReturns(self._upstream, limits.own_ongoing_requests)
        self._guard = HangGuard(self._end_if_hung)
        self._pauses = PauseDetector(LOOK_S)
        self._cancelled: OrderedDict[Key, None] = OrderedDict()
        # By gateway: its work in the latest announced batch.
        self._announced: dict[str, list[Attempt]] = {}
        self._gave_up: set[str] = set()  # gateways that cancelled some of that work
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._is_waiting = False
        self._is_busy = asyncio.Event()
        # A batch that was taken from the queue and is left for ``run`` to compute.
        self._left: Batch | None = None
        self._running: Batch | None = None
        self._began_at = 0.0  # monotonic time at which the latest batch began
        self._counted = BatchCounts()
        self.counts = self._counted.events
        self.trace: StageTrace | None = None  # None: nothing is traced

    # Interface to the process.

    def table_changed(self, table: RoutingTable) -> None:
        self._table = table
        me = table.replicas.get(self.name)
        if me is not None:
            following = table.stage(me.model, me.version, self._number + 1)
            self._forwarder.table_changed(following)
            self._return(self._forwarder.return_waiting())
            self._hand([])

    @property
    def is_idle(self) -> bool:
        busy = len(self._batcher) + len(self._forwarder) + self._forwarder.handed_count
        return not busy and self._running is self._left is None

    @property
    def has_gateway(self) -> bool:
        return bool(self._gateways)

    async def wait_sent(self) -> None:
        outboxes = {*self._gateways.values(), *self._upstream.values()}
        for outbox in {*outboxes, *self._downstream.values()}:
            await outbox.wait_sent()

    def report(self) -> messages.WorkerReport:
        """Return the replica's state; the process adds its CPU time and memory."""
        batch = self._running
        works = [] if batch is None else batch.works
        return messages.WorkerReport(
            queued=len(self._batcher),
            computing=len(works),
            probing=self._batcher.probes + sum(work.via is not None for work in works),
            computing_s=0.0 if batch is None else self._clock() - batch.began_at,
            waiting_for_next=len(self._forwarder),
            handed=self._forwarder.handed_count,
            computed_s=self._counted.computed_s,
            counts=dict(self.counts),
            batch_rows=tuple(self._counted.rows),
            batch_seconds=tuple(self._counted.seconds),
            upstream=tuple(sorted(self._upstream)),
            gateways=tuple(sorted(self._gateways)),
            downstream=tuple(sorted(self._downstream)),
        )

    # Edges.

    def edge_up(self, outbox: Outbox) -> None:
        peer = outbox.edge.peer
        if not outbox.edge.is_upstream:
            self._downstream[peer] = outbox
            self._forwarder.connected(peer)
            self._hand([])
        elif peer in self._table.gateways:
            self._gateways[peer] = outbox
        else:
            self._upstream[peer] = outbox

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        has_credit = False
        for message, contents in frame:
            match message:
                case inference_messages.Work():
                    stage, now = self._runner.stage, self._clock()
                    items = zip(message.items, contents, strict=True)
                    works = [_work_of(*each, now, stage) for each in items]
                    self._take(works, outbox)
                case inference_messages.Cancel(key):
                    self._cancel(key)
                case inference_messages.CreditReleased(keys):
                    self._forwarder.begun(outbox.edge.peer, keys)
                    has_credit = True
                case inference_messages.CreditRefused(keys):
                    self._forwarder.refused(outbox.edge.peer, keys, self._clock())
                    self._return(keys)
                    has_credit = True
        if has_credit:
            self._hand([])

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        peer = outbox.edge.peer
        if self._downstream.get(peer) is outbox:
            del self._downstream[peer]
            if is_polite:
                self._return(self._forwarder.left(peer))
            else:
                lost = self._forwarder.lost(peer)
                self._report_outcome(lost, "dropped", inference_messages.WorkDropped)
        elif self._gateways.get(peer) is outbox:
            del self._gateways[peer]
            self._announced.pop(peer, None)
            self._gave_up.discard(peer)
            # Cancel the gateway's work here. Senders of earlier stages return it, so
            # that the gateway sends it again.
            self._credit.refuse(self._batcher.cancel_of(peer))
            self._forwarder.cancel_of(peer)
        else:
            self._upstream.pop(peer, None)

    def _take(self, works: list[Work], source: Outbox) -> None:
        refused: list[Work] = []
        for work in works:
            self._credit.took(work.key, source)
            if work.key in self._cancelled:  # the cancellation arrived before the work
                self._credit.release([work])
            elif work.key[0] not in self._gateways:
                refused.append(work)
            elif work.rows > self._limits.max_batch_size:
                self._fail(work.key, self._too_many(work.rows))
                self._credit.release([work])
            else:
                self._batcher.add(work)
                if work.via is not None:
                    self._room.set()
        # Return work to its sender if this replica is not connected to its gateway.
        self._credit.refuse(refused)
        if len(self._batcher):
            self._is_busy.set()
            self._compute_at_once()

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
            self._credit.release([work])
        elif key[1:] in self._announced.get(key[0], ()):
            self._gave_up.add(key[0])
            if self._running is self._left is None:
                self._end_load()
        self._forwarder.cancel(key)
        holder = self._downstream.get(self._forwarder.holder(key) or "")
        if holder is not None:
            holder.put(inference_messages.Cancel(key))

    def _end_load(self) -> None:
        """Notify gateways that the work they cancelled is no longer computed."""
        # Otherwise the gateways would count it as load until the next announcement.
        for gateway in self._gave_up:
            self._notify(gateway, inference_messages.BatchBegun((), False))
        self._gave_up.clear()

    # Computing.

    async def run(self) -> None:
        """Compute batches until cancelled, which drops the running batch's outputs."""
        while True:
            batch = await self._next_batch()
            if not self._is_quick(batch) or not self._compute_here(batch):
                await self._compute(batch)
            elif len(self._batcher):
                await asyncio.sleep(0)

    def _compute_at_once(self) -> None:
        """Compute waiting work without waking ``run``, if the stage is quick."""
        is_free = self._is_waiting and self._left is None and self._has_room
        is_calm = self._clock() - self._began_at >= CALM_S
        can_begin = is_free and is_calm and self._runner.is_quick
        if can_begin and (works := self._batcher.take(self._clock())):
            batch = Batch(works)
            if not (self._is_quick(batch) and self._compute_here(batch)):
                self._left = batch
            elif not len(self._batcher):
                return
        self._arrived.set()

    def _is_quick(self, batch: Batch) -> bool:
        return self._runner.is_quick and not batch.is_isolated and not batch.has_failed

    def _compute_here(self, batch: Batch) -> bool:
        """Compute a batch on the event loop; return False if it must be repeated."""
        self._guard.start()
        self._enter(batch)
        try:
            outcomes = self._runner.run_here(batch.works)
        finally:
            self._running = None
        if outcomes is None:
            batch.has_failed = True
            return False
        self._end(batch, outcomes)
        # Return the credit only now, because this batch was not announced: until a
        # sender has the credit back, it reports the work if this replica is lost or
        # stuck.
        self._credit.release_soon(batch.works)
        return True

    def _enter(self, batch: Batch) -> None:
        self._began_at = self._clock()
        batch.begin(self._began_at, self._runner.calls)
        self._running = batch  # set last, because the guard's thread reads it

    async def _compute(self, batch: Batch) -> None:
        """Announce a batch, and compute it in the stage's thread."""
        self._enter(batch)
        try:
            await self._announce(batch)
            outcomes = await self._runner.run(batch.works)
        finally:
            self._running = None
        if batch.has_failed and not any(isinstance(o, Exception) for o in outcomes):
            self._runner.needs_its_thread()
        self._end(batch, outcomes)
        self._end_load()

    @property
    def _has_room(self) -> bool:
        return len(self._forwarder) < self._limits.max_ongoing_requests

    async def _next_batch(self) -> Batch:
        while True:
            if (left := self._left) is not None:
                self._left = None
                return left
            while not self._has_room:
                # Probes skip the queue: the outputs may be waiting for the replica that
                # a probe makes ready.
                if probe := self._batcher.take_probe():
                    return Batch(probe)
                self._room.clear()
                await self._room.wait()
            now = self._clock()
            self._credit.release(self._batcher.expired(now))
            if works := self._batcher.take(now):
                return Batch(works)
            self._arrived.clear()
            due_at = self._batcher.due_at()
            self._is_waiting = True
            try:
                if due_at is None:
                    await self._arrived.wait()
                else:
                    async with asyncio.timeout(max(0.0, due_at - now)):
                        await self._arrived.wait()
            except TimeoutError:
                pass
            finally:
                self._is_waiting = False

    async def _announce(self, batch: Batch) -> None:
        """Announce a batch to its gateways, in case it kills this process."""
        # A batch that a quick stage computes at once is not announced. If it kills the
        # stage, all its work counts as queued; after a second such loss, a request runs
        # in isolation, and is announced.
        is_isolated = batch.is_isolated
        by_gateway = _by_gateway(work.key for work in batch.works)
        self._announced |= by_gateway
        for gateway, keys in by_gateway.items():
            self._notify(
                gateway, inference_messages.BatchBegun(tuple(keys), is_isolated)
            )
        boxes = [self._gateways[r] for r in by_gateway if r in self._gateways]
        for box in boxes:
            box.flush()
        untold = [box.wait_sent() for box in boxes if not box.is_idle]
        if untold:
            try:
                async with asyncio.timeout(TELL_S):
                    await asyncio.gather(*untold)
            except TimeoutError:
                pass  # compute the batch even if a gateway does not read
        self._credit.release(batch.works)

    def _end(self, batch: Batch, outcomes: Sequence[Outcome]) -> None:
        began_at, now = batch.began_at, self._clock()
        self._counted.add(batch, now - began_at)
        finished: list[Work] = []
        failed = {
            work.share
            for work, outcome in zip(batch.works, outcomes, strict=True)
            if isinstance(outcome, ServeError)
        }
        if failed and len(batch.works) > 1:
            calls = self._runner.calls - batch.calls_before
            self._batcher.failed(failed, now, calls)
        if self.trace is not None:
            self._export(batch, outcomes, now)
        for work, outcome in zip(batch.works, outcomes, strict=True):
            if isinstance(outcome, ServeError):
                self._fail(work.key, outcome)
            elif work.key[0] in self._gateways and work.key not in self._cancelled:
                spent = Spent(
                    work.spent.queued_s + began_at - work.arrived_at,
                    work.spent.computed_s + now - began_at,
                )
                finished.append(
                    structs.replace(work, content=outcome, spent=spent, arrived_at=now)
                )
        if self._is_last:
            self._answer(finished)
        else:
            self._hand(finished, now)

    def _export(self, batch: Batch, outcomes: Sequence[Outcome], now: float) -> None:
        assert self.trace is not None
        for work, outcome in zip(batch.works, outcomes, strict=True):
            error = type(outcome).__name__ if isinstance(outcome, Exception) else ""
            times = work.arrived_at, batch.began_at, now
            self.trace.computed(work.origin, work.key[2], times, batch.rows, error)

    def _answer(self, finished: list[Work]) -> None:
        by_gateway: dict[str, list[Work]] = {}
        for piece in finished:
            by_gateway.setdefault(piece.key[0], []).append(piece)
        for gateway, pieces in by_gateway.items():
            items = tuple(
                AnswerItem((p.key[1], p.key[2]), spent=p.spent) for p in pieces
            )
            outbox = self._gateways[gateway]
            outbox.put_now(
                inference_messages.Answers(items), [piece.content for piece in pieces]
            )

    def _hand(self, finished: list[Work], now: float | None = None) -> None:
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
                    Spent(
                        piece.spent.queued_s + now - piece.arrived_at,
                        piece.spent.computed_s,
                    ),
                    piece.origin,
                )
                for piece in pieces
            )
            outbox = self._downstream[name]
            outbox.put_now(
                inference_messages.Work(items), [piece.content for piece in pieces]
            )
        if self._has_room:
            self._room.set()

    # Messages to the gateways.

    def _fail(self, key: Key, error: ServeError) -> None:
        self.counts["failed"] += 1
        failed = inference_messages.WorkFailed((key[1], key[2]), RemoteError.of(error))
        self._notify(key[0], failed)

    def _return(self, keys: Iterable[Key]) -> None:
        self._report_outcome(keys, "returned", inference_messages.WorkReturned)

    def _report_outcome(
        self,
        keys: Iterable[Key],
        what: str,
        kind: type[
            inference_messages.WorkDropped
            | inference_messages.WorkReturned
            | inference_messages.WorkStuck
        ],
    ) -> None:
        """Count attempts, and report their outcome at the next stage to gateways."""
        for gateway, attempts in _by_gateway(keys).items():
            self.counts[what] += len(attempts)
            self._notify(gateway, kind(tuple(attempts), self._number + 1))

    def _notify(self, gateway: str, note: inference_messages.Note) -> None:
        outbox = self._gateways.get(gateway)
        if outbox is not None:
            outbox.put(note)

    async def look(self) -> None:
        """Check deadlines, silent replicas and a hung model until cancelled."""
        while True:
            if self.is_idle:  # an idle replica need not wake up periodically
                self._is_busy.clear()
                await self._is_busy.wait()
                self._pauses.rest()
            await asyncio.sleep(LOOK_S)
            now = self._clock()
            self._pauses.look(now)
            self._end_if_hung(self._pauses.resumed_at)
            self._credit.release(self._batcher.expired(now))
            for name, outbox in list(self._downstream.items()):
                is_silent = outbox.silent_s() > SILENT_S
                stuck = self._forwarder.silent(name, is_silent=is_silent)
                self._report_outcome(stuck, "stuck", inference_messages.WorkStuck)
            self._return(self._forwarder.return_waiting())
            self._hand([])

    def _end_if_hung(self, resumed_at: float) -> None:
        """Exit the process if the running batch counts as hung."""
        # The guard's thread calls this, too, in case the event loop's thread itself
        # computes.
        batch, now = self._running, self._clock()
        if batch is None:
            return
        # Ignore the deadlines of requests whose clients are gone: a client may set a
        # deadline of a day, and then disconnect.
        deadlines = [
            work.deadline_at
            for work in batch.works
            if work.key not in self._cancelled and work.key[0] in self._gateways
        ]
        calls, limit_s = self._runner.calls, self._limits.compute_s
        if batch.is_hung(now, resumed_at, calls, limit_s, deadlines):
            self._end_process(batch, now)

    def _end_process(self, batch: Batch, now: float) -> None:
        """Exit at once: a computing thread cannot be stopped otherwise."""
        logger.error(
            "the model of stage %d hangs: it has computed %d request(s) for %.1f s "
            "(%s); this replica exits; stack traces of its threads follow",
            self._number,
            len(batch.works),
            now - batch.began_at,
            ", ".join(work.origin.request or "a probe" for work in batch.works),
        )
        exit_hung()


def _work_of(item: WorkItem, tensors: Tensors, now: float, stage: Stage) -> Work:
    return Work(
        key=item.key,
        group=group_of(tensors, stage.ragged) if stage.is_batched else item.key,
        rows=rows_of(tensors),
        deadline_at=now + item.remaining_s,
        arrived_at=now,
        is_isolated=item.is_isolated,
        session=item.session,
        via=item.via,
        content=tensors,
        share=item.share,
        spent=item.spent,
        origin=item.origin,
    )


def _by_gateway(keys: Iterable[Key]) -> dict[str, list[Attempt]]:
    found: dict[str, list[Attempt]] = {}
    for gateway, number, attempt in keys:
        found.setdefault(gateway, []).append((number, attempt))
    return found
