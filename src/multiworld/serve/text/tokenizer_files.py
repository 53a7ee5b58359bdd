"""Tokenizer files of models that generate text, and the tokens that end a completion.

Every process of the service reads the end tokens, so this module avoids slow imports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from multiworld.errors import SpecError
from multiworld.serve.text.folder_json import read_if_there, read_json
from multiworld.serve.text.text_inputs import loaded


def chat_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer; raise SpecError if it is unsuitable for chats."""
    found = loaded(folder)
    if getattr(found, "split_special_tokens", False):
        raise SpecError(
            f"{folder}: split_special_tokens has no meaning here, because chats need "
            "control tokens; remove it from tokenizer_config.json"
        )
    return found


def ends_of(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a completion; none if there is no config.json."""
    path = folder / "config.json"
    return end_tokens(read_json(path), folder) if path.exists() else ()


def end_tokens(config: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a completion according to any of the folder's files.

    vLLM also combines the end tokens of the generation config (without one, of the
    model's config) with the tokenizer's. A file whose value is null adds no token.
    """
    path = folder / "generation_config.json"
    text_config = config.get("text_config")
    files = {
        path: read_if_there(path),
        folder / "config.json": config,
        folder / "config.json (text_config)": text_config or {},
    }
    found: dict[int, None] = {}  # a set that keeps the order
    for place, content in files.items():
        ends = content.get("eos_token_id")
        for end in ends if isinstance(ends, list) else [ends]:
            if end is None:
                continue
            if isinstance(end, bool) or not isinstance(end, int | float):
                raise SpecError(
                    f"{place}: eos_token_id is {ends!r}; give a number, or a list of "
                    "numbers"
                )
            found[int(end)] = None
    own = _end_of_tokenizer(folder)
    if own is not None:
        found[own] = None
    # Some folders name a negative id, which no token has.
    size = config.get("vocab_size") or (text_config or {}).get("vocab_size")
    size = size if isinstance(size, int) else 2**31
    return tuple(end for end in found if 0 <= end < size)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _TokenizerFile(msgspec.Struct):
    """The parts of ``tokenizer.json`` from which a token's id is read."""

    added_tokens: list[_AddedToken] = []
    model: _Vocabulary = _Vocabulary()


def _end_of_tokenizer(folder: Path) -> int | None:
    """Return the token that the tokenizer's files name as the end of a text."""
    config = read_if_there(folder / "tokenizer_config.json")
    name = config.get("eos_token")
    decoder = config.get("added_tokens_decoder")
    if not name or not decoder:
        name = read_if_there(folder / "special_tokens_map.json").get("eos_token", name)
    name = name.get("content") if isinstance(name, dict) else name
    if not isinstance(name, str) or not name:
        return None
    for number, token in (decoder or {}).items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and token.get("content") == name:
            return int(number)
    added = read_if_there(folder / "added_tokens.json").get(name)
    number = added if isinstance(added, int) else _number_of(name, folder)
    if number is None:  # transformers adds the token to the vocabulary
        found = loaded(folder).eos_token_id
        return None if found is None else int(found)
    return number


def _number_of(token: str, folder: Path) -> int | None:
    """Return the id of a token in ``tokenizer.json``."""
    try:
        content = (folder / "tokenizer.json").read_bytes()
        found = msgspec.json.decode(content, type=_TokenizerFile)
        for each in found.added_tokens:
            if each.content == token:
                return each.id
        vocabulary = msgspec.json.decode(found.model.vocab)
        if isinstance(vocabulary, dict):
            number = vocabulary.get(token)
            return number if isinstance(number, int) else None
        for place, entry in enumerate(vocabulary):
            if isinstance(entry, list) and entry[:1] == [token]:
                return place
    except (OSError, ValueError, TypeError):
        pass  # loading the tokenizer reports the error
    return None
