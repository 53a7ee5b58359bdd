"""What travels on an edge, and how it is written.

Tags keep kinds apart, so that a note or a cancel overtakes tensors. All but ``WORK``
and ``ANSWER`` are small objects.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiworld import errors
from multiworld.backends.base import Bundle
from multiworld.errors import ServeError
from multiworld.serve.spec.stage import Stage, Tensors
from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.transport.collation import group_of, rows_of
from multiworld.serve.worker.batch_queue import Key, Work

WORK, NOTE, ANSWER, CANCEL = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Parcel:
    """One attempt at one request, on its way to a stage."""

    key: Key
    tensors: Tensors
    remaining_s: float
    is_solo: bool = False
    session: str | None = None
    via: Mapping[str, str] | None = None
    share: Share = DEFAULT_SHARE


def pack(parcels: Sequence[Parcel]) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and the metadata of one message."""
    tensors = {
        f"{number}.{name}": tensor
        for number, parcel in enumerate(parcels)
        for name, tensor in parcel.tensors.items()
    }
    items = [
        [
            *p.key,
            p.remaining_s,
            p.is_solo,
            p.session,
            dict(p.via) if p.via else None,
            None
            if p.share is DEFAULT_SHARE
            else [p.share.tenant, p.share.weight, p.share.priority],
        ]
        for p in parcels
    ]
    return tensors, {"items": items}


def unpack(bundle: Bundle, now: float, stage: Stage) -> list[Work]:
    """Return the work of one message, as it is queued by a replica."""
    contents = _contents(bundle)
    works = []
    for tensors, item in zip(contents, bundle.meta["items"], strict=True):
        router, number, attempt, remaining_s, is_solo, session, via, share = item
        key = (router, number, attempt)
        group: Hashable = group_of(tensors, stage.ragged) if stage.is_batched else key
        works.append(
            Work(
                key=key,
                group=group,
                rows=rows_of(tensors),
                deadline_at=now + remaining_s,
                arrived_at=now,
                is_solo=is_solo,
                session=session,
                via=via,
                content=tensors,
                share=DEFAULT_SHARE if share is None else Share(*share),
            )
        )
    return works


def pack_answers(
    answers: Iterable[tuple[Key, Tensors, bool]],
) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and the metadata of answers to one router."""
    tensors: Tensors = {}
    items = []
    for number, ((_, request, attempt), outputs, is_last) in enumerate(answers):
        for name, tensor in outputs.items():
            tensors[f"{number}.{name}"] = tensor
        items.append([request, attempt, is_last])
    return tensors, {"items": items}


def unpack_answers(bundle: Bundle) -> list[tuple[tuple[int, int], Tensors, bool]]:
    """Return the attempt, the outputs, and whether it is the last, of each answer."""
    return [
        ((number, attempt), tensors, is_last)
        for tensors, (number, attempt, is_last) in zip(
            _contents(bundle), bundle.meta["items"], strict=True
        )
    ]


def _contents(bundle: Bundle) -> list[Tensors]:
    contents: list[Tensors] = [{} for _ in bundle.meta["items"]]
    for name, tensor in bundle.tensors.items():
        number, _, plain = name.partition(".")
        contents[int(number)][plain] = tensor
    return contents


def error_to_json(error: ServeError) -> list[str]:
    """Return what ``error_from_json`` reads."""
    return [type(error).__name__, str(error), getattr(error, "stage", "")]


def error_from_json(data: Sequence[str]) -> ServeError:
    """Return an error that another process raised."""
    name, text, stage = data
    kind = getattr(errors, name, ServeError)
    if not (isinstance(kind, type) and issubclass(kind, ServeError)):
        kind = ServeError
    error: ServeError = kind(text)
    if stage:
        error.__dict__["stage"] = stage
    return error
