"""How many bytes an index's searches may touch, before it is built."""

from __future__ import annotations

from hivlp.index.build.assemble import BuiltSide
from hivlp.index.level_index import Codec, Family
from hivlp.models.levels import GalleryKind

GRAPH_BYTES = 280
"""A row's links in one graph."""


def memory_bytes(
    side: BuiltSide,
    family: Family,
    level1: Codec,
    maskable: Codec | None,
    gallery: GalleryKind,
    *,
    materialise: bool,
) -> int:
    """Bytes of everything that a search may touch: rows, norms, codes and links.

    Levels that are kept as FAISS indexes besides (`materialise`, and each level of a per_exit
    gallery) are flat, 4 bytes a number, whatever the rows are kept as.
    """
    matrices = {id(rows.matrix): rows.matrix.nbytes for rows in side.rows.values()}
    norms = sum(4 for rows in side.rows.values() if rows.inverse_norms is not None)
    coarse = min(side.rows)
    codes = code_bytes(level1, side.rows[coarse].dim)
    codes += 0 if maskable is None else code_bytes(maskable, side.rows[coarse].dim)
    if materialise or gallery == "per_exit":
        codes += sum(4 * rows.dim for level, rows in side.rows.items() if level != coarse)
    links = 2 * GRAPH_BYTES if family == "graph" else 0
    return sum(matrices.values()) + side.size * (norms + codes + links)


def code_bytes(codec: Codec, dim: int) -> int:
    """Bytes of one row's codes: RaBitQ's are a bit a number and two fp32 factors."""
    sizes = {"flat": 4 * dim, "sq8": dim, "pq64x4fs": max(dim // 4, 1), "rabitqfs": dim // 8 + 8}
    return sizes[codec]
