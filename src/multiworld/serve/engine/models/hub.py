"""Models on the Hugging Face Hub, fetched once into the hub's own cache."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path

from multiworld.errors import SpecError
from multiworld.serve.engine.models.caches import cache_folder

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # OWNER/NAME

# Maximum seconds to wait for the hub if the cache has files of the model.
ANSWER_S = 10.0

# Files of a model that stages and tokenizers read.
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def _mark_of(folder: str) -> Path:
    """Return the marker file of a model whose files have all been fetched."""
    name = hashlib.sha256(folder.encode()).hexdigest()[:24]
    return cache_folder() / "fetched" / name


def _is_marked(folder: str) -> bool:
    try:
        return _mark_of(folder).exists()
    except OSError:
        return False


def _answers(path: str, revision: str) -> bool:
    """Return whether the hub answers and has the model."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(path, revision=revision, timeout=ANSWER_S)
    except Exception:
        # The types of the hub's errors depend on the version of the HTTP library.
        return False
    return True


def is_hub_name(path: str) -> bool:
    """Return whether a path has the form of a hub model's name and does not exist."""
    return NAME.fullmatch(path) is not None and not Path(path).exists()


def fetched(name: str, revision: str | None = None) -> Path | None:
    """Return a model's folder in the hub's cache; None if there is none.

    Without a revision, return the folder of the latest commit in the cache. The name of
    the folder is its commit.
    """
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # not fetched, no such library, or no valid name
        return None


def folder_of(path: str, revision: str | None) -> str:
    """Return the folder of a model, fetched into the cache of ``huggingface_hub``."""
    if not is_hub_name(path):
        if revision is not None:
            raise SpecError(f"{path} is a path on disk; remove `revision:`")
        return path
    if revision is None:
        raise SpecError(
            f"{path!r} is not a folder; to take it from the Hugging Face Hub, add "
            "`revision:` with a commit, so that all replicas load the same weights"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise SpecError(
            f"{path!r} is on the Hugging Face Hub; pip install huggingface_hub"
        ) from error
    # A revision that was fetched completely is never looked up again. A marker file
    # records the complete fetch, because another program may have put only some files
    # of the revision into the cache.
    found = ""
    try:
        # LocalEntryNotFoundError: the revision was not fetched yet.
        with contextlib.suppress(LocalEntryNotFoundError):
            found = snapshot_download(
                path, revision=revision, allow_patterns=FILES, local_files_only=True
            )
    except ValueError as error:
        raise SpecError(
            f"path: {path!r} is not a valid Hugging Face Hub repository id: {error}; "
            "give OWNER/NAME or a folder"
        ) from error
    if found and (_is_marked(found) or not _answers(path, revision)):
        return found
    try:
        found = snapshot_download(path, revision=revision, allow_patterns=FILES)
        with contextlib.suppress(OSError):
            _mark_of(found).parent.mkdir(parents=True, exist_ok=True)
            _mark_of(found).touch()
        return found
    except Exception as error:  # of the hub, its HTTP library, or the file system
        why = (str(error).strip() or repr(error)).splitlines()[0]
        raise SpecError(
            f"cannot fetch {path} at {revision} from the hub: {why}"
        ) from error
