"""Requests with a single answer, at the gateway and at the replica."""
