"""Engines of others as replicas: one process computes the whole model."""
