"""Is a cascade still the model that it was made of? Asked of inputs that nothing was fitted on.

Notable: *overlap@10* is the share of that model's own ten nearest that a level finds. The finest
level of a frozen checkpoint only turns its space, so less than all of them can only be rounding;
early levels are measured the same way. Where layers were trained, the model to keep is the one
before. No label is used anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
DIRECTIONS = ("text_to_image", "image_to_text")
Embed = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, slots=True)
class Parts:
    """A corpus in two: what is fitted on, and what is held out to measure on."""

    fitted: Corpus
    held: Corpus

    @property
    def texts(self) -> list[FloatArray]:
        """Every text, by exit."""
        return _joined(_said(self.fitted), _said(self.held))

    @property
    def held_texts(self) -> list[FloatArray]:
        """Texts held out, by exit."""
        return _said(self.held)

    @property
    def pictures(self) -> list[FloatArray]:
        """Every picture, by exit."""
        return _joined(self.fitted.pictures, self.held.pictures)


def _said(corpus: Corpus) -> list[FloatArray]:
    return _joined(corpus.captions, corpus.unlabelled)


def _joined(one: Sequence[FloatArray], two: Sequence[FloatArray]) -> list[FloatArray]:
    return [np.concatenate(both) for both in zip(one, two, strict=True)]


@dataclass(frozen=True, slots=True)
class Original:
    """How the model to keep ranks: by direction, vectors of length 1 of queries and gallery."""

    vectors: Mapping[str, tuple[FloatArray, FloatArray]]

    @staticmethod
    def of(parts: Parts, text: Embed, image: Embed) -> Original:
        """Of a model that makes vectors of last features."""
        pictures = image(parts.held.pictures[-1]), image(parts.pictures[-1])
        texts = text(parts.held_texts[-1]), text(parts.texts[-1])
        return Original(
            {
                "text_to_image": (unit(texts[0]), unit(pictures[1])),
                "image_to_text": (unit(pictures[0]), unit(texts[1])),
            }
        )

    @staticmethod
    def of_checkpoint(parts: Parts) -> Original:
        """Of a checkpoint whose towers share a space: what they give is the vector."""
        return Original.of(parts, unit, unit)

    @staticmethod
    def of_heads(parts: Parts, heads: FittedHeads) -> Original:
        """Of fitted heads: their finest level."""
        return Original.of(
            parts,
            lambda rows: embed_all(heads.text[-1], rows),
            lambda rows: embed_all(heads.image[-1], rows),
        )


def hold_out(corpus: Corpus, seed: int) -> Parts:
    """A tenth of everything is held out; the same rows of a corpus of the same size."""
    rng = np.random.default_rng(seed)
    counts = (len(corpus.caption_group), len(corpus.picture_group), len(corpus.unlabelled[0]))
    held = [_some(count, rng) for count in counts]
    return Parts(corpus.only(*(~mask for mask in held)), corpus.only(*held))


def _some(count: int, rng: np.random.Generator) -> Mask:
    chosen = np.zeros(count, bool)
    most = min(MOST, max(1, int(count * SHARE))) if count > 1 else 0
    chosen[rng.choice(count, most, replace=False) if most else []] = True
    return chosen


def compare_with_original(
    parts: Parts, heads: FittedHeads, dims: Sequence[int], original: Original
) -> dict[str, float]:
    """Overlap@10 of every level with `original`, and the K1 that level 1 needs, in both directions.

    Queries are held out; the gallery is all pictures, or all texts, of both parts. K1 is for .99 of
    the top 10 of this model's own finest level.
    """
    text_to_image, image_to_text = DIRECTIONS
    text, image = (heads.text, parts.held_texts), (heads.image, parts.held.pictures)
    found = _one_way(text_to_image, text, (heads.image, parts.pictures), dims, original)
    return found | _one_way(image_to_text, image, (heads.text, parts.texts), dims, original)


def _one_way(
    name: str,
    queries: tuple[Heads, list[FloatArray]],
    gallery: tuple[Heads, list[FloatArray]],
    dims: Sequence[int],
    original: Original,
) -> dict[str, float]:
    asked = level_vectors(queries[0], queries[1])
    full = embed_all(gallery[0][-1], gallery[1][-1])
    there = [unit(full[:, :dim]) for dim in dims]
    own = original.vectors[name]
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


def compared_lines(measured: Mapping[str, float], levels: int, whose: str) -> list[str]:
    """What was measured, for a reader; `whose` ten nearest were to be found."""
    lines = []
    for name in DIRECTIONS:
        early = ", ".join(
            f"level {i} alone {measured[f'overlap@10_{name}_level{i}']:.3f}"
            for i in range(1, levels)
        )
        lines.append(
            f"{name.replace('_', ' ')}, {measured[f'queries_{name}']:.0f} held-out queries among "
            f"{measured[f'gallery_{name}']:.0f}: the finest level has "
            f"{measured[f'overlap@10_{name}']:.4f} of {whose} own ten nearest; {early}; "
            f"K1 for .99 is {measured[f'k1_for_99_{name}']:.0f}"
        )
    return lines
