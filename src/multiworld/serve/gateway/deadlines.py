"""What a gateway counts as hung, late or lost, and after how many seconds. Pure.

See the table in ``docs/serve/architecture.md``; what all processes share is in
``serve/wire/deadlines.py``.
"""

from __future__ import annotations

# Default limits of each wait for a token of a stream without a deadline; ``ENGINE_S``
# is for external engines, whose replicas take long to start. They bound queueing and
# stalls, but not a long completion.
WAIT_S, ENGINE_S = 60.0, 600.0

# Of failing attempts before a stream starts over without its kept KV (a lost connection
# may come back sooner), and before replicas that lack a connection are avoided.
KEPT_S, DOUBTED_S = 1.0, 0.5

LEFT_S = 2.0  # for which a returned stream may still be the cause of a loss
PREPARE_S = 60.0  # after which a move is abandoned
STALL_S = 30.0  # within which a client must read some of a waiting answer
KEEPER_S = 1.0  # besides ``silence_s``, without a beat, until a keeper is left
