"""Flags of llama.cpp's server as parameters of the package xllamacpp."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from multiworld.serve.engine.external.engine_args import flags_of
from multiworld.serve.engine.external.xllamacpp_server import parameters_of


def made(**args: Any) -> Any:
    parameters = SimpleNamespace(
        model=SimpleNamespace(path=""),
        hostnames=["0.0.0.0"],
        port=0,
        n_ctx=0,
        n_ubatch=512,
        cpuparams=SimpleNamespace(n_threads=0),
        cpuparams_batch=SimpleNamespace(n_threads=0),
        swa_full=False,
        warmup=True,
        use_jinja=False,
        yarn_orig_ctx=0,
        rope_freq_base=0.0,
        chat_template="",
        lora_adapters=[],
    )
    return parameters_of(parameters, flags_of(args), str.upper)


def test_flags_set_parameters() -> None:
    """Flags may have llama.cpp's names or the package's."""
    found = made(
        model="/a b.gguf",
        host="127.0.0.1",
        port=5,
        ctx_size=4096,
        n_ubatch=1,
        threads=3,
        swa_full=True,
        rope_freq_base=1.5,
        chat_template="x",
    )
    assert (found.model.path, found.hostnames) == ("/a b.gguf", ["127.0.0.1"])
    assert (found.port, found.n_ctx, found.n_ubatch) == (5, 4096, 1)
    assert found.cpuparams.n_threads == found.cpuparams_batch.n_threads == 3
    assert found.swa_full is True
    off = made(warmup=False, jinja=True, threads=3, threads_batch=2)
    assert (off.warmup, off.use_jinja, found.warmup) == (False, True, True)
    assert (off.cpuparams.n_threads, off.cpuparams_batch.n_threads) == (3, 2)
    assert (found.rope_freq_base, found.chat_template) == (1.5, "x")


def test_adapters_are_parameters_of_their_own() -> None:
    """Their order gives the numbers that requests use."""
    assert made(lora=["a"]).lora_adapters == ["A"]
    parameters = SimpleNamespace(lora_adapters=[])
    flags = ["--lora", "b", "--lora", "a"]
    assert parameters_of(parameters, flags, str.upper).lora_adapters == ["B", "A"]


def test_flag_that_is_not_known_ends_the_server() -> None:
    """Its name becomes the last line of the replica's log."""
    with pytest.raises(SystemExit, match="no parameter lora_scaled"):
        made(lora_scaled="a")
