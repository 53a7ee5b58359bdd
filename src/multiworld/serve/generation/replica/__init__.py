"""Sequences at a replica: scheduling, KV cache, sampling and recovery."""
