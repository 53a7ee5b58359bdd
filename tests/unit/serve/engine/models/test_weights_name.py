"""Names of the weights in a folder."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from multiworld.errors import SpecError
from multiworld.serve.engine.models.weights import bytes_by_stage, name_of


def folder(at: Path) -> Path:
    at.mkdir()
    (at / "config.json").write_text("{}")
    (at / "model.safetensors").write_bytes(b"1234")
    return at


def test_name_stays_until_a_file_or_a_setting_changes(tmp_path: Path) -> None:
    made = folder(tmp_path / "a")
    name = name_of(made, "float32")
    assert name_of(made, "float32") == name
    assert name_of(made, "bfloat16") != name
    file = made / "model.safetensors"
    file.write_bytes(b"4321")
    os.utime(file, ns=(0, 1))
    assert name_of(made, "float32") != name


def test_names_differ_though_size_and_time_do_not(tmp_path: Path) -> None:
    """Container images may give all files the same time."""
    names = []
    for number, content in enumerate((b"1234", b"1243")):
        made = folder(tmp_path / f"{number}")
        (made / "model.safetensors").write_bytes(content)
        for file in made.iterdir():
            os.utime(file, ns=(0, 1))
        names.append(name_of(made))
    (made / "model.safetensors").write_bytes(b"1234")
    os.utime(made / "model.safetensors", ns=(0, 1))
    assert names[0] != names[1]
    assert name_of(made) == names[0], "a copy elsewhere has the same"


def test_index_names_files_beside_it_only(tmp_path: Path) -> None:
    """An untrusted folder must not make us read other files of this machine."""
    made = folder(tmp_path / "a")
    index = made / "model.safetensors.index.json"
    for name in ("../b.safetensors", str(tmp_path / "b.safetensors")):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(SpecError, match="which is not in the same folder"):
            name_of(made)


@pytest.mark.parametrize(
    "text", ["[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}']
)
def test_damaged_index_is_reported(text: str, tmp_path: Path) -> None:
    made = folder(tmp_path / "a")
    (made / "model.safetensors.index.json").write_text(text)
    with pytest.raises(SpecError, match="save the model again"):
        name_of(made)


@pytest.mark.parametrize("offsets", [[0, 4, 8], ["a", "b"], None])
def test_damaged_header_leaves_the_sizes_unknown(offsets: Any, tmp_path: Path) -> None:
    """Loading the model reports the error, with the name of the file."""
    made = folder(tmp_path / "a")
    header = json.dumps({"w": {"dtype": "F32", "data_offsets": offsets}}).encode()
    data = struct.pack("<Q", len(header)) + header
    (made / "model.safetensors").write_bytes(data)
    assert bytes_by_stage(made, [(0, 1)]) == [0]


def test_file_of_the_hub_is_identified_by_its_content(tmp_path: Path) -> None:
    names = []
    for number, content in enumerate(("one", "one", "two")):
        made = folder(tmp_path / f"{number}")
        blobs = made / "blobs"
        blobs.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.move(made / name, blobs / f"{content}-{name}")
            os.utime(blobs / f"{content}-{name}", ns=(0, number))
            (made / name).symlink_to(blobs / f"{content}-{name}")
        names.append(name_of(made))
    assert names[0] == names[1] != names[2]


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    made = folder(tmp_path / "a")
    (made / "config.json").unlink()
    with pytest.raises(SpecError, match=r"config\.json"):
        name_of(made)
