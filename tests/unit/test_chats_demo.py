"""The chat demo's comparison of what was streamed with the undisturbed model."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiworld.demo.chats.chats import Chat
from multiworld.demo.chats.check import Verdict, check
from tests.tiny_decoder import greedy, save_decoder

PROMPT = [50, 60, 70]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("decoder"))


def verdict_of(folder: Path, tokens: list[int], error: str = "") -> Verdict:
    chat = Chat(0, "?", prompt=PROMPT, tokens=tokens, error=error)
    return check(folder, [chat], lambda done: None)


def test_chat_of_the_undisturbed_model_is_equal_to_it(folder: Path) -> None:
    tokens = greedy(folder, PROMPT, 20)
    assert verdict_of(folder, tokens) == Verdict(wrong=0, equal=1, broken=())


@pytest.mark.parametrize("place", [0, 10, 19])
def test_token_that_is_another_one_is_found(folder: Path, place: int) -> None:
    tokens = greedy(folder, PROMPT, 20)
    tokens[place] = (tokens[place] + 1) % 300
    found = verdict_of(folder, tokens)
    assert found.wrong >= 1
    assert found.equal == 0


@pytest.mark.parametrize("change", ["repeated", "missing"])
def test_token_that_came_twice_or_never_is_found(folder: Path, change: str) -> None:
    """The tokens after it do not follow from what is before them."""
    tokens = greedy(folder, PROMPT, 20)
    at = next(n for n in range(5, 19) if tokens[n] != tokens[n + 1])
    if change == "repeated":
        tokens.insert(at, tokens[at])
    else:
        del tokens[at]
    found = verdict_of(folder, tokens)
    assert (found.wrong >= 1, found.equal) == (True, 0)


def test_chat_that_was_cut_is_reported(folder: Path) -> None:
    found = verdict_of(folder, greedy(folder, PROMPT, 20), "the stream was cut")
    assert found.equal == 0
    assert found.broken == ("chat 0: the stream was cut",)
