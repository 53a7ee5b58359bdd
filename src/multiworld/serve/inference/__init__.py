"""Requests with one answer each, at the gateway and at the replica."""
