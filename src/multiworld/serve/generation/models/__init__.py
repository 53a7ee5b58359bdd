"""Decoders that generate text, cut between layers."""
