"""Seconds after which a replica counts work as late, overdue or hung. Pure.

See the table in ``docs/serve/architecture.md``; limits that all processes share are in
``serve/wire/deadlines.py``.
"""

from __future__ import annotations

GUARD_S = 1.0  # seconds between checks whether a batch or step hangs

# Seconds after the last deadline of a batch until it counts as hung, if it has also
# been running for ``HUNG_S``.
OVERDUE_S = 10.0

# Multiple of the duration of other steps, and minimum seconds, after which a step is
# late.
LATE_FACTOR, LATE_S = 3.0, 0.1

# Seconds for which a sequence may be missing, as the message that ends it may be in
# flight. Also the seconds between two checks.
GRACE_S = 1.0

# Seconds after which a sequence that only the previous stage has announced is ended.
UNCONFIRMED_S = 3.0

# Maximum seconds by which one check extends the waiting time of a step. A process that
# was stopped has not read what arrived; one that is always late must still find faults.
COUNTED_S = 2 * GRACE_S

BUSY_S = 60.0  # seconds for which an engine without a token may report that it is busy
