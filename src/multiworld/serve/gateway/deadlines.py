"""Seconds after which a gateway counts work or processes as late, hung or lost. Pure.

See the table in ``docs/serve/architecture.md``; limits that all processes share are in
``serve/wire/deadlines.py``.
"""

from __future__ import annotations

# Default limits of each wait for a token of a stream without a deadline; ``ENGINE_S``
# is for external engines, whose replicas take long to start. They bound queueing and
# stalls, but not a long completion.
WAIT_S, ENGINE_S = 60.0, 600.0

# Seconds of failing attempts until a stream starts over without its kept KV (a lost
# connection may come back sooner), and until replicas without a connection are avoided.
KEPT_S, DOUBTED_S = 1.0, 0.5

LEFT_S = 2.0  # seconds for which a returned stream may still be the cause of a loss
PREPARE_S = 60.0  # seconds after which a move is abandoned
STALL_S = 30.0  # seconds within which a client must read a part of a waiting answer
KEEPER_S = 1.0  # seconds of silence beyond ``silence_s`` until a keeper counts as hung
