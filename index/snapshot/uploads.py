"""Pictures that came with changed items, kept beside the versions of their index.

    HOME/indexes/NAME/uploads/<first two digits>/<sha256>

A picture's reference is then `upload:<sha256>`, whatever version names it. Written once, under the
name of their content; nothing changes them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from hivlp.index.errors import CorpusError
from hivlp.index.pictures import Root, picture_root, read_picture
from hivlp.index.snapshot.durable import replace_bytes

FOLDER = "uploads"
PREFIX = "upload:"
_REF = re.compile(rf"{PREFIX}([0-9a-f]{{64}})")


def keep_upload(index_folder: Path, data: bytes) -> str:
    """Keep a picture's bytes durably; returns its reference. Raises OSError."""
    digest = hashlib.sha256(data).hexdigest()
    target = index_folder / FOLDER / _place(digest)
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(target, data)
    return f"{PREFIX}{digest}"


def upload_path(index_folder: Path, reference: str) -> Path | None:
    """The file of an uploaded picture; None for a reference to another one."""
    found = _REF.fullmatch(reference)
    return index_folder / FOLDER / _place(found[1]) if found else None


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
