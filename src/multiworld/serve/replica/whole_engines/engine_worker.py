"""Worker of one replica whose model an external engine computes.

``EngineSequences`` makes all decisions; this shell has the edges, the engine and a task
for each run.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from multiworld.errors import MultiWorldError
from multiworld.liveness.pause_detector import PauseDetector
from multiworld.log_format import REQUEST
from multiworld.serve.deadlines import BUSY_S, SILENT_S
from multiworld.serve.engine.compute.sampler import finish_of
from multiworld.serve.engine.external import whole_engine
from multiworld.serve.engine.external.whole_engine import EXIT_LOST
from multiworld.serve.replica.hang_guard import EXIT_HUNG, HangGuard
from multiworld.serve.replica.sequences.actions import Send
from multiworld.serve.replica.sequences.events import (
    Disconnected,
    GatewaysChanged,
    Received,
)
from multiworld.serve.replica.sequences.message_validation import check
from multiworld.serve.replica.sequences.outboxes import Outboxes
from multiworld.serve.replica.sequences.sequence_state import SequenceTable
from multiworld.serve.replica.whole_engines import engine_sequences
from multiworld.serve.spec.stage import StageContext
from multiworld.serve.tracing.stage_trace import StageTrace
from multiworld.serve.wire.control_messages import WorkerReport
from multiworld.serve.wire.edges import Outbox
from multiworld.serve.wire.frames import Entry
from multiworld.serve.wire.origin import ORIGIN
from multiworld.serve.wire.routing_table import RoutingTable

logger = logging.getLogger("multiworld.serve")

# Seconds between checks of the engine: while it computes, and while it does not.
LOOK_S, IDLE_LOOK_S = 0.1, 0.5
# Prefill speed that every engine reaches, in tokens per second: the first token of a
# long prompt is allowed more time than ``compute_s``.
PREFILL = 200.0
# Always empty, because a whole engine receives no rows.
NO_SEQUENCES = SequenceTable(is_last=True)


@dataclass(slots=True)
class _Wait:
    """Wait of a run for its next token."""

    since: float  # monotonic time since which it waits
    prompt_s: float  # additional seconds that its prompt may take


MakeEngine = Callable[[whole_engine.EngineSettings], whole_engine.WholeEngine]


class EngineWorker:
    """A replica with a whole engine; it owns the edges of its process."""

    def __init__(
        self,
        make: MakeEngine,
        settings: whole_engine.EngineSettings,
        clock: Callable[[], float] = time.monotonic,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self.name = settings.replica
        self._engine = make(settings)
        self._hung_s, self._clock = settings.hung_s, clock
        self._exit_process = exit_process
        self.sequences = engine_sequences.EngineSequences(
            settings, self._engine.check, finish_of
        )
        self.counts = self.sequences.counts
        self._outboxes = Outboxes()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waits: dict[int, _Wait] = {}
        self._pauses = PauseDetector(LOOK_S)
        self._heard_at = self._clock()
        self._allowed_until = 0.0  # time before which the engine cannot count as hung
        # Start of the current series of busy reports; ``_busy_at``: its last report.
        self._busy_since: float | None = None
        self._busy_at = 0.0
        self._is_closing = False
        self._guard = HangGuard(self._exit_if_stuck)
        self._computed_s = self._steps = 0.0
        self.trace: StageTrace | None = None  # None: nothing is traced

    # Life cycle of the process.

    async def load(self, context: StageContext) -> None:
        try:
            await self._engine.start()
        except BaseException:
            await self._engine.close()
            raise
        # Call these now, so that an adapter that raises fails before the replica is
        # ready.
        self.report()
        self._engine.stopped_s()
        self._guard.turned()
        self._guard.start()

    def _exit_if_stuck(self, resumed_at: float) -> None:
        """Exit if an adapter blocks the event loop, on which ``tick`` cannot run."""
        stuck_s = self._guard.still_s(resumed_at)
        if stuck_s > self._hung_s:
            self._guard.stop()
            faulthandler.dump_traceback(sys.stderr)
            self._give_up(
                f"the engine has blocked the event loop for {stuck_s:.0f} s", EXIT_HUNG
            )

    def close(self) -> None:
        """Kill the engine, if it still runs."""
        self._guard.stop()
        self._kill()

    async def run(self) -> None:
        """Wait until the engine is lost, and then exit the process."""
        try:
            why = await self._engine.wait_lost()
            self._give_up(f"the engine is lost: {why}", EXIT_LOST)
        finally:
            self._guard.stop()
            self._is_closing = True
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._engine.close()

    async def look(self) -> None:
        try:
            while True:
                if self._tasks:
                    await asyncio.sleep(LOOK_S)
                else:  # wake up seldom
                    await asyncio.sleep(IDLE_LOOK_S)
                    self._pauses.rest()
                self.tick()
        finally:
            self._guard.stop()

    def tick(self) -> None:
        """Exit the process if the engine is stopped, or hangs while sequences run."""
        self._guard.turned()
        now = self._clock()
        is_paused = self._pauses.look(now)
        if not self._tasks:
            self._heard_at, self._allowed_until = now, 0.0
            return
        if is_paused:
            # Tokens that arrived during the pause are still unread, so check no limit
            # now. Extend the limits only by the pause: a busy machine has so many
            # pauses that limits restarted by each of them would never expire.
            self._heard_at += self._pauses.late_s
            self._allowed_until += self._pauses.late_s
            for wait in self._waits.values():
                wait.since += self._pauses.late_s
            return
        since = self._heard_at
        stopped_s = self._engine.stopped_s()
        if stopped_s > SILENT_S:
            text = f"the engine's processes have been stopped for {stopped_s:.1f} s"
            self._give_up(text, EXIT_LOST)
            return
        prompts_s = self._prompts_s
        if now > max(since + self._hung_s + prompts_s, self._allowed_until):
            text = f"the engine sent no token for {now - since:.0f} s: it hangs"
            self._give_up(text, EXIT_HUNG)
        for number, wait in list(self._waits.items()):
            silent_s = now - wait.since
            is_late = now > self._allowed_until + self._hung_s
            if silent_s <= 2 * self._hung_s + prompts_s or not is_late:
                continue
            text = f"a sequence received no token for {silent_s:.0f} s"
            if self._tasks[number].cancelling():
                self._give_up(f"{text}, and cannot be cancelled", EXIT_HUNG)
                return
            self._tasks[number].cancel()
            self._waits[number] = _Wait(now, 0.0)  # gives the task time to be cancelled
            error = whole_engine.BusyError(text)
            self._handle(engine_sequences.RunEnded(number, error))

    @property
    def _prompts_s(self) -> float:
        """Additional seconds that the engine may take for prompts."""
        # Add them up, because an engine may compute them one after the other.
        return sum(wait.prompt_s for wait in self._waits.values())

    def _give_up(self, text: str, code: int) -> None:
        self._kill()
        # Log this last: the service shows the last line of the log as the reason.
        logger.error("%s; this replica exits", text)
        self._exit_process(code)

    def _kill(self) -> None:
        try:
            self._engine.kill()
        except Exception:  # the adapter's code may raise anything
            logger.exception("the engine's kill raised an error")

    def table_changed(self, table: RoutingTable) -> None:
        """Use a new routing table; end the sequences of gateways that are gone."""
        self._outboxes.table_changed(table)
        self._handle(GatewaysChanged({*table.gateways, *self._outboxes}))

    @property
    def has_gateway(self) -> bool:
        return bool(self._outboxes.gateways())

    @property
    def noise(self) -> str:
        """Name of the engine's random source; see ``WholeEngine``."""
        return str(getattr(self._engine, "noise", ""))

    @property
    def is_idle(self) -> bool:
        return not len(self.sequences)

    async def wait_sent(self) -> None:
        await self._outboxes.wait_sent()

    def report(self) -> WorkerReport:
        return WorkerReport(
            queued=self.sequences.waiting,
            computing=self.sequences.running,
            computing_s=self._clock() - self._heard_at if self._tasks else 0.0,
            computed_s=self._computed_s,
            counts=dict(self.counts),
            gateways=self._outboxes.gateways(),
            kv_usage=number_or_zero(self._engine.usage),
            phase=str(self._engine.phase),
        )

    # Edges.

    def edge_up(self, outbox: Outbox) -> None:
        self._outboxes.up(outbox)

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        if self._outboxes.down(outbox):
            self._handle(Disconnected(outbox.edge.peer))

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        peer = outbox.edge.peer
        for message, contents in frame:
            check(message, contents, peer, self.name, 0, NO_SEQUENCES)
            self._handle(Received(peer, message))

    # Decisions.

    def _handle(self, event: engine_sequences.Event) -> None:
        self._act(self.sequences.handle(event))

    def _act(self, actions: Iterable[engine_sequences.Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message, is_urgent):
                    self._outboxes.send(peer, message)
                    if is_urgent:
                        self._outboxes.flush(peer)
                case engine_sequences.Begin(number, run):
                    if not self._tasks:
                        self._heard_at = self._clock()
                    self.counts["rows"] += len(run.tokens)
                    prompt_s = len(run.tokens) / PREFILL
                    self._waits[number] = _Wait(self._clock(), prompt_s)
                    task = asyncio.ensure_future(self._run(number, run))
                    self._tasks[number] = task
                    task.add_done_callback(partial(self._run_over, number))
                case engine_sequences.Abort(number):
                    if number in self._tasks:
                        self._tasks[number].cancel()
                        self._end_wait(number)
                        self._waits[number] = _Wait(self._clock(), 0.0)
                case engine_sequences.GiveUp(text):
                    self._give_up(text, EXIT_LOST)

    def _end_wait(self, number: int) -> None:
        """Forget a run's wait, but keep the time allowed for its prompt."""
        # Keep the current limit, counted from the last token. If each run added to it,
        # runs that begin and are cancelled again and again would extend it forever.
        self._allowed_until = max(
            self._allowed_until, self._heard_at + self._hung_s + self._prompts_s
        )
        del self._waits[number]

    def _run_over(self, number: int, task: asyncio.Task[None]) -> None:
        self._end_wait(number)
        del self._tasks[number]
        if not self._is_closing:  # a closing worker must start no other run
            self._handle(engine_sequences.RunOver(number))

    async def _run(self, number: int, run: whole_engine.Run) -> None:
        """Forward the tokens of a run; a cancel aborts the run."""
        ORIGIN.set(run.origin)
        REQUEST.set(run.origin.request)
        began_at = self._clock()
        try:
            error = await self._generated(number, run)
            self._handle(engine_sequences.RunEnded(number, error))
        finally:
            if self.trace is not None:
                times = began_at, began_at, self._clock()
                self.trace.computed(run.origin, None, times, len(self._tasks))

    async def _generated(self, number: int, run: whole_engine.Run) -> Exception | None:
        """Forward the tokens of a run; return the error if it ends with one."""
        error: Exception | None = None
        try:
            async with aclosing(self._engine.generate(run)) as found:
                async for tokens in found:
                    if tokens:
                        check_types(tokens)
                        self._hear(number, len(tokens))
                        self._handle(engine_sequences.Generated(number, tokens))
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = whole_engine.RunFailedError("the engine cancelled the run")
            error.__cause__ = cancelled
        except whole_engine.EngineLostError as lost:
            error = lost
        except Exception as failed:
            is_usual = isinstance(failed, whole_engine.RunFailedError | MultiWorldError)
            logger.warning(
                "a run of the engine failed: %s: %s",
                type(failed).__name__,
                failed,
                exc_info=None if is_usual else failed,
            )
            error = failed
        if isinstance(error, whole_engine.BusyError):
            now = self._clock()
            if self._busy_since is None or now - self._busy_at > BUSY_S:
                self._busy_since = now
            self._busy_at = now
            # An engine that is busy for too long has failed.
            if now - self._busy_since > BUSY_S:
                error = whole_engine.RunFailedError(str(error))
        return error

    def _hear(self, number: int, tokens: int) -> None:
        """Count tokens and estimate steps: a step yields one token of every run."""
        now = self._clock()
        self._waits[number] = _Wait(now, 0.0)
        self._busy_since = None
        self._computed_s += now - self._heard_at
        self._heard_at, self._allowed_until = now, 0.0
        self._steps += tokens / max(1, len(self._tasks))
        self.counts["rows"] += tokens
        self.counts["steps"] = int(self._steps)


def check_types(tokens: Sequence[whole_engine.EngineToken]) -> None:
    """Raise ``TypeError`` for tokens that cannot be sent, such as numpy integers."""
    for each in tokens:
        ids: list[object] = [each.token]
        scores: list[object] = [] if each.logprob is None else [each.logprob]
        for score, top in (*each.prompt, (0.0, each.top)):
            scores += [score, *(value for _, value in top)]
            ids += [token for token, _ in top]
        odd = [v for v in ids if type(v) is not int]
        odd += [v for v in scores if type(v) not in (int, float)]
        if odd:
            name = type(odd[0]).__name__
            raise TypeError(
                f"the engine returned a {name}; tokens must be int, logprobs float"
            )


def number_or_zero(usage: object) -> float:
    """Return an engine's usage if it is a number from 0 to 1, otherwise 0."""
    is_share = isinstance(usage, int | float) and 0.0 <= usage <= 1.0
    return float(usage) if is_share else 0.0  # type: ignore[arg-type]
