"""Pictures that came with changed items, kept beside the versions of their index.

    HOME/indexes/NAME/uploads/<first two digits>/<sha256>

A picture's reference is then `upload:<sha256>`, whatever version names it. Written once, under the
name of their content; nothing changes them.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from hivlp.index.errors import CorpusError
from hivlp.index.pictures import Root, picture_root, read_picture
from hivlp.index.snapshot.durable import replace_bytes, sync

FOLDER = "uploads"
PREFIX = "upload:"
_REF = re.compile(rf"{PREFIX}([0-9a-f]{{64}})")


def keep_upload(index_folder: Path, data: bytes) -> str:
    """Keep a picture's bytes durably; returns its reference. Raises OSError."""
    digest = hashlib.sha256(data).hexdigest()
    target = index_folder / FOLDER / _place(digest)
    try:
        os.utime(target)  # it is wanted again: nobody shall take it for unused meanwhile
    except FileNotFoundError:
        for folder in (target.parent.parent, target.parent):
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                sync(folder.parent)
        replace_bytes(target, data)
    return f"{PREFIX}{digest}"


def upload_path(index_folder: Path, reference: str) -> Path | None:
    """The file of an uploaded picture; None for a reference to another one."""
    found = _REF.fullmatch(reference)
    return index_folder / FOLDER / _place(found[1]) if found else None


def unused_uploads(index_folder: Path, versions: Iterable[str], older_than_s: float) -> list[Path]:
    """Uploads that none of these versions names, and temporary files of those who died writing.

    Only files older than `older_than_s`: a younger one may belong to a version that is being
    published. A version that can't be read names them all. Raises OSError.
    """
    used: set[str] = set()
    for version in versions:
        try:
            used |= _named(index_folder / version)
        except (OSError, pa.ArrowException, KeyError):
            return []
    latest = time.time() - older_than_s
    return [
        path
        for path in sorted((index_folder / FOLDER).glob("*/*"))
        if path.name not in used and path.stat().st_mtime < latest
    ]


def _named(version: Path) -> set[str]:
    """The names of the uploads that a version's items have."""
    named: set[str] = set()
    for file in (version / "items.arrow", *(version / "changes").glob("*.arrow")):
        with pa.memory_map(str(file)) as source:
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                column = reader.get_batch(number).column("image")
                own = column.filter(pc.starts_with(column, PREFIX).fill_null(False))
                named.update(ref.removeprefix(PREFIX) for ref in own.to_pylist())
    return named


@dataclass(frozen=True, slots=True)
class PictureRoots:
    """Where the pictures of a version lie: the corpus's folder, and its index's uploads."""

    corpus: Root | None = None
    uploads: Path | None = None

    def find(self, reference: str | None) -> tuple[Root | None, str | None]:
        """The folder that a picture lies in, and its reference there; None for nowhere."""
        found = None if reference is None else _REF.fullmatch(reference)
        if found is None:
            return self.corpus, reference
        return self.uploads, _place(found[1])

    def read(self, reference: str) -> bytes:
        """The bytes of a picture. Raises CorpusError where it is gone, unreadable or outside."""
        root, own = self.find(reference)
        if root is None or own is None:
            raise CorpusError(reference, "lies nowhere")
        return read_picture(root, own)


def picture_roots(index_folder: Path, corpus_root: str) -> PictureRoots:
    """The folders of an index's pictures."""
    return PictureRoots(picture_root(corpus_root), index_folder / FOLDER)


def _place(digest: str) -> str:
    return f"{digest[:2]}/{digest}"
