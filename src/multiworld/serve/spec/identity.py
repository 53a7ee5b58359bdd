"""The bytes that a version of a model consists of, as they were when it was made.
Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

# Words of the error of a refused version, by which the controller knows it.
CHANGED = "has changed since this version was made"


class FileMark(BaseModel):
    """What is known of a file."""

    model_config = ConfigDict(frozen=True)

    size: int
    mtime_ns: int
    # Device, inode and time of the last change of the inode. As long as these and
    # ``mtime_ns`` are the same, nobody has written to the file.
    inode: tuple[int, int, int]
    digest: str
    is_whole: bool = True  # the digest is of all bytes; otherwise of samples


class Identity(BaseModel):
    """What a version of a model is: its files, its code and its options."""

    model_config = ConfigDict(frozen=True)

    name: str  # hash of all of it
    files: dict[str, FileMark] = {}  # in the model's folder, by relative path
    others: dict[str, FileMark] = {}  # elsewhere, by absolute path
    code: dict[str, str] = {}  # hashes of source files, by name of the module
    kept: str = ""  # folder with copies of the files; empty: there is none
