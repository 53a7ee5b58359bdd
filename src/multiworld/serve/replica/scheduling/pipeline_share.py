"""The share of a pipeline that one scheduler may use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from multiworld.serve.replica.scheduling.scheduler import Scheduler
from multiworld.serve.wire.routing_table import ReplicaState, RoutingTable


def steps_for(replicas: Sequence[int]) -> int:
    """Return how many steps of one stage 0 replica keep all replicas busy."""
    first = max(1, replicas[0])
    return sum(max(1, math.ceil(count / first)) for count in replicas)


def withheld_for(replicas: Sequence[int], blocks: int) -> int:
    """Return how many blocks one stage 0 replica leaves to others of its stage."""
    # All stage 0 replicas share the memory of a later stage with fewer replicas.
    share = min(1.0, max(1, min(replicas)) / max(1, replicas[0]))
    return blocks - max(1, int(blocks * share))


def adapt(scheduler: Scheduler, replicas: Sequence[int]) -> None:
    scheduler.steps.max_steps = steps_for(replicas)
    scheduler.pool.withheld = withheld_for(replicas, scheduler.limits.blocks)


def adapt_to(scheduler: Scheduler, table: RoutingTable, replica: str) -> None:
    """Adapt a stage 0 scheduler to a routing table."""
    me = table.replicas.get(replica)
    route = None if me is None else table.routes.get(me.model)
    if me is None or route is None:
        return
    stages = range(route.stages.get(me.version, 1))
    # Count ready replicas only: starting ones compute nothing yet, and draining ones
    # hand over their sequences.
    ready = [
        sum(
            r.state is ReplicaState.READY or r is me
            for r in table.stage(me.model, me.version, stage)
        )
        for stage in stages
    ]
    adapt(scheduler, ready)
