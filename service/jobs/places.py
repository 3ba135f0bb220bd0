"""What may be built from where: a caller must not make the server read what it likes.

A corpus, and the folder of pictures beside one, must lie below one of the allowed roots, a model
there or in HIVLP_HOME/artifacts: links followed, patterns with all that they name. What is allowed
is only then looked for, so that nobody learns from an answer what else there is.
"""

from __future__ import annotations

import glob
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from hivlp.index.build.corpus import WILD, without_braces
from hivlp.index.errors import CorpusError
from hivlp.index.remote import below, is_url, local_path
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.errors import InputError
from hivlp.service.schemas import StartBuild

MAX_NAMES = 10_000
"""Files that a pattern may name over HTTP."""
ODDITIES = (OSError, RuntimeError, ValueError)
"""What the system says of names that are too long, or that lead in a circle."""
OUTSIDE = "outside_roots"
ROOTS = "one of the places that HIVLP_JOBS__ROOTS names"


def placed(asked: StartBuild, home: Path, roots: Sequence[str]) -> StartBuild:
    """What was asked, with every place as it is once links are followed. Blocking.

    Raises InputError naming the field.
    """
    places = {"corpus": _place("corpus", asked.corpus, roots)}
    if asked.images is not None:
        places["images"] = _place("images", asked.images, roots)
    if asked.artifact is not None:
        places["artifact"] = _artifact(asked.artifact, home, roots)
    elif not SnapshotStore(home).versions(asked.index):
        message = f"artifact: index {asked.index!r} has no version yet: name the model"
        raise InputError("missing_field", message, param="artifact")
    return asked.model_copy(update=places)


def _place(param: str, given: str, roots: Sequence[str]) -> str:
    try:
        path = local_path(given)
        if path is None and is_url(given):
            return _remote(param, given, [root for root in roots if is_url(root)])
        return _local(param, given if path is None else path, _folders(roots))
    except (CorpusError, *ODDITIES) as error:
        raise _unfit(param, error) from error


def _remote(param: str, url: str, roots: Sequence[str]) -> str:
    """A URL, or a pattern of them, as it was. Raises InputError."""
    names = _names(param, url)
    for root in roots:
        with suppress(ValueError):
            for name in names:
                below(root, name)
            return url
    raise _outside(param)


def _local(param: str, text: str, folders: Sequence[Path]) -> str:
    """A path as it is, or the pattern as it was. Raises InputError."""
    path = Path(text)
    if not path.is_absolute():
        raise _outside(param)
    literal = _resolved_below(path, folders)
    if literal is not None and literal.exists():
        return str(literal)
    if WILD.search(text) is not None:
        _check_pattern(param, text, folders)
        return text
    if literal is None:
        raise _outside(param)
    raise InputError("invalid_value", f"{param}: no such file or folder", param=param)


def _check_pattern(param: str, pattern: str, folders: Sequence[Path]) -> None:
    """Raise InputError unless a pattern names files, and none of them elsewhere."""
    names = _names(param, pattern)
    for name in names:  # before anything is listed
        if ".." in name.split("/") or _resolved_below(Path(_fixed(name)), folders) is None:
            raise _outside(param)
    found = _at_most(param, chain.from_iterable(map(_matches, names)))
    if any(_resolved_below(Path(name), folders) is None for name in found):
        raise _outside(param)
    if not found:
        raise InputError("invalid_value", f"{param}: no file matches the pattern", param=param)


def _names(param: str, pattern: str) -> list[str]:
    return _at_most(param, without_braces(pattern))


def _at_most(param: str, names: Iterable[str]) -> list[str]:
    """All of them. Raises InputError where they are too many."""
    found = list(islice(names, MAX_NAMES + 1))
    if len(found) > MAX_NAMES:
        message = f"{param}: the pattern names more than {MAX_NAMES} files"
        raise InputError("out_of_range", message, param=param, limit=MAX_NAMES)
    return found


def _matches(name: str) -> Iterator[str]:
    return glob.iglob(name, recursive=True)  # noqa: PTH207  as corpora are read


def _fixed(name: str) -> str:
    """What of a pattern is no pattern: the folder that it is looked for in."""
    found = re.search(r"[*?[]", name)
    return name if found is None else posixpath.dirname(name[: found.start()])


def _artifact(given: str, home: Path, roots: Sequence[str]) -> str:
    own = (home / "artifacts").resolve()
    try:
        path = Path(given) if given.startswith("/") else own / given
        folder = _resolved_below(path, [own, *_folders(roots)])
        there = folder is not None and (folder / "manifest.json").is_file()
    except ODDITIES as error:
        raise _unfit("artifact", error) from error
    if folder is None:
        message = "artifact: must be a name in HIVLP_HOME/artifacts, or an absolute path below it"
        raise InputError(OUTSIDE, f"{message} or {ROOTS}", param="artifact")
    if not there:
        message = f"artifact: no model {given!r}: it has no manifest.json"
        raise InputError("invalid_value", message, param="artifact")
    return str(folder)


def _folders(roots: Iterable[str]) -> list[Path]:
    return [Path(root).resolve() for root in roots if not is_url(root)]


def _resolved_below(path: Path, folders: Iterable[Path]) -> Path | None:
    """The path with its links followed, where that lies in one of the folders."""
    found = path.resolve()
    return found if any(found.is_relative_to(folder) for folder in folders) else None


def _outside(param: str) -> InputError:
    message = f"{param}: must be an absolute path or a URL below {ROOTS}"
    return InputError(OUTSIDE, message, param=param)


def _unfit(param: str, error: Exception) -> InputError:
    said = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return InputError("invalid_value", f"{param}: {said}", param=param)
