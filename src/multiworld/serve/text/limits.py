"""Limits of an engine, from its spec and its model."""

from __future__ import annotations

from multiworld.config import MIB
from multiworld.serve.spec.schema import GenerationSpec
from multiworld.serve.spec.stage import Generation
from multiworld.serve.text.engine_limits import GROWTH, EngineLimits


def limits_of(spec: GenerationSpec, model: Generation, stages: int) -> EngineLimits:
    """Return the limits of a model; the stage with the most KV determines them."""
    return limits_by(spec, max(model.kv_bytes), stages)


def limits_by(spec: GenerationSpec, kv_bytes: float, stages: int) -> EngineLimits:
    """Return the limits for ``kv_bytes`` of KV per token in a stage (0: unknown)."""
    block = max(kv_bytes, 1e-3) * spec.block_size * GROWTH
    return EngineLimits(
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        block_size=spec.block_size,
        blocks=max(2, int(spec.kv_cache_memory_mb * MIB / block)),
        steps=stages,
    )


def longest_of(spec: GenerationSpec, model: Generation) -> int:
    """Return the maximum number of tokens of a sequence, prompt and output together."""
    longest = limits_of(spec, model, 1).longest
    return min(spec.max_model_len or model.max_tokens, model.max_tokens, longest)


def prefix_bytes_of(spec: GenerationSpec) -> int:
    """Return the maximum bytes of cached prefixes at a replica."""
    return int(spec.prefix_cache_memory_mb * MIB) if spec.enable_prefix_caching else 0
