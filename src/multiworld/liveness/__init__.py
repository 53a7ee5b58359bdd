"""Liveness of peer processes: control links, heartbeats, the failure detector."""
