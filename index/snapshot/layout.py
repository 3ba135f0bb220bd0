"""Names of the files of a snapshot; `docs/data-formats.md` describes what is in them."""

from __future__ import annotations

from hivlp.models.levels import GalleryKind, Modality

SIDES: tuple[Modality, ...] = ("image", "text")
ITEMS = "items.arrow"
ITEM_HASHES = "item_hashes.npy"
ITEM_ORDINALS = "item_ordinals.npy"
TEXTS = "text/texts.arrow"
ERASED = "erased.npy"
ROTATION = "rotation.npy"
STATES = "image/states.npy"
TABLE_SUFFIX = ".arrow"


def rows_file(side: Modality, gallery: GalleryKind, level: int) -> str:
    """The rows of a level: shared by all levels when nested, its own when per_exit."""
    return f"{side}/rows.npy" if gallery == "nested" else f"{side}/level{level}.npy"


def faiss_file(side: Modality, level: int) -> str:
    """A level as a FAISS index."""
    return f"{side}/level{level}.faiss"


def maskable_file(side: Modality) -> str:
    """Level 1 once more, in codes that take a mask, where its own refuse one."""
    return f"{side}/level1.maskable.faiss"


def graph_file(side: Modality, level: int) -> str:
    """The links of a level's graph."""
    return f"{side}/level{level}.hnsw"


def norms_file(side: Modality) -> str:
    """Inverse norms of the prefixes of nested rows, (L - 1, N)."""
    return f"{side}/inverse_norms.npy"


def row_items_file(side: Modality) -> str:
    """Ordinal of the item each row belongs to."""
    return f"{side}/row_items.npy"
