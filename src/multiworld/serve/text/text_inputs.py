"""The tokenizer of sentence encoders, from the files of a Hugging Face folder.

transformers loads the tokenizer, because transformers merges the folder's files. The
tokenizer for chats (``tokenizer.py``) uses ``loaded`` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from multiworld.errors import SpecError
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.text.folder_json import read_if_there

# Maximum characters passed to the tokenizer per token of the maximum length. Without
# this limit, the tokenizer would process a whole long text before truncating it. The
# longest English words have 45 characters.
MAX_CHARACTERS_PER_TOKEN = 64


def loaded(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder; raise SpecError if it has none."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # several libraries may raise their own errors
        raise SpecError(
            f"{folder}: its tokenizer cannot be loaded: {type(error).__name__}: "
            f"{error}; save it with transformers"
        ) from error
    if not getattr(found, "is_fast", False):
        raise SpecError(
            f"{folder}: {type(found).__name__} is not a fast tokenizer; save a "
            "tokenizer.json"
        )
    return found


class Tokenizer:
    """Turns text into ``input_ids`` and ``attention_mask``, [1, length], int64."""

    def __init__(self, folder: Path, max_length: int) -> None:
        theirs = loaded(folder)
        self._fast: Any = theirs.backend_tokenizer
        settings = read_if_there(folder / "sentence_bert_config.json")
        self._is_lowered = bool(settings.get("do_lower_case"))
        self._fast.no_padding()
        # Truncates text only; token ids are never truncated (see ``check_ids``).
        self._fast.enable_truncation(max_length, direction=theirs.truncation_side)
        self._max_characters = max_length * MAX_CHARACTERS_PER_TOKEN

    def encode(self, text: str) -> Tensors:
        text = text[: self._max_characters]
        text = text.lower() if self._is_lowered else text
        return self.encode_tokens(self._fast.encode(text).ids)

    def encode_tokens(self, ids: Sequence[int]) -> Tensors:
        """Return the tensors for token ids, which include the special tokens."""
        return {
            "input_ids": torch.tensor([list(ids)], dtype=torch.int64),
            "attention_mask": torch.ones((1, len(ids)), dtype=torch.int64),
        }
