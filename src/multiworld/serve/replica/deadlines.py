"""What a replica counts as hung, late or overdue, and after how many seconds. Pure.

See the table in ``docs/serve/architecture.md``; what all processes share is in
``serve/wire/deadlines.py``.
"""

from __future__ import annotations

GUARD_S = 1.0  # between two checks whether a batch or step hangs

# After the last deadline of a batch; it counts as hung if it has also been running for
# ``HUNG_S``.
OVERDUE_S = 10.0

# Multiple of the duration of other steps, and minimum seconds, after which a step is
# late.
LATE_FACTOR, LATE_S = 3.0, 0.1

# For which a sequence may be missing: the message that ends it may be in flight. Also
# the time between two checks.
GRACE_S = 1.0

# After which a sequence ends that only the previous stage has announced.
UNCONFIRMED_S = 3.0

# Maximum by which one check extends the waiting time of a step. A process that was
# stopped has not read what arrived; one that is always late must still find faults.
COUNTED_S = 2 * GRACE_S

BUSY_S = 60.0  # for which an engine without a token may report that it is busy
