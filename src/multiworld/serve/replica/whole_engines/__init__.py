"""Sequences of an engine of others, which is one replica."""
