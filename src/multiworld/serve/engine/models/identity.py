"""Identities of versions: computed once, and checked before a version is loaded."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from multiworld.errors import SpecError
from multiworld.serve.spec.identity import CHANGED, FileMark, Identity

# The files in a folder that determine a model's output. Other files may change.
PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.gguf",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.py",
    "*config*.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "modules.json",
    "*/config.json",
    "additional_chat_templates/*.jinja",
)

WHOLE_BYTES = 1 << 30  # maximum bytes of a file that is hashed completely
# For larger files: number and bytes of the parts that are hashed.
SAMPLES, SAMPLE_BYTES = 64, 1 << 18
COPIED_BYTES = 1 << 26  # maximum bytes of a file that is copied if it cannot be cloned

FICLONE = 0x40049409  # the ioctl that shares the blocks of another file (linux/fs.h)

# Digests by path and state of a file, for processes that check the same file
# repeatedly.
_digests: dict[tuple[object, ...], str] = {}


def identity_of(
    folder: str | None,  # folder of the model, if it has one
    others: Mapping[str, Path],  # files outside that folder, by absolute path
    code: Mapping[str, str],  # hashes of source files, by name of the module
    settings: object,  # the options of the spec that are part of the identity
    copies: Path | None = None,  # folder for copies of the files; None: none
) -> Identity:
    """Return the identity of a version; copies keep it loadable if files change."""
    found = {} if folder is None else files_of(Path(folder))
    made = hashlib.blake2b(digest_size=16)
    kept = ""
    if copies is not None and found:
        fresh = copies / f"new-{os.urandom(8).hex()}"
        # Keep the files before marking them, because a link to a file changes its
        # ctime.
        _keep(found, fresh)
        kept = str(fresh)
    files = {name: mark_of(path) for name, path in found.items()}
    elsewhere = {name: mark_of(path) for name, path in others.items()}
    digests = {name: mark.digest for name, mark in (files | elsewhere).items()}
    described = json.dumps([digests, dict(code), settings], sort_keys=True, default=str)
    made.update(described.encode())
    return Identity(
        name=made.hexdigest(),
        files=files,
        others=elsewhere,
        code=dict(code),
        kept=kept,
    )


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that determine the output, by relative path."""
    paths = (path for pattern in PATTERNS for path in folder.glob(pattern))
    return {str(p.relative_to(folder)): p for p in sorted(paths) if p.is_file()}


def usable_folder(identity: Identity, folder: str) -> str:
    """Return ``folder``; if a file of the version has changed, the copies' folder."""
    changed = difference(identity, Path(folder))
    if not changed:
        return folder
    if identity.kept and not difference(identity, Path(identity.kept), is_copy=True):
        return identity.kept
    raise SpecError(refusal(changed))


def refusal(changed: str) -> str:
    return (
        f"{changed} {CHANGED}; restore it, or use `multiworld update` to make a new "
        "version of the current files"
    )


def difference(identity: Identity, folder: Path, *, is_copy: bool = False) -> str:
    """Return a file that changed since a version was made, or is new; empty: none."""
    found = files_of(folder)
    for name, mark in identity.files.items():
        path = found.pop(name, None)
        if path is None or _differs(path, mark):
            return str(folder / name)
    if found and not is_copy:
        return str(next(iter(found.values())))
    return ""


def changed_beside(identity: Identity) -> str:
    """Return a file outside the folder that differs; empty: there is none."""
    for name, mark in identity.others.items():
        if _differs(Path(name), mark):
            return name
    return ""


def mark_of(path: Path) -> FileMark:
    try:
        before = path.stat()
        digest = _digest_of(path, before)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error}") from error
    return FileMark(
        size=before.st_size,
        mtime_ns=before.st_mtime_ns,
        inode=_inode_of(before),
        digest=digest,
        is_whole=before.st_size <= WHOLE_BYTES,
    )


def _inode_of(state: os.stat_result) -> tuple[int, int, int]:
    return state.st_dev, state.st_ino, state.st_ctime_ns


def _differs(path: Path, mark: FileMark) -> bool:
    try:
        now = path.stat()
        if now.st_size != mark.size:
            return True
        is_same_time = now.st_mtime_ns == mark.mtime_ns
        if _inode_of(now) == mark.inode and is_same_time:
            return False
        if _digest_of(path, now) != mark.digest:
            return True
    except OSError:
        return True
    # The hashed samples are equal. But a file that was written to in place may differ
    # between the samples, so it counts as changed if its time has changed.
    is_same_file = _inode_of(now)[:2] == mark.inode[:2]
    return not mark.is_whole and is_same_file and not is_same_time


def _digest_of(path: Path, state: os.stat_result) -> str:
    key = str(path), state.st_size, state.st_mtime_ns, _inode_of(state)
    if key not in _digests:
        made = hashlib.blake2b(str(state.st_size).encode(), digest_size=16)
        with path.open("rb", buffering=0) as file:
            for begin, count in _parts_of(state.st_size):
                file.seek(begin)
                while count > 0:
                    part = file.read(min(count, 1 << 22))
                    if not part:
                        break
                    made.update(part)
                    count -= len(part)
        _digests[key] = made.hexdigest()
    return _digests[key]


def _parts_of(size: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file to hash: first byte, and number of bytes."""
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    # The first part is larger, so that it covers the header of a safetensors file.
    yield 0, 16 * SAMPLE_BYTES
    step = (size - SAMPLE_BYTES) // SAMPLES
    for number in range(1, SAMPLES + 1):
        yield number * step, SAMPLE_BYTES


def _keep(files: Mapping[str, Path], into: Path) -> None:
    """Clone files; if that fails, copy small ones and link large ones, or skip them."""
    for name, path in files.items():
        target = into / name
        with contextlib.suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            _clone(path.resolve(), target)


def _clone(source: Path, target: Path) -> None:
    with (
        source.open("rb") as old,
        target.open("wb") as new,
        contextlib.suppress(OSError),
    ):
        fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
        return
    target.unlink()
    if source.stat().st_size <= COPIED_BYTES:
        shutil.copyfile(source, target)
    else:
        os.link(source, target)


def forget_copies(copies: Path, used: Iterable[str]) -> None:
    """Remove the copies of versions that are no longer used."""
    kept = {Path(path).name for path in used}
    with contextlib.suppress(OSError):
        for found in copies.iterdir():
            if found.name not in kept:
                shutil.rmtree(found, ignore_errors=True)
