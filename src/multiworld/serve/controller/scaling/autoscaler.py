"""Autoscaler: applies the decisions of each model's policy. Policies decide from
samples, which are built from the reports of all processes. A request to a model that
was scaled to zero causes a decision at once."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multiworld.errors import PlacementError, ServeError, SpecError
from multiworld.net.threads import in_thread
from multiworld.serve.controller.fleet.decision_log import DecisionLog
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.state import (
    DesiredModel,
    DesiredState,
    ProcessPhase,
)
from multiworld.serve.controller.placement.replica_placement import Specs
from multiworld.serve.controller.scaling import limits
from multiworld.serve.controller.scaling.limits import (
    keep_starting,
    largest_that_fits,
    within,
)
from multiworld.serve.controller.scaling.policies import policy_of
from multiworld.serve.controller.scaling.samples import ObservedReplica, SampleWindow
from multiworld.serve.controller.scaling.snapshot import Decision, Snapshot
from multiworld.serve.controller.scaling.snapshot_json import snapshot_to_json
from multiworld.serve.spec.schema import ModelSpec
from multiworld.serve.wire.control_messages import Reports

logger = logging.getLogger("multiworld.serve")

LOOK_S = 0.5  # seconds between checks for new models and for due policies
REPORT_S = 0.5  # seconds to wait for a process's report; then its previous one counts
POLICY_S = 10.0  # maximum seconds for a policy to decide; later decisions are ignored
# Seconds to wait for all policies that decide at once, so that their decisions apply in
# order of weight.
TOGETHER_S = 0.25
START_S = 1.0  # assumed seconds of a replica's start, until one has been measured


class _Model:
    def __init__(self, spec: ModelSpec, name: str) -> None:
        look_back = [
            s.autoscaling_config.look_back_period_s
            for s in spec.stages
            if s.autoscaling_config is not None
        ]
        self.spec = spec
        self.window = SampleWindow(name, len(spec.stages), max(look_back))
        self.interval_s = limits.interval_s(spec)
        self.due_at = 0.0
        self.memory: Any = None
        self.short = ""
        self._deciding: asyncio.Future[Decision] | None = None
        self._policy = policy_of(spec)

    async def decide(self, snapshot: Snapshot) -> Decision:
        """Run the policy in a thread, because it may compute or block for long."""
        if self._deciding is not None and not self._deciding.done():
            raise ServeError("the policy's previous call has not returned")
        self._deciding = asyncio.ensure_future(
            in_thread(functools.partial(self._policy, snapshot))
        )
        self._deciding.add_done_callback(_forget)
        done, _ = await asyncio.wait([self._deciding], timeout=POLICY_S)
        if not done:
            raise ServeError(f"the policy did not decide within {POLICY_S:g} s")
        return self._deciding.result()


def _forget(deciding: asyncio.Future[Decision]) -> None:
    """Retrieve the error of a policy that failed after its time limit."""
    if not deciding.cancelled():
        deciding.exception()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A policy's pending decision about a model, and its input."""

    known: _Model
    wanted: DesiredModel
    snapshot: Snapshot
    deciding: asyncio.Task[Decision]


