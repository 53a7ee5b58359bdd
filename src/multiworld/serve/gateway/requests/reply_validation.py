"""Checks that a replica is authorised to send a message about requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from multiworld.errors import InvalidRequestError
from multiworld.serve.gateway.requests.events import Submitted
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.wire import inference_messages
from multiworld.serve.wire.collation import rows_of
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.inference_messages import Attempt
from multiworld.serve.wire.protocol import MessageError
from multiworld.serve.wire.routing_table import Replica, RoutingTable

# Function that returns a request in flight and its number of attempts; None if it has
# ended.
Sent = Callable[[int], tuple[Submitted, int] | None]


def check(
    message: EdgeMessage,
    contents: Sequence[Tensors],
    peer: str,
    table: RoutingTable,
    sent: Sent,
) -> None:
    """Raise MessageError if a replica may not send this message about requests."""
    replica = table.replicas.get(peer)
    if replica is None:
        return  # harmless: the replica is no longer in the table
    match message:
        case inference_messages.Answers(items):
            route = table.routes.get(replica.model)
            stages = {} if route is None else route.stages
            if replica.stage + 1 != stages.get(replica.version, replica.stage + 1):
                raise MessageError(
                    f"{peer} sent an answer, but does not run the last stage"
                )
            for item, tensors in zip(items, contents, strict=True):
                for job in _checked([item.attempt], replica, sent):
                    _check_rows(job, tensors, peer)
        case inference_messages.BatchBegun(attempts):
            _checked(attempts, replica, sent)
        case (
            inference_messages.WorkDropped(attempts, stage)
            | inference_messages.WorkReturned(attempts, stage)
            | inference_messages.WorkStuck(attempts, stage)
        ):
            if stage != replica.stage + 1:
                raise MessageError(
                    f"{peer} sent a report on stage {stage}, but may report only on "
                    f"stage {replica.stage + 1}"
                )
            _checked(attempts, replica, sent)
        case inference_messages.WorkFailed(attempt):
            _checked([attempt], replica, sent)


def _checked(
    attempts: Iterable[Attempt], replica: Replica, sent: Sent
) -> list[Submitted]:
    jobs = []
    for number, nth in attempts:
        found = sent(number)
        if found is None:
            continue
        job, count = found
        if job.model != replica.model or not 1 <= nth <= count:
            raise MessageError(
                f"{replica.name} never received attempt {nth} of {number}"
            )
        jobs.append(job)
    return jobs


def _check_rows(job: Submitted, tensors: Tensors, peer: str) -> None:
    try:
        rows = rows_of(tensors)
    except InvalidRequestError as error:
        raise MessageError(f"{peer} sent an invalid answer: {error}") from None
    if rows != job.rows:
        raise MessageError(f"{peer} sent {rows} output rows for {job.rows} input rows")
