"""Conversion of received work into queued work."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from multiworld.serve.inference.replica.batch_queue import Work
from multiworld.serve.spec.stage import Stage, Tensors
from multiworld.serve.transport import protocol
from multiworld.serve.transport.collation import group_of, rows_of


def works_of(
    message: protocol.Work, contents: Sequence[Tensors], now: float, stage: Stage
) -> list[Work]:
    """Return the work of a message that arrived at the monotonic time ``now``."""
    works = []
    for tensors, item in zip(contents, message.items, strict=True):
        is_batched = stage.is_batched
        group: Hashable = group_of(tensors, stage.ragged) if is_batched else item.key
        works.append(
            Work(
                key=item.key,
                group=group,
                rows=rows_of(tensors),
                deadline_at=now + item.remaining_s,
                arrived_at=now,
                is_isolated=item.is_isolated,
                session=item.session,
                via=item.via,
                content=tensors,
                share=item.share,
                spent=item.spent,
            )
        )
    return works
