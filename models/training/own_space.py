"""Is a cascade made of a checkpoint still that checkpoint? Asked of inputs that nothing was
fitted on.

Notable: *overlap@10* is the share of the checkpoint's own ten nearest that a level finds. The
finest level only turns the space, so less than all of them can only be rounding; early levels are
measured the same way. No label is used anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hivlp.models.levels import FloatArray
from hivlp.models.training.distil import embed_all
from hivlp.models.training.fitting import Corpus, FittedHeads, Heads, Mask, level_vectors
from hivlp.models.training.measures import TOP, Side, early_ranks, unit, width_for

SHARE, MOST = 0.1, 1000
"""What is held out of pictures, captions and texts: this share of each, and no more than that."""
SAME = 1e-6
"""Scores no further apart are equal: which of them is found first is rounding."""
AT_ONCE = 256


def hold_out(corpus: Corpus, seed: int) -> tuple[Corpus, Corpus]:
    """What is fitted on, and what is measured on."""
    rng = np.random.default_rng(seed)
    counts = (len(corpus.caption_group), len(corpus.picture_group), len(corpus.unlabelled[0]))
    held = [_some(count, rng) for count in counts]
    return corpus.only(*(~mask for mask in held)), corpus.only(*held)


def _some(count: int, rng: np.random.Generator) -> Mask:
    chosen = np.zeros(count, bool)
    most = min(MOST, max(1, int(count * SHARE))) if count > 1 else 0
    chosen[rng.choice(count, most, replace=False) if most else []] = True
    return chosen


def compare_with_checkpoint(
    fitted: Corpus, held: Corpus, heads: FittedHeads, dims: Sequence[int]
) -> dict[str, float]:
    """Overlap@10 of every level, and the K1 that level 1 needs, in both directions.

    Queries are held out; the gallery is all pictures, or all texts, of both corpora.
    """
    pictures = [np.concatenate(both) for both in zip(fitted.pictures, held.pictures, strict=True)]
    texts = [np.concatenate([*both]) for both in zip(_said(fitted), _said(held), strict=True)]
    found = _one_way("text_to_image", (heads.text, _said(held)), (heads.image, pictures), dims)
    return found | _one_way(
        "image_to_text", (heads.image, held.pictures), (heads.text, texts), dims
    )


def _said(corpus: Corpus) -> list[FloatArray]:
    return [np.concatenate(both) for both in zip(corpus.captions, corpus.unlabelled, strict=True)]


def _one_way(
    name: str,
    queries: tuple[Heads, list[FloatArray]],
    gallery: tuple[Heads, list[FloatArray]],
    dims: Sequence[int],
) -> dict[str, float]:
    asked = level_vectors(queries[0], queries[1])
    full = embed_all(gallery[0][-1], gallery[1][-1])
    there = [unit(full[:, :dim]) for dim in dims]
    own = unit(queries[1][-1]), unit(gallery[1][-1])
    overlaps = [overlap(own, (a, b)) for a, b in zip(asked, there, strict=True)]
    nobody = [np.zeros(len(each[0]), np.int64) for each in (asked, there)]
    ranks = early_ranks(Side(asked, nobody[0]), Side(there, nobody[1]))
    levels = {f"overlap@10_{name}_level{i}": each for i, each in enumerate(overlaps[:-1], 1)}
    return {
        f"overlap@10_{name}": overlaps[-1],
        **levels,
        f"k1_for_99_{name}": float(width_for(ranks)),
        f"queries_{name}": float(len(asked[0])),
        f"gallery_{name}": float(len(full)),
    }


def overlap(
    own: tuple[FloatArray, FloatArray], level: tuple[FloatArray, FloatArray], top: int = TOP
) -> float:
    """Share of the `top` nearest by `own` vectors that are among those by a `level`'s.

    Each is queries (n, d) and gallery (m, d), of length 1. A row that scores as high as the last of
    the true nearest is one of them.
    """
    top = min(top, len(own[1]))
    shares = []
    for start in range(0, len(own[0]), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        true = own[0][part] @ own[1].T
        least = np.partition(true, -top, axis=1)[:, [-top]]
        found = np.argpartition(-(level[0][part] @ level[1].T), top - 1, axis=1)[:, :top]
        shares.append((np.take_along_axis(true, found, 1) >= least - SAME).mean(1))
    return round(float(np.concatenate(shares).mean()), 4)


def compared_lines(measured: Mapping[str, float], levels: int) -> list[str]:
    """What was measured, for a reader."""
    lines = []
    for name in ("text_to_image", "image_to_text"):
        early = ", ".join(
            f"level {i} alone {measured[f'overlap@10_{name}_level{i}']:.3f}"
            for i in range(1, levels)
        )
        lines.append(
            f"{name.replace('_', ' ')}, {measured[f'queries_{name}']:.0f} held-out queries among "
            f"{measured[f'gallery_{name}']:.0f}: the finest level has "
            f"{measured[f'overlap@10_{name}']:.4f} of the checkpoint's own ten nearest; {early}; "
            f"K1 for .99 is {measured[f'k1_for_99_{name}']:.0f}"
        )
    return lines
