"""Time limits, in seconds, that the processes of a service share. Pure."""

from __future__ import annotations

SILENT_S = 0.6  # silence of a replica until its work is hedged: three heartbeats
HUNG_S = 30.0  # maximum for a batch, a step or a token if a stage has no ``compute_s``
JOIN_S = 10.0  # maximum wait of a process for the other member of a world
