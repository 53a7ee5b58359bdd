"""Architectures and weights of models, and how models are cut into stages."""
