"""External engines as replicas: one process computes the whole model."""
