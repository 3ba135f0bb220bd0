"""How many bytes a version has on the disk, and its searches may touch, before it is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hivlp.index.backends.choose import codec_for
from hivlp.index.build.assemble import BuiltSide, maskable_beside
from hivlp.index.build.wishes import FEW_ROWS, Wishes
from hivlp.index.level_index import Codec, Family, RowsType
from hivlp.models.levels import GalleryKind

GRAPH_BYTES = 280
"""A row's links in one graph."""
ROW_BYTES = 8
"""The item of a row."""
ITEM_BYTES = 16
"""An item's place in the id index."""


@dataclass(frozen=True, slots=True)
class SideShape:
    """What the sizes of a side's files follow from; `dims` are the levels', the coarsest first."""

    rows: int
    dims: tuple[int, ...]
    gallery: GalleryKind
    number_bytes: int = 4

    @staticmethod
    def of(side: BuiltSide, gallery: GalleryKind) -> SideShape:
        """Of a side whose rows are written."""
        levels = [side.rows[level] for level in sorted(side.rows)]
        dims = tuple(rows.dim for rows in levels)
        return SideShape(side.size, dims, gallery, levels[0].matrix.dtype.itemsize)

    @staticmethod
    def planned(
        rows: int, dims: Sequence[int], gallery: GalleryKind, rows_type: RowsType
    ) -> SideShape:
        """Of a side that is to be written."""
        number_bytes = np.dtype(np.float16 if rows_type == "fp16" else np.float32).itemsize
        return SideShape(rows, tuple(dims), gallery, number_bytes)

    def level_bytes(
        self, family: Family, level1: Codec, maskable: Codec | None, *, materialise: bool
    ) -> int:
        """Bytes of everything that a search may touch: rows, norms, codes and links."""
        nested = self.gallery == "nested"
        numbers = self.number_bytes * (self.dims[-1] if nested else sum(self.dims))
        norms = 4 * (len(self.dims) - 1) if nested else 0
        index = self.index_bytes(family, level1, maskable, materialise=materialise)
        return self.rows * (numbers + norms) + index

    def index_bytes(
        self, family: Family, level1: Codec, maskable: Codec | None, *, materialise: bool
    ) -> int:
        """Bytes of codes and links.

        Levels that are kept as FAISS indexes besides (`materialise`, and each level of a per_exit
        gallery) are flat, 4 bytes a number, whatever the rows are kept as.
        """
        codes = code_bytes(level1, self.dims[0])
        codes += 0 if maskable is None else code_bytes(maskable, self.dims[0])
        if materialise or self.gallery != "nested":
            codes += 4 * sum(self.dims[1:])
        links = 2 * GRAPH_BYTES if family == "graph" else 0
        return self.rows * (codes + links)

    def file_bytes(self, wishes: Wishes, *, materialise: bool) -> tuple[int, int]:
        """Bytes of the side's files: the least and the most that a build may choose."""
        sizes = []
        for family, wanted in wishes.possible(self.rows):
            codec = codec_for(wanted, self.rows)
            maskable = maskable_beside(codec, wishes.must)
            sizes.append(self.level_bytes(family, codec, maskable, materialise=materialise))
        rest = ROW_BYTES * self.rows
        return min(sizes) + rest, max(sizes) + rest

    def sure_bytes(self, wishes: Wishes, *, materialise: bool) -> int:
        """Bytes of the files of so many rows or more, on one side or two: as of many rows, which
        may get smaller codes than few.
        """
        many = replace(self, rows=max(self.rows, FEW_ROWS + 1))
        least, _ = many.file_bytes(wishes, materialise=materialise)
        return least * self.rows // many.rows


def code_bytes(codec: Codec, dim: int) -> int:
    """Bytes of one row's codes: RaBitQ's are a bit a number and two fp32 factors."""
    sizes = {"flat": 4 * dim, "sq8": dim, "pq64x4fs": max(dim // 4, 1), "rabitqfs": dim // 8 + 8}
    return sizes[codec]
