"""Identity of a model's version: the files and the code that define it. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

# The controller recognises a refused version by this part of the error's text.
CHANGED = "has changed since this version was made"


class FileMark(BaseModel):
    """Size, times and digest of a file."""

    model_config = ConfigDict(frozen=True)

    size: int
    mtime_ns: int
    # Device, inode number and ctime (ns). If these and ``mtime_ns`` are unchanged,
    # nobody has written to the file.
    inode: tuple[int, int, int]
    digest: str
    is_whole: bool = True  # the digest covers all bytes; False: only samples


class Identity(BaseModel):
    """Files, code and options that define a version of a model."""

    model_config = ConfigDict(frozen=True)

    name: str  # hash of files, code and options
    files: dict[str, FileMark] = {}  # files in the model's folder, by relative path
    others: dict[str, FileMark] = {}  # files elsewhere, by absolute path
    code: dict[str, str] = {}  # hashes of source files, by module name
    kept: str = ""  # folder with copies of the files; empty: none
