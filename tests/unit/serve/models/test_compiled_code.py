"""C code that is compiled when it is first needed, and kept."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from multiworld.serve.models import compiled_code
from multiworld.serve.models import integer_linear as integers
from multiworld.serve.models.integer_products import SOURCE

NEEDS_COMPILER = pytest.mark.skipif(
    isinstance(compiled_code.outcome(SOURCE), str), reason="not compiled here"
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Return an empty cache folder; nothing has been loaded."""
    monkeypatch.setenv("MULTIWORLD_CACHE", str(tmp_path))
    compiled_code.outcome.cache_clear()
    yield tmp_path
    compiled_code.outcome.cache_clear()


@NEEDS_COMPILER
def test_compiled_code_is_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process has it without a compiler, unless others may write to it."""
    compiled_code.library(SOURCE)
    (kept,) = (fresh / "compiled").iterdir()
    monkeypatch.setattr(subprocess, "run", _refuse)
    compiled_code.outcome.cache_clear()
    compiled_code.library(SOURCE)
    kept.chmod(0o777)
    compiled_code.outcome.cache_clear()
    with pytest.raises(NotImplementedError, match="no compiler today"):
        compiled_code.library(SOURCE)


def _refuse(*_: object, **__: object) -> None:
    raise OSError("no compiler today")


@NEEDS_COMPILER
def test_a_cache_that_cannot_be_used_is_done_without(fresh: Path) -> None:
    """A file where its folder should be; a file in it that is cut off."""
    (fresh / "compiled").touch()
    compiled_code.library(SOURCE)
    (fresh / "compiled").unlink()
    compiled_code.outcome.cache_clear()
    compiled_code.library(SOURCE)
    (kept,) = (fresh / "compiled").iterdir()
    kept.unlink()  # a new file: this process has mapped the old one
    kept.write_bytes(b"")
    kept.chmod(0o700)
    compiled_code.outcome.cache_clear()
    compiled_code.library(SOURCE)
    assert kept.stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("MULTIWORLD_COMPILE", "0", "MULTIWORLD_COMPILE is 0"),
        ("CC", "no-such-compiler", "no-such-compiler"),
        ("CC", "false", "false"),
    ],
)
@NEEDS_COMPILER
def test_torch_computes_where_nothing_can_be_compiled(
    name: str, value: str, error: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its product has the same bits. The compiler is asked once."""
    weight, scale = integers.quantized(torch.randn(17, 68))
    given = torch.randn(3, 68)
    wanted = integers.packed(weight, scale, [17]).products(given)[0]
    compiled_code.outcome.cache_clear()
    monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=error):
            compiled_code.library(SOURCE)
        monkeypatch.setattr(subprocess, "run", None)
    kernel = integers.packed(weight, scale, [17])
    assert isinstance(kernel, integers.TorchKernel)
    assert torch.equal(kernel.products(given)[0], wanted)
