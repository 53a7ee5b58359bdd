"""Streams of tokens: choice of replicas, moves, delivered tokens."""
