"""Seconds after which the controller counts processes as hung or lost. Pure.

See the table in ``docs/serve/architecture.md``; limits that all processes share are in
``serve/wire/deadlines.py``.
"""

from __future__ import annotations

JOIN_S = 20.0  # seconds per attempt for a process to join its control world
REPORT_S = 2.0  # seconds to wait for the report of a process
EXIT_S = 0.25  # seconds to wait for an exit code after a connection has ended
PROBE_S = 10.0  # maximum seconds of a replica's first probe
PROBE_GRACE_S = 5.0  # seconds beyond a probe's limit until it is lost, and repeated

# Seconds to wait for the store's answer to a check, seconds between checks, and
# consecutive checks without an answer after which the store is replaced.
STORE_ANSWER_S, STORE_CHECK_S, STORE_HUNG_AFTER_CHECKS = 1.5, 1.0, 3

KEEPER_START_S = 10.0  # seconds for a stream keeper to start
KEEPER_BEAT_S = 0.25  # seconds between heartbeats to it
