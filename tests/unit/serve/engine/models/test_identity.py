"""Identities of versions: what counts as a change, and the copies of files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multiworld.errors import SpecError
from multiworld.serve.engine.models import identity
from multiworld.serve.engine.models.factory import build_model, folder_of, identified
from multiworld.serve.engine.models.identity import (
    difference,
    identity_of,
    usable_folder,
)
from multiworld.serve.spec.identity import CHANGED, Identity
from multiworld.serve.spec.loader import parse_spec
from multiworld.serve.spec.schema import ModelSpec


def folder_with(place: Path, **files: bytes) -> Path:
    """Make a folder of a model; double underscores in names are dots."""
    place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (place / name.replace("__", ".")).write_bytes(content)
    return place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_with(
        tmp_path / "model",
        config__json=b"{}",
        model__safetensors=bytes(range(256)) * 40,
        tokenizer__json=b"[]",
        README__md=b"about it",
    )


def made(folder: Path, copies: Path | None = None) -> Identity:
    return identity_of(str(folder), {}, {}, [], copies)


def replaced(path: Path, content: bytes) -> None:
    """Replace a file by another one, as a download does."""
    fresh = path.with_name("fresh")
    fresh.write_bytes(content)
    fresh.replace(path)


def test_name_depends_on_content_only(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    os.utime(other / "model.safetensors", (1, 1))
    assert made(folder).name == made(other).name
    assert difference(made(folder), other) == ""
    (other / "README.md").write_text("more about it")
    assert difference(made(folder), other) == ""


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_every_byte_of_the_weights_counts(folder: Path, place: int) -> None:
    first = made(folder)
    weights = folder / "model.safetensors"
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[place] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert difference(first, folder) == str(weights)
    assert made(folder).name != first.name


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "generation_config.json", "tokenizer_config.json"]
)
def test_new_file_that_decides_about_tokens_is_a_change(
    folder: Path, name: str
) -> None:
    first = made(folder)
    (folder / "notes.md").write_text("")
    assert difference(first, folder) == ""
    (folder / name).write_text("{}")
    assert difference(first, folder) == str(folder / name)


def test_missing_file_is_a_change(folder: Path) -> None:
    first = made(folder)
    (folder / "tokenizer.json").unlink()
    assert difference(first, folder) == str(folder / "tokenizer.json")


def test_copies_are_used_while_the_originals_are_others(
    folder: Path, tmp_path: Path
) -> None:
    """Large files are linked if they cannot be cloned."""
    first = made(folder, tmp_path / "copies")
    assert usable_folder(first, str(folder)) == str(folder)
    replaced(folder / "model.safetensors", b"others")
    replaced(folder / "config.json", b"{ }")
    kept = usable_folder(first, str(folder))
    assert kept == first.kept
    assert (Path(kept) / "config.json").read_bytes() == b"{}"
    replaced(Path(kept) / "config.json", b"")
    with pytest.raises(SpecError, match=f"{CHANGED}.*new version"):
        usable_folder(first, str(folder))


def test_linked_copy_that_was_written_to_in_place_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original and a linked copy are the same file."""
    monkeypatch.setattr(identity, "FICLONE", 0)
    monkeypatch.setattr(identity, "COPIED_BYTES", 100)
    first = made(folder, tmp_path / "copies")
    weights = folder / "model.safetensors"
    assert (Path(first.kept) / weights.name).samefile(weights)
    with weights.open("r+b") as file:
        file.write(b"other")
    with pytest.raises(SpecError, match=r"model\.safetensors " + CHANGED):
        usable_folder(first, str(folder))


def test_large_file_is_sampled_and_refused_if_it_was_written_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes between the samples are not compared, so a new time is a change."""
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 4)
    first, weights = made(folder), folder / "model.safetensors"
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    assert difference(first, other) == ""
    state = weights.stat()
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert difference(first, folder) == str(weights)


def test_copies_of_unused_versions_are_removed(folder: Path, tmp_path: Path) -> None:
    """Linked weights would occupy the disk forever."""
    copies = tmp_path / "copies"
    first, second = made(folder, copies), made(folder, copies)
    identity.forget_copies(copies, [second.kept])
    assert not Path(first.kept).exists()
    assert Path(second.kept).exists()


def test_factory_whose_code_has_changed_builds_no_other_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has imported the old code continues; a new one refuses."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("changing", "changing_part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "changing_part.py").write_text("FACTOR = 2\n")
    (tmp_path / "changing.py").write_text(
        "import changing_part\n"
        "def model():\n    return [lambda t: t]\n"
        "import changing_part as part\n"
    )
    spec = ModelSpec.model_validate({"factory": "changing:model", "stages": [{}]})
    build_model(spec)
    first = identified(spec, None)
    assert first.identity is not None
    assert set(first.identity.code) == {"changing", "changing_part"}
    (tmp_path / "changing_part.py").write_text("FACTOR = 3\n")
    build_model(first)  # it has imported the old code
    code = (
        "from multiworld.serve.engine.models.factory import build_model\n"
        "from multiworld.serve.spec.schema import ModelSpec\n"
        f"build_model(ModelSpec.model_validate_json({first.model_dump_json()!r}))"
    )
    new = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f"changing_part.py {CHANGED}" in new.stderr


def test_files_that_a_factory_names_are_part_of_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    data = tmp_path / "table.bin"
    data.write_bytes(b"old")
    (tmp_path / "naming.py").write_text(
        "from multiworld.serve.stage import Model, Stage\n"
        "def model(file):\n"
        "    stage = Stage(load=lambda context: lambda t: t)\n"
        "    return Model(stages=[stage], files=[file])\n"
    )
    spec = ModelSpec.model_validate(
        {"factory": "naming:model", "options": {"file": str(data)}, "stages": [{}]}
    )
    first = identified(spec, None)
    build_model(first)
    data.write_bytes(b"new")
    with pytest.raises(SpecError, match=r"table\.bin " + CHANGED):
        build_model(first)


def test_folder_of_a_version_is_checked_wherever_it_is_asked_for(folder: Path) -> None:
    """Gateways read tokenizers, and replicas read weights."""
    spec = ModelSpec.model_validate({"path": str(folder), "stages": [{}]})
    first = identified(spec, None)
    assert folder_of(first) == str(folder)
    replaced(folder / "tokenizer.json", b"{}")
    with pytest.raises(SpecError, match=r"tokenizer\.json " + CHANGED):
        folder_of(first)
    assert folder_of(spec) == str(folder)


def test_identity_is_no_field_of_a_spec_file(folder: Path) -> None:
    text = (
        f"models:\n  m:\n    path: {folder}\n    stages: [{{}}]\n"
        "    identity: {name: mine}\n"
    )
    with pytest.raises(SpecError, match="line 5: identity is set by the service"):
        parse_spec(text)
