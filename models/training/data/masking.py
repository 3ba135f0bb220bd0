"""Masked language modelling: which tokens are hidden, and what stands in their place.

As in BERT: of 15 % of the tokens, 80 % become [MASK], 10 % any other token, 10 % stay. Notable: the
number is the rounded share of each text and at least one, so that a short caption isn't left out;
every draw belongs to a text, so that it doesn't depend on the batch around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hivlp.models.training.data.settings import MaskSettings

NOT_MASKED = -100
"""Label of a token that isn't to be told; what torch's cross entropy passes over."""
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids of a tokenizer: which one is [MASK], which are special and never hidden, and the others,
    (m,) int64, one of which may stand for a hidden one.
    """

    mask: int
    special: tuple[int, ...]
    plain: Ids


def mask_tokens(
    ids: Ids,
    vocabulary: Vocabulary,
    settings: MaskSettings,
    streams: Sequence[np.random.Generator],
) -> tuple[Ids, Ids]:
    """Hide tokens of a batch: (n, t) int64 in; ids with tokens hidden, and labels, (n, t) int64.

    `streams` holds one generator for each text.
    """
    hidden, labels = ids.copy(), np.full_like(ids, NOT_MASKED)
    plain = vocabulary.plain
    for row, rng in enumerate(streams):
        places = np.flatnonzero(~np.isin(ids[row], vocabulary.special))
        if not len(places):
            continue
        count = max(1, round(settings.share * len(places)))
        chosen = rng.choice(places, count, replace=False)
        labels[row, chosen] = ids[row, chosen]
        fate = rng.random(count)
        others = plain[rng.integers(len(plain), size=count)]
        masked = fate < settings.masked
        random = ~masked & (fate < settings.masked + settings.random)
        hidden[row, chosen[masked]] = vocabulary.mask
        hidden[row, chosen[random]] = others[random]
    return hidden, labels
