"""Texts of very different lengths, and their reference embeddings."""

from __future__ import annotations

import os

from multiworld.serve.models import minilm

SUBJECTS = ("A worker", "The last replica", "One process", "Our store", "The gateway")
VERBS = ("was lost", "answers", "joins", "is drained", "waits for the next stage")
RESTS = (
    "",
    " while traffic flows",
    " at three in the morning, and nobody has to get up",
    " on a machine whose network is cut in one direction, which both sides notice",
    " before the others do, and the requests that it held are sent to another one, "
    "where they are computed once more and answered once, as if nothing had happened",
)

TOLERANCE = 1e-4
"""Largest accepted difference of a component.

Padding a batch to its longest row changes the order of some sums of 32-bit floats.
"""


def texts() -> list[str]:
    """Return 125 texts; neighbours differ in length, so that batches are ragged."""
    found = [f"{s} {v}{r}." for r in RESTS for s in SUBJECTS for v in VERBS]
    return [found[(number * 37) % len(found)] for number in range(len(found))]


def reference(sentences: list[str]) -> list[list[float]]:
    """Return the embedding of each text, computed by sentence-transformers.

    Raises:
        ModuleNotFoundError: sentence-transformers is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm.folder()), device="cpu")
    rows = model.encode(sentences, batch_size=1, show_progress_bar=False)
    return [row.tolist() for row in rows]


def is_equal(answer: list[float], wanted: list[float]) -> bool:
    """Tell whether two embeddings agree within ``TOLERANCE``."""
    return len(answer) == len(wanted) and all(
        abs(a - b) <= TOLERANCE for a, b in zip(answer, wanted, strict=True)
    )
