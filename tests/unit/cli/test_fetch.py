"""``multiworld fetch``: models that exist already, and names that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from multiworld.cli.main import cli
from multiworld.demo import smollm2


def test_model_that_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(smollm2, "folder", lambda: tmp_path)
    assert CliRunner().invoke(cli, ["fetch"]).stdout == f"{tmp_path}\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["some/model"], "with --revision"),
        (["smollm"], "is neither smollm2 nor a name OWNER/NAME"),
        (["no/such/thing"], "is neither smollm2 nor a name"),
        (["smollm2", "--revision", "x"], "has no revisions"),
    ],
)
def test_what_cannot_be_fetched_is_named(words: list[str], text: str) -> None:
    found = CliRunner().invoke(cli, ["fetch", *words])
    assert found.exit_code != 0
    assert text in found.output
