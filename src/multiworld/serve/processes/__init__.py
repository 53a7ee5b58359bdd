"""Composition of the gateway process and of the replica process."""
