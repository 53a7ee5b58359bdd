"""Batching, computing and forwarding requests with one answer."""
