"""Architectures, weights, and how models are cut into stages."""
