"""Replanner, which runs the solvers in a thread after every change."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multiworld.serve.controller.placement.problem_builder import (
    PlacedReplica,
    ReplicaRequest,
    plan_of,
    problem_of,
)
from multiworld.serve.controller.placement.solver.problem import Placement
from multiworld.serve.machines.amounts import Node
from multiworld.serve.machines.assignment import Plan

logger = logging.getLogger("multiworld.serve")

# Maximum seconds of the solvers; meanwhile, replicas are placed one by one.
LIMIT_S = 2.0
DEBOUNCE_S = 0.2  # seconds to wait for further changes before planning


@dataclass(frozen=True, slots=True)
class PlacementSnapshot:
    nodes: Sequence[Node]
    asks: Sequence[ReplicaRequest]
    running: Sequence[PlacedReplica]


@dataclass(frozen=True, slots=True)
class PlanReady:
    snapshot: PlacementSnapshot
    placement: Placement
    plan: Plan


def facts_of(planned: PlanReady) -> dict[str, Any]:
    """Return the numbers that explain a plan, as plain data."""
    placement = planned.placement
    bound = placement.bound
    return {
        "solver": placement.solver,
        "value": placement.value,
        "bound": bound if math.isfinite(bound) else None,
        "unplaced": dict(placement.unplaced),
        "replicas": [
            {"model": r.model, "stage": r.stage, "device": r.device}
            for r in placement.replicas
        ],
    }


def snapshot_of(planned: PlanReady) -> dict[str, Any]:
    """Return the snapshot behind a plan, as plain data."""
    snapshot = planned.snapshot
    return {
        "nodes": [asdict(node) for node in snapshot.nodes],
        "models": {
            ask.name: {
                "version": ask.spec.version,
                "counts": [list(counts) for counts in ask.counts],
                "demand": ask.spec.demand,
                "weight": ask.spec.weight,
            }
            for ask in snapshot.asks
        },
        "running": [asdict(run) for run in snapshot.running],
    }


class Replanner:
    """Plans in the background when woken; calls ``on_plan`` with every plan."""

    def __init__(
        self,
        take_snapshot: Callable[[], PlacementSnapshot],
        on_plan: Callable[[PlanReady], None],
    ) -> None:
        self._take_snapshot, self._on_plan = take_snapshot, on_plan
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        self._woken.set()

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            await asyncio.sleep(DEBOUNCE_S)
            self._woken.clear()
            try:
                planned = await self.plan(self._take_snapshot())
            except Exception:  # a service can run without a plan
                logger.exception(
                    "planning the placement failed; replicas are placed one by one"
                )
                continue
            if planned is not None and not self._woken.is_set():
                self._on_plan(planned)

    async def plan(self, snapshot: PlacementSnapshot) -> PlanReady | None:
        """Return a plan made now, or None if there is only one machine."""
        if len(snapshot.nodes) < 2:
            return None
        return await asyncio.to_thread(_plan, snapshot)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _plan(snapshot: PlacementSnapshot) -> PlanReady:
    from multiworld.serve.controller.placement.solver import place

    problem = problem_of(snapshot.nodes, snapshot.asks, snapshot.running)
    placement = place(problem, LIMIT_S)
    versions = {ask.name: ask.spec.version for ask in snapshot.asks}
    return PlanReady(snapshot, placement, plan_of(placement, versions))
