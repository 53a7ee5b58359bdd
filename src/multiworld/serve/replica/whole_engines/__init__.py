"""Replicas that run a whole model in an external engine, such as vLLM."""
