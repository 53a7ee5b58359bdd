"""All messages that processes exchange on edges. Pure."""

from __future__ import annotations

from multiworld.serve.wire.generation_messages import (
    ActivationRows,
    GenerationMessage,
    Step,
)
from multiworld.serve.wire.inference_messages import (
    Answers,
    Cancel,
    Credit,
    Note,
    Work,
)

# Messages on an edge.
EdgeMessage = Work | Answers | Note | Credit | Cancel | GenerationMessage


def contents_of(message: EdgeMessage) -> int:
    """Return the number of tensor dicts that accompany a message in its frame."""
    match message:
        case Work(items) | Answers(items):
            return len(items)
        case Step() | ActivationRows():
            return 1
    return 0
