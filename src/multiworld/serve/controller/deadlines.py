"""What the controller counts as hung or lost, and after how many seconds. Pure.

See the table in ``docs/serve/architecture.md``; what all processes share is in
``serve/wire/deadlines.py``.
"""

from __future__ import annotations

JOIN_S = 20.0  # per attempt for a process to join its control world
REPORT_S = 2.0  # to wait for the report of a process
EXIT_S = 0.25  # to wait for an exit code after a connection has ended
PROBE_S = 10.0  # maximum of a replica's first probe
PROBE_GRACE_S = 5.0  # beyond a probe's limit; then it counts as lost and is repeated

# To wait for the store's answer to a check, between checks, and consecutive checks
# without an answer after which the store is replaced.
STORE_ANSWER_S, STORE_CHECK_S, STORE_HUNG_AFTER_CHECKS = 1.5, 1.0, 3

KEEPER_START_S = 10.0  # for a stream keeper to start
KEEPER_BEAT_S = 0.25  # between beats to it
