"""Limits of an engine, from its spec and its model."""

from __future__ import annotations

from multiworld.serve.generation.engine_limits import GROWTH, EngineLimits
from multiworld.serve.spec.schema import GenerationSpec
from multiworld.serve.spec.stage import Generation

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
