"""Limits of an engine, from its spec and its model. Shell."""

from __future__ import annotations

import math
from collections.abc import Sequence

from multiworld.serve.generation.kv_memory import GROWTH
from multiworld.serve.generation.scheduler import EngineLimits, Scheduler
from multiworld.serve.spec.schema import GenerationSpec
from multiworld.serve.spec.stage import Generation
from multiworld.serve.transport.routing_table import ReplicaState, RoutingTable

MIB = 2**20


def limits_of(spec: GenerationSpec, model: Generation, stages: int) -> EngineLimits:
    """Return the limits of the schedulers of a model.

    The memory of the stage whose layers keep the most for a token is the limit.

    Args:
        spec: Spec of the generation.
        model: The model.
        stages: Number of its stages.
    """
    return limits_by(spec, max(model.kv_bytes), stages)


def limits_by(spec: GenerationSpec, kv_bytes: float, stages: int) -> EngineLimits:
    """Return the limits of the schedulers of a model.

    Args:
        spec: Spec of the generation.
        kv_bytes: Bytes of the keys and values of one token in a stage; 0: not known, so
            that they have room.
        stages: Number of stages.
    """
    block = max(kv_bytes, 1e-3) * spec.block_size * GROWTH
    return EngineLimits(
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        block_size=spec.block_size,
        blocks=max(2, int(spec.kv_cache_memory_mb * MIB / block)),
        steps=stages,
        is_prefill_chunked=spec.enable_chunked_prefill,
    )


def longest_of(spec: GenerationSpec, model: Generation) -> int:
    """Return the most tokens of a text, prompt and answer together."""
    limits = limits_of(spec, model, 1)
    room = (limits.blocks - 1) * limits.block_size
    return min(spec.max_model_len or model.max_tokens, model.max_tokens, room)


def prefix_bytes_of(spec: GenerationSpec) -> int:
    """Return the most bytes of beginnings of prompts that a replica keeps."""
    return int(spec.prefix_cache_memory_mb * MIB) if spec.enable_prefix_caching else 0


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