class Autoscaler:
    def __init__(
        self,
        fleet: Reconciler,
        history: History,
        journal: DecisionLog,
        specs: Specs,
        reports: Callable[[float], Awaitable[Reports]],
        # Raises PlacementError if the desired state does not fit.
        admit: Callable[[DesiredState, str], object],
        want: Callable[[DesiredState], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._fleet, self._history, self._journal = fleet, history, journal
        self._specs, self._reports = specs, reports
        self._admit, self._want = admit, want
        self._models: dict[str, _Model] = {}
        self._unusable: dict[str, ModelSpec] = {}
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Policies that are still deciding, by model.
        self._slow: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def wake(self, model: str) -> None:
        """Decide at once about a model that is scaled to zero and has a request."""
        known = self._models.get(model)
        wanted = self._fleet.desired.models.get(model)
        if known is not None and wanted is not None and 0 in wanted.replicas:
            known.due_at = 0.0
            self._woken.set()

    async def close(self) -> None:
        tasks = [*self._slow.values(), *filter(None, [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._pause_s()):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()
            try:
                await self._look()
            except Exception:  # a bug must not stop autoscaling for good
                logger.exception("autoscaling failed; trying again")
                await asyncio.sleep(START_S)

    def _pause_s(self) -> float:
        due = [m.due_at for name, m in self._models.items() if name not in self._slow]
        return max(0.0, min(min(due, default=math.inf) - self._clock(), LOOK_S))

    async def _look(self) -> None:
        self._sync_models()
        now = self._clock()
        due = [
            name
            for name, model in self._models.items()
            if model.due_at <= now and name not in self._slow
        ]
        if not due:
            return
        for name in due:
            # Set this before the await, during which ``wake`` may make a model due
            # again.
            self._models[name].due_at = now + self._models[name].interval_s
        reports = await self._reports(REPORT_S)
        order = sorted(due, key=lambda n: -self._models[n].spec.weight)
        asked = [a for name in order if (a := self._ask(name, reports)) is not None]
        await self._carry_out_all(asked)

    async def _carry_out_all(self, asked: Sequence[_Asked]) -> None:
        """Carry out decisions in order of weight, and late ones as they arrive."""
        try:
            if asked:
                deciding = [each.deciding for each in asked]
                await asyncio.wait(deciding, timeout=TOGETHER_S)
        except asyncio.CancelledError:
            for each in asked:
                each.deciding.cancel()
            raise
        for each in asked:
            if each.deciding.done():
                await self._carry_out_one(each)
            else:
                name = each.snapshot.model
                task = asyncio.ensure_future(self._carry_out_one(each))
                self._slow[name] = task
                task.add_done_callback(functools.partial(self._slow.pop, name))

    async def _carry_out_one(self, asked: _Asked) -> None:
        name = asked.snapshot.model
        try:
            self._decided(asked, await asked.deciding)
        except Exception as error:  # an error of one policy must not stop other models
            logger.exception("scaling of model %s failed", name)
            text = f"the policy failed: {type(error).__name__}: {error}"
            self._journal.set_reason("scaling", name, text)
            asked.known.due_at = self._clock() + START_S

    def _sync_models(self) -> None:
        specs = {
            name: self._specs[name][wanted.version]
            for name, wanted in self._fleet.desired.models.items()
        }
        for name in self._models.keys() - specs.keys():
            del self._models[name]
        for name in self._unusable.keys() - specs.keys():
            del self._unusable[name]
        for name, spec in specs.items():
            known = self._models.get(name)
            if not limits.is_scaled(spec):
                self._models.pop(name, None)
            elif (known is None or known.spec != spec) and (
                self._unusable.get(name) is not spec
            ):
                try:
                    self._models[name] = _Model(spec, name)
                except SpecError as error:
                    # The policy's code was removed after the start.
                    self._models.pop(name, None)
                    # Do not try this spec again, because the import may be slow.
                    self._unusable[name] = spec
                    self._journal.set_reason("scaling", name, f"not scaled: {error}")

    def _ask(self, name: str, reports: Reports) -> _Asked | None:
        known, now = self._models[name], self._clock()
        wanted = self._fleet.desired.models.get(name)
        if wanted is None or self._fleet.active.get(name) != wanted.version:
            return None  # do not scale during a rolling update
        replicas = self._replicas(name, wanted.version)
        gateways = [p.name for p in self._fleet.processes.values() if p.is_gateway]
        known.window.note(now, gateways, replicas, reports)
        snapshot = Snapshot(
            model=name,
            now=now,
            stages=limits.stages_now(known.spec, wanted.replicas),
            samples=tuple(known.window.samples),
            objective_s=wanted.objective_s,
            objective_share=known.spec.objective_share,
            deadline_s=wanted.deadline_s,
            start_s=self._start_s(name, wanted.version),
            interval_s=known.interval_s,
            text=limits.text_of(known.spec),
            memory=known.memory,
        )
        deciding = asyncio.ensure_future(known.decide(snapshot))
        return _Asked(known, wanted, snapshot, deciding)

    def _decided(self, asked: _Asked, decision: Decision) -> None:
        known, wanted, snapshot = asked.known, asked.wanted, asked.snapshot
        name = snapshot.model
        decision = within(decision, snapshot.stages)
        is_same = self._fleet.desired.models.get(name) is wanted
        if not is_same or self._fleet.active.get(name) != wanted.version:
            return  # the model has been scaled, updated or removed meanwhile
        decision = self._hold_starting(name, wanted, decision)
        known.memory = decision.memory
        self._journal.set_reason("scaling", name, decision.why)
        if tuple(decision.replicas) != wanted.replicas:
            self._carry_out(known, snapshot, decision)

    def _replicas(self, name: str, version: str) -> list[ObservedReplica]:
        return [
            ObservedReplica(p.name, p.stage, p.phase is ProcessPhase.READY)
            for p in self._fleet.processes.values()
            if (p.model, p.version) == (name, version)
            and p.phase is not ProcessPhase.SPARE
        ]

    def _hold_starting(
        self, name: str, wanted: DesiredModel, decision: Decision
    ) -> Decision:
        starting, there = [0] * len(wanted.replicas), [0] * len(wanted.replicas)
        for process in self._fleet.processes.values():
            if (process.model, process.version) != (name, wanted.version):
                continue
            if process.phase is ProcessPhase.SPARE:
                continue
            there[process.stage] += not process.is_going
            starting[process.stage] += process.is_starting
        kept = keep_starting(decision.replicas, wanted.replicas, starting, there)
        if kept == tuple(decision.replicas):
            return decision
        why = f"{decision.why}; replicas that are starting are not drained"
        return replace(decision, replicas=kept, why=why)

    def _start_s(self, name: str, version: str) -> float:
        took = [
            seconds
            for post, seconds in self._fleet.start_s.items()
            if post[:2] == (name, version)
        ]
        return statistics.median(took) if took else START_S

    def _carry_out(self, known: _Model, snapshot: Snapshot, decision: Decision) -> None:
        name = snapshot.model
        before = [stage.replicas for stage in snapshot.stages]
        wanted, short = self._admitted(name, before, decision.replicas)
        after = list(wanted.models[name].replicas)
        if short and short != known.short:
            self._history.say("unplaced", f"{name}: not all replicas fit: {short}")
        known.short = short
        if after == before:
            self._journal.set_reason(
                "scaling", name, f"{decision.why}; no room: {short}"
            )
            return
        why = decision.why
        if short:
            why = f"{before} → {after}, limited by the machines ({short}); {why}"
        self._history.say("scaled", f"{name}: {why}")
        self._want(wanted)
        facts = {"before": before, "after": after, "short": short, **decision.facts}
        inputs = functools.partial(snapshot_to_json, snapshot)
        self._journal.record("scaling", name, why, facts, inputs)

    def _admitted(
        self, name: str, before: Sequence[int], after: Sequence[int]
    ) -> tuple[DesiredState, str]:
        """Return the part of a decision that fits, and why the rest does not."""
        wanted = self._with(name, after)
        try:
            self._admit(wanted, name)
        except PlacementError as error:
            short = str(error)
        else:
            return wanted, ""

        def fits(counts: Sequence[int]) -> bool:
            try:
                self._admit(self._with(name, counts), name)
            except PlacementError:
                return False
            return True

        return self._with(name, largest_that_fits(before, after, fits)), short

    def _with(self, name: str, replicas: Sequence[int]) -> DesiredState:
        wanted = self._fleet.desired
        model = replace(wanted.models[name], replicas=tuple(replicas))
        return replace(wanted, models={**wanted.models, name: model})
