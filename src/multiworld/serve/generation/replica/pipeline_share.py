"""The share of a pipeline that one scheduler may use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from multiworld.serve.generation.replica.scheduler import Scheduler
from multiworld.serve.transport.routing_table import ReplicaState, RoutingTable


def steps_for(replicas: Sequence[int]) -> int:
    """Return how many steps of one replica of stage 0 keep all replicas busy.

    Args:
        replicas: Replicas of each stage; 0 counts as 1.
    """
    first = max(1, replicas[0])
    return sum(max(1, math.ceil(count / first)) for count in replicas)


def withheld_for(replicas: Sequence[int], blocks: int) -> int:
    """Return how many blocks one replica of stage 0 leaves to others of its stage.

    Several of them share the memory of later stages that have fewer replicas.

    Args:
        replicas: Replicas of each stage; 0 counts as 1.
        blocks: Blocks of each replica.
    """
    share = min(1.0, max(1, min(replicas)) / max(1, replicas[0]))
    return blocks - max(1, int(blocks * share))


def adapt(scheduler: Scheduler, replicas: Sequence[int]) -> None:
    """Adapt the scheduler of a replica of stage 0 to a fleet.

    Args:
        scheduler: The scheduler.
        replicas: Replicas of each stage.
    """
    scheduler.steps = steps_for(replicas)
    scheduler.withheld = withheld_for(replicas, scheduler.limits.blocks)


def adapt_to(scheduler: Scheduler, table: RoutingTable, replica: str) -> None:
    """Adapt the scheduler of a replica of stage 0 to a routing table.

    Only replicas that are ready count: one that starts computes nothing yet, and one
    that drains leaves its sequences to the others.

    Args:
        scheduler: The scheduler.
        table: The routing table.
        replica: Name of the replica; nothing changes while the table has it not.
    """
    me = table.replicas.get(replica)
    route = None if me is None else table.routes.get(me.model)
    if me is None or route is None:
        return
    stages = range(route.stages.get(me.version, 1))
    ready = [
        sum(
            r.state is ReplicaState.READY or r is me
            for r in table.stage(me.model, me.version, stage)
        )
        for stage in stages
    ]
    adapt(scheduler, ready)
