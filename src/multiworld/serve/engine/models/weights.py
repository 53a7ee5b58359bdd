"""Reader of single tensors in safetensors files, and names of weights."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path

from torch import Tensor

from multiworld.errors import SpecError

# Finds the number of the layer in the name of a tensor.
LAYER = re.compile(r"\.(\d+)\.")
MAX_HEADER = 100_000_000  # maximum bytes of a header; safetensors itself has this limit
# Number and bytes of the parts of a file that are hashed.
SAMPLES, SAMPLE = 8, 1 << 20
# Errors that may be raised by reading a damaged index or header.
DAMAGED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    struct.error,
)
# File that lists which file has each tensor, if the weights are in several files.
INDEX = "model.safetensors.index.json"


def read_weights(path: Path, wanted: Set[str]) -> dict[str, Tensor]:
    """Read only the named tensors of a file or folder; leave out missing ones."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    for file in files_of(path):
        try:
            with safe_open(file, framework="pt") as weights:
                for key in wanted & set(weights.keys()):
                    # Copy the tensor: the file is mapped, and may be overwritten while
                    # it is served.
                    found[key] = weights.get_tensor(key).clone()
        except (OSError, SafetensorError) as error:
            raise SpecError(f"{file}: {error}; give a safetensors file") from error
    return found


def names_in(folder: Path) -> list[str]:
    try:
        return [name for name, *_ in _tensors_in(folder)]
    except (OSError, *DAMAGED) as error:
        raise SpecError(f"{folder}: {error!r}; give safetensors files") from error


def files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if index.exists():
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
            names = sorted(set(content["weight_map"].values()))
            beside = [name for name in names if Path(name).name == name]
        except (OSError, *DAMAGED) as error:
            raise SpecError(
                f"cannot read {index}: {error!r}; save the model again"
            ) from error
        if beside != names:
            outside = next(name for name in names if name not in beside)
            raise SpecError(
                f"{index} names {outside!r}, which is not in the same folder"
            )
        return [path / name for name in names]
    single = path / "model.safetensors"
    if not single.exists():
        raise SpecError(
            f"{path} has no model.safetensors; save the weights as safetensors"
        )
    return [single]


def name_of(folder: Path, *settings: object) -> str:
    """Return a hash of the weights in a folder and of ``settings``."""
    return name_of_files((folder / "config.json", *files_of(folder)), *settings)


def name_of_files(files: Iterable[Path], *settings: object) -> str:
    """Return a hash of files that hold a model, and of ``settings``."""
    # A file in the hub's cache is identified by its content hash. Another file is
    # identified by name, size, time and samples (container images may give all files
    # the same time), so the same weights may have different names on two machines.
    made = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for file in files:
        try:
            found, status = file.resolve(), file.stat()
        except OSError as error:
            raise SpecError(f"cannot read {file}: {error}") from error
        is_of_hub = found.parent.name == "blobs"
        changed = "" if is_of_hub else status.st_mtime_ns
        name = found.name if is_of_hub else file.name
        made.update(f"{name}\0{status.st_size}\0{changed}\0".encode())
        if not is_of_hub:
            for sample in _samples(found, status.st_size):
                made.update(sample)
    return made.hexdigest()


def _samples(file: Path, size: int) -> Iterator[bytes]:
    """Yield parts of a file: its start, its end, and some in between."""
    step = max(SAMPLE, size // SAMPLES)
    try:
        with file.open("rb") as opened:
            for begin in (*range(0, size, step), max(0, size - SAMPLE)):
                opened.seek(begin)
                yield opened.read(SAMPLE)
    except OSError as error:
        raise SpecError(f"cannot read {file}: {error}") from error


def bytes_by_stage(folder: Path, cuts: Sequence[tuple[int, int]]) -> list[int]:
    """Return the bytes of weights that each stage of a decoder loads."""
    found = [0] * len(cuts)
    try:
        tensors = _tensors_in(folder)
    except (OSError, SpecError, *DAMAGED):
        return found  # loading the model reports the error
    for name, begin, end in tensors:
        layer = LAYER.search(name)
        if layer is None:
            # Count the tensor for the first and the last stage, because the embeddings
            # may also be the head.
            for stage in {0, len(cuts) - 1}:
                found[stage] += end - begin
            continue
        for stage, (first, after) in enumerate(cuts):
            found[stage] += (end - begin) * (first <= int(layer[1]) < after)
    return found


def _tensors_in(folder: Path) -> list[tuple[str, int, int]]:
    """Return the name, start and end of each tensor of a folder's files."""
    found: list[tuple[str, int, int]] = []
    for file in files_of(folder):
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > MAX_HEADER:
                raise ValueError(f"{file} is not a safetensors file")
            header = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            begin, end = map(int, tensor["data_offsets"])
            found.append((name, begin, end))
    return found
