"""Limits of silence and hanging that the processes of a service share. Pure."""

from __future__ import annotations

SILENT_S = 0.6  # of silence, until a replica's work is hedged: three heartbeats
HUNG_S = 30.0  # of a batch, a step or a token, where a stage has no ``compute_s``
JOIN_S = 10.0  # that a process waits for the other member of a world
