"""Facts of a folder that versions of a model share."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from multiworld.serve.engine.models.folder_facts import tokenizer
from tests.tiny_decoder import save_tokenizer


def test_versions_share_the_tokenizer_of_a_folder_while_its_files_stay(
    tmp_path: Path,
) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    first = tokenizer(tmp_path)
    assert tokenizer(tmp_path) is first
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ messages }}")
    second = tokenizer(tmp_path)
    assert second is not first
    template.write_text("{{ messages | x }}")
    assert tokenizer(tmp_path) is not second
    left = weakref.ref(first)
    del first
    gc.collect()
    assert left() is None
