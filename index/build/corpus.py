"""Reading what is to be searched, whatever its form. Streamed.

    for found in open_corpus(path): ...      # Item or BadItem, in the corpus's own order

One bad row is a BadItem and the reading goes on; a corpus that can't be read at all, or that names
one id twice, raises CorpusError. The forms are in `readers/`; `docs/data-formats.md` lists them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hivlp.index.build.readers.base import PLAIN, Corpus, CorpusOptions
from hivlp.index.build.readers.files import Files, files_at
from hivlp.index.build.readers.folder import METADATA_NAMES, FolderCorpus, pictures_below
from hivlp.index.build.readers.karpathy import KarpathyCorpus
from hivlp.index.build.readers.lines import NOT_UTF8
from hivlp.index.build.readers.tables import TableCorpus, table_kind
from hivlp.index.build.readers.webdataset import WebdatasetCorpus
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import Root
from hivlp.index.remote import is_url, local_path

__all__ = ["Corpus", "CorpusOptions", "FolderCorpus", "open_corpus"]

MAX_NAMES = 100_000
"""Files that a pattern with braces may name."""
WANTED = ".csv, .jsonl (either .gz too), .parquet, .tar, .json"
WILD = re.compile(r"[*?[{]")
"""What makes a pattern of a path."""
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")


def open_corpus(given: Path | str, options: CorpusOptions = PLAIN) -> Corpus:
    """The reader for a path, a URL, or a pattern of either. Raises CorpusError for no corpus."""
    source = _source(str(given))
    if not isinstance(source, str) and NOT_UTF8.search(str(source.resolve())):
        raise CorpusError(repr(str(given)), "its path is not UTF-8")
    kind = _kind(source)
    if kind == "folder":
        return _checked(_open_folder(source, options), options)
    if kind == "file":
        folder, name = _split(source)
        return _checked(_open_files(source, files_at(folder), [name], options), options)
    if not WILD.search(str(given)):
        raise CorpusError(str(given), "no such file or folder")
    return _checked(_open_pattern(source, options), options)


def _checked(corpus: Corpus, options: CorpusOptions) -> Corpus:
    """The corpus, unless it was given what belongs to another form."""
    if corpus.kind != "karpathy" and (options.split != "all" or options.images is not None):
        raise CorpusError(
            str(corpus.source),
            f"a {corpus.kind} corpus has no splits and no folder of images apart: those belong to "
            "a Karpathy split JSON",
        )
    if options.aliases is not None and corpus.kind not in ("csv", "jsonl", "parquet", "webdataset"):
        raise CorpusError(str(corpus.source), f"a {corpus.kind} corpus has no column aliases")
    return corpus


def _source(given: str) -> Root:
    path = local_path(given)
    return given.rstrip("/") if path is None and is_url(given) else Path(path or given)


def _kind(source: Root) -> str | None:
    """`folder`, `file`, or None for what is not there. Raises CorpusError."""
    if isinstance(source, Path):
        return "folder" if source.is_dir() else "file" if source.is_file() else None
    from hivlp.index.remote import RemoteFolder

    try:
        return "file" if RemoteFolder(source).info()["type"] == "file" else "folder"
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CorpusError(source, f"unreadable: {error}") from error


def _split(source: Root) -> tuple[Root, str]:
    """The folder that a file lies in, and its name there."""
    if isinstance(source, Path):
        return source.parent, source.name
    folder, _, name = source.rpartition("/")
    return folder, name


def _open_folder(source: Root, options: CorpusOptions) -> Corpus:
    """A folder of pictures, unless it holds no picture but tars, or tables of one kind."""
    files = files_at(source)
    names = sorted(
        name for name, is_folder in files.listing() if not is_folder and not name.startswith(".")
    )
    tars = [name for name in names if name.lower().endswith(".tar")]
    tables = [name for name in names if table_kind(name) is not None]
    if (not tars and not tables) or set(names) & set(METADATA_NAMES):
        return FolderCorpus(source, options)
    if next(pictures_below(files), None) is not None:
        return FolderCorpus(source, options)
    # img2dataset writes a table beside each tar, of what is in it.
    return _open_files(source, files, tars or tables, options)


def _open_pattern(source: Root, options: CorpusOptions) -> Corpus:
    """Files by a pattern: `*`, `?`, `[..]`, `**`, and braces, `{a,b}` or `{000..099}`."""
    text = source if isinstance(source, str) else source.as_posix()
    fixed = text[: WILD.search(text).start()]  # type: ignore[union-attr]
    base, slash, _ = fixed.rpartition("/")
    pattern = text[len(base) + len(slash) :]
    root: Root = base if isinstance(source, str) else Path(base or slash or ".")
    files = files_at(root)
    names: list[str] = []
    for expanded in without_braces(pattern):
        if len(names) >= MAX_NAMES:
            raise CorpusError(text, f"the pattern names more than {MAX_NAMES} files")
        names += files.glob(expanded) if re.search(r"[*?[]", expanded) else [expanded]
    if not names:
        raise CorpusError(text, "no file matches the pattern")
    return _open_files(source, files, list(dict.fromkeys(names)), options)


def _open_files(source: Root, files: Files, names: Sequence[str], options: CorpusOptions) -> Corpus:
    """Files of one kind. Raises CorpusError for mixed ones, or ones that are not there."""
    kinds = {_file_kind(name) for name in names}
    if len(kinds) > 1:
        raise CorpusError(str(source), f"files of several kinds: {', '.join(map(str, kinds))}")
    (kind,) = kinds
    for name in names if isinstance(files.root, Path) else ():
        if not files.is_file(name):
            raise CorpusError(f"{files.root}/{name}", "no such file or folder")
    if kind == "tar":
        return WebdatasetCorpus(source, files, names, options)
    if kind == "json" and len(names) == 1:
        root = files.root if options.images is None else _source(options.images)
        return KarpathyCorpus(source, files, names[0], root, options)
    if kind is None or kind == "json":
        what = f"not a folder of pictures, and not one of {WANTED}"
        raise CorpusError(posixpath.join(str(files.root), names[0]), what)
    return TableCorpus(source, files, names, options)


def _file_kind(name: str) -> str | None:
    lower = name.lower()
    if lower.endswith(".tar"):
        return "tar"
    return "json" if lower.endswith(".json") else table_kind(name)


def without_braces(pattern: str) -> Iterator[str]:
    """A pattern without its braces, once for each thing they name, as a shell does it."""
    found = _BRACES.search(pattern)
    if found is None:
        yield pattern
        return
    for word in _words(found[1], pattern):
        yield from without_braces(pattern[: found.start()] + word + pattern[found.end() :])


def _words(inside: str, pattern: str) -> Iterator[str]:
    bounds = _RANGE.fullmatch(inside)
    if bounds is None:
        yield from inside.split(",")
        return
    first, last = int(bounds[1]), int(bounds[2])
    if last < first or last - first >= MAX_NAMES:
        raise CorpusError(pattern, f"{{{inside}}} is no range of at most {MAX_NAMES} numbers")
    width = len(bounds[1]) if bounds[1].startswith("0") else 1
    yield from (f"{number:0{width}d}" for number in range(first, last + 1))
