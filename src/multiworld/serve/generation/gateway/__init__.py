"""Streams at the gateway: placement, delivered tokens, moves and recovery."""
