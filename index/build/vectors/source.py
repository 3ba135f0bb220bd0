"""Where vectors of one's own are read from, a part at a time: what every reader answers.

A reader knows its size beforehand, gives a spread of its rows to fit a rotation on, and then every
row once, in order. Whether a row can be used is not its business, but for what it alone can see,
such as an embedding of another length (`RawBatch.reasons`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from hivlp.index.errors import CorpusError
from hivlp.index.snapshot.manifest import SourceKind

PART_NUMBERS = 8_000_000
"""Numbers of the vectors that are in memory at once, about: 32 MB as fp32."""
NUMBER = re.compile(r"([0-9]+)(?!.*[0-9])")


@dataclass(frozen=True, slots=True)
class RawBatch:
    """Neighbouring rows of one file, from row `first` on.

    `vectors` is (n, D) float16, float32 or float64, of any length, NaN where there is none; `table`
    an Arrow table of n rows of the other columns. `reasons` says by place in the batch what is
    wrong with rows that the reader could not read.
    """

    vectors: npt.NDArray[Any]
    table: Any
    file: Path
    first: int
    reasons: Mapping[int, str] = field(default_factory=dict)


class VectorSource(Protocol):
    """Vectors of one dimension, with ids and metadata beside."""

    @property
    def kind(self) -> SourceKind:
        """What it is, for the manifest."""

    @property
    def source(self) -> str:
        """What was given: a path, or a collection's name and address."""

    @property
    def root(self) -> Path:
        """The folder that pictures' references start at."""

    @property
    def dim(self) -> int:
        """Numbers of a vector."""

    @property
    def count(self) -> int:
        """Rows, usable or not."""

    @property
    def schema(self) -> Any:
        """The Arrow schema of every batch's table."""

    @property
    def rooted(self) -> bool:
        """Whether `root` is where pictures may lie; else their folder must be given."""

    @property
    def left_out(self) -> Sequence[str]:
        """Columns of bytes, which are not read."""

    @property
    def pictures_inside(self) -> bool:
        """Whether each row's picture lies as bytes in the row itself."""

    def sample(self, limit: int) -> Iterator[npt.NDArray[Any]]:
        """Up to about `limit` rows spread over all, (m, D) float16, float32 or float64 each, as
        they are in the files. Raises CorpusError.
        """

    def batches(self) -> Iterator[RawBatch]:
        """Every row once, in order. Raises CorpusError."""


def part_rows(dim: int) -> int:
    """How many vectors of a dimension are read at once."""
    return max(256, min(65_536, PART_NUMBERS // dim))


def files_of(given: Path, suffix: str) -> list[Path]:
    """The files that a path, a folder or a pattern (`part-*.npy`) names, in the order of the
    numbers in their names. Raises CorpusError where there is none.
    """
    if given.is_dir():
        found = [path for path in given.iterdir() if path.suffix.lower() == suffix]
    elif given.is_file():
        found = [given]
    else:
        found = [path for path in given.parent.glob(given.name) if path.is_file()]
    if not found:
        raise CorpusError(str(given), f"no {suffix} file here")
    wrong = next((path for path in found if path.suffix.lower() != suffix), None)
    if wrong is not None:
        raise CorpusError(str(wrong), f"not a {suffix} file")
    return sorted(found, key=lambda path: (number_of(path), path.name))


def number_of(path: Path) -> int:
    """The last number in a file's name, -1 without one."""
    found = NUMBER.search(path.stem)
    return int(found[1]) if found else -1


def by_number(paths: Sequence[Path]) -> dict[int, Path]:
    """Files by their number. Raises CorpusError naming two files of one number."""
    found: dict[int, Path] = {}
    for path in paths:
        other = found.setdefault(number_of(path), path)
        if other is not path:
            raise CorpusError(
                str(path),
                f"has the same number as {other.name}: name the wanted ones, as 'img_emb_*.npy'",
            )
    return found
