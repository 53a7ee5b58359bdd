"""Seconds after which work or a process counts as silent, late, hung or lost. Pure.

The limits are grouped by the process that measures them. The table in
``docs/serve/architecture.md`` says what follows from each limit.
"""

from __future__ import annotations

# Several processes.

SILENT_S = 0.6  # silence of a replica until its work is hedged: three heartbeats
HUNG_S = 30.0  # maximum for a batch, step or token of a stage without ``compute_s``
JOIN_S = 10.0  # maximum wait of a process for the other member of a world

# Gateways.

# Default limits for each wait for the next token, if a stream has no deadline.
# ``ENGINE_S`` is for external engines, whose replicas take long to start. The limits
# bound queueing and stalls, but not the total time of a completion.
WAIT_S, ENGINE_S = 60.0, 600.0

# While a stream's attempts keep failing: seconds until it starts over without its kept
# KV (a lost connection may come back sooner), and seconds until it avoids two replicas
# that are not connected to each other.
KEPT_S, DOUBTED_S = 1.0, 0.5

# If a chain loses a replica within this many seconds after it returned a stream to its
# gateway, the stream may still be the cause.
LEFT_S = 2.0
PREPARE_S = 60.0  # seconds after which the move of a stream is abandoned
STALL_S = 30.0  # seconds until a client that reads none of its answer is cut off
KEEPER_S = 1.0  # seconds of silence beyond ``silence_s`` until a keeper counts as hung

# Replicas.

GUARD_S = 1.0  # seconds between checks whether a batch or step hangs

# Seconds after the last deadline of a batch until it counts as hung, if it has also
# been running for ``HUNG_S``.
OVERDUE_S = 10.0

# Multiple of the duration of other steps, and minimum seconds, after which a step is
# late.
LATE_FACTOR, LATE_S = 3.0, 0.1

# Seconds for which a sequence may be missing from the results of its step, because the
# message that ends the sequence may be in flight. Also the seconds between two checks.
GRACE_S = 1.0

# Seconds that the gateway has to announce a sequence that the previous stage already
# announced; then the replica ends the sequence.
UNCONFIRMED_S = 3.0

# Maximum seconds that one check adds to a step's waiting time. After a pause of this
# process, messages that arrived are still unread, so the pause must not count in full;
# but a process whose checks are always late must still detect faults.
COUNTED_S = 2 * GRACE_S

BUSY_S = 60.0  # seconds for which an engine may be busy without yielding a token

# The controller.

LINK_S = 20.0  # seconds per attempt for a process to join its control world
REPORT_S = 2.0  # seconds to wait for the report of a process
EXIT_S = 0.25  # seconds to wait for an exit code after a connection has ended
PROBE_S = 10.0  # maximum seconds of a replica's first probe
PROBE_GRACE_S = 5.0  # seconds after a probe's limit until the probe is repeated

# Seconds to wait for the store's answer to a check, seconds between checks, and
# consecutive checks without an answer after which the store is replaced.
STORE_ANSWER_S, STORE_CHECK_S, STORE_HUNG_AFTER_CHECKS = 1.5, 1.0, 3

KEEPER_START_S = 120.0  # seconds for a stream keeper to start, even on busy cores
KEEPER_FOUND_S = 10.0  # seconds for an earlier controller's keeper to answer
KEEPER_BEAT_S = 0.25  # seconds between heartbeats to the stream keeper
