"""Facts about generation in a Hugging Face folder: tokenizer and sampling defaults.
Every process of the service imports this module, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from multiworld.errors import SpecError
from multiworld.serve.text.folder_json import read_if_there

# Fields of ``generation_config.json`` that are defaults for requests, as in vLLM, with
# their minimum and maximum values.
DEFAULTS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}

COLDEST = 1e-5  # temperatures below this count as 0


def check_tokenizer(folder: Path) -> None:
    if not (folder / "tokenizer.json").exists():
        raise SpecError(
            f"{folder}: there is no tokenizer.json; transformers writes it when it "
            "saves the model's tokenizer"
        )


LAYER_KINDS = ("full_attention", "sliding_attention")


def check_kinds(kinds: Sequence[str], folder: Path) -> None:
    """Refuse layers whose state is not a key and a value for each token."""
    others = sorted({*kinds} - {*LAYER_KINDS})
    if others:
        raise SpecError(
            f"{folder}: layers of kind {', '.join(others)} are not supported; use "
            "`engine: vllm`, or another model"
        )


MAX_TOKENS = 2**20  # maximum number of tokens of a sequence if the folder names none


def defaults(folder: Path, source: str) -> dict[str, float]:
    """Return the sampling defaults of a folder; none if ``source`` is ``none``."""
    if source == "none":
        return {}
    path = folder / "generation_config.json"
    given = read_if_there(path)
    found: dict[str, float] = {}
    for name, (low, high) in DEFAULTS.items():
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or not low <= value <= high:
            raise SpecError(
                f"{path}: {name} is {value!r}; give a number from {low:g} to {high:g}, "
                "or set generation_config: none in the spec"
            )
        found[name] = value
    if "top_k" in found:
        found["top_k"] = max(0, int(found["top_k"]))
    if found.get("temperature", 1.0) < COLDEST:
        found["temperature"] = 0.0
    return found


# Tokenizers in use, by folder and its files; versions of a model may share one.
_tokenizers: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def tokenizer(folder: Path) -> Any:
    """Return a folder's tokenizer, shared while it is in use and no file changes."""
    from multiworld.serve.text.tokenizer import Tokenizer

    key = folder, _files(folder)
    found = _tokenizers.get(key)
    if found is None:
        found = _tokenizers[key] = Tokenizer(folder)
    return found


def _files(folder: Path) -> frozenset[tuple[str, int, int, int]]:
    stats = ((f.name, f.stat()) for f in folder.iterdir() if f.is_file())
    return frozenset((n, s.st_ino, s.st_size, s.st_mtime_ns) for n, s in stats)
