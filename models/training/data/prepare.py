"""Drawn pictures with their captions to the tensors of a batch, in whichever process loads them.

One caption is drawn each time a picture is, then the picture is decoded, changed and scaled by the
functions that export, build and query share. What is random belongs to one drawn picture: its
seed is (the run's seed, the pass, the picture's number), so a batch is the same whoever makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from torch import Tensor

from hivlp.models.artifact import ImagePreparation, TextPreparation
from hivlp.models.encoder import RgbImage
from hivlp.models.errors import TrainingError
from hivlp.models.runtime.images import ImageLimits, decode_image
from hivlp.models.runtime.preprocess import preprocess
from hivlp.models.runtime.texts import Tokenizer
from hivlp.models.training.data.augment import augment
from hivlp.models.training.data.failures import LeftOut
from hivlp.models.training.data.masking import Vocabulary, mask_tokens
from hivlp.models.training.data.order import DRAW, stream
from hivlp.models.training.data.settings import AugmentSettings, MaskSettings
from hivlp.models.training.data.sources import UsablePicture

LIMITS = ImageLimits(max_bytes=64 * 2**20, max_pixels=100_000_000)
MASK_TOKENS = ("[MASK]", "<mask>")
Ids = npt.NDArray[np.int64]


class Loaded(TypedDict):
    """A batch on its way from a loading process: tensors for `Batch`, what was left out, usable
    pictures of files that were read to their end (of streams), or the error that ended it, since
    one that is raised there arrives wrapped.
    """

    tensors: dict[str, Tensor]
    broken: list[LeftOut]
    parts: dict[int, int]
    error: str | None


def failed(error: Exception, broken: Sequence[LeftOut] = ()) -> Loaded:
    """No batch, but the reason for it, and what was left out on the way there."""
    return {"tensors": {}, "broken": list(broken), "parts": {}, "error": str(error)}


@dataclass(frozen=True, slots=True)
class Preparation:
    """How pictures and captions become tensors; `tokenizer` is the folder of the tokenizer's file.

    Without `mask`, nothing is masked.
    """

    tokenizer: Path
    text: TextPreparation
    image: ImagePreparation
    augment: AugmentSettings
    mask: MaskSettings | None
    seed: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """One drawn picture: pixels, token ids without padding, item number, its own random stream."""

    pixels: RgbImage
    ids: Ids
    item: int
    rng: np.random.Generator


class Preparer:
    """Makes prepared pictures, and batches of them."""

    def __init__(self, spec: Preparation) -> None:
        """Raises ArtifactError for a tokenizer that can't be read, TrainingError without [MASK]."""
        self._spec = spec
        self._tokenizer = Tokenizer(spec.tokenizer, spec.text)
        self._vocabulary = None
        if spec.mask is not None:
            self._vocabulary = read_vocabulary(spec.tokenizer / spec.text.tokenizer_file)

    def prepare(self, found: UsablePicture, data: bytes, *keys: int) -> Prepared:
        """One picture, with the random numbers of `keys`. Raises InputError for a broken one."""
        spec = self._spec
        rng = stream(spec.seed, DRAW, *keys)
        caption = found.captions[int(rng.integers(len(found.captions)))]
        tokens = self._tokenizer.encode([caption], param="caption").inputs
        ids = tokens["input_ids"][0, : int(tokens["attention_mask"][0].sum())]
        image = decode_image(data, LIMITS, param=found.picture)
        pixels = augment(image, caption, spec.image, spec.augment, rng)
        return Prepared(pixels, ids.astype(np.int64), found.item, rng)

    def batch(self, rows: Sequence[Prepared]) -> dict[str, Tensor]:
        """The fields of `Batch`: pictures float32, everything else int64.

        Raises TrainingError for a batch that doesn't fit into memory.
        """
        try:
            return self._batch(rows)
        except MemoryError as error:
            size = self._spec.image.width
            raise TrainingError(
                f"train.batch: {len(rows)} pictures with model.vision.image_size = {size} don't "
                f"fit into memory: {error}"
            ) from error

    def _batch(self, rows: Sequence[Prepared]) -> dict[str, Tensor]:
        spec = self._spec
        # A cropped picture has been fitted and has its size: nothing of it must be cut or padded.
        cropped, done = spec.augment.crop_least < 1, {"fit": "stretch", "crop_ratio": 1.0}
        image = spec.image.model_copy(update=done) if cropped else spec.image
        ids, mask = self._padded([row.ids for row in rows])
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "pixel_values": preprocess([row.pixels for row in rows], image),
            "input_ids": ids,
            "attention_mask": mask,
            "item": np.asarray([row.item for row in rows], np.int64),
        }
        if self._vocabulary is not None and spec.mask is not None:
            streams = [row.rng for row in rows]
            hidden, labels = mask_tokens(ids, self._vocabulary, spec.mask, streams)
            arrays |= {"mlm_ids": hidden, "mlm_labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _padded(self, rows: Sequence[Ids]) -> tuple[Ids, Ids]:
        """Ids and mask, (n, t): t is the longest row's length, or what the tower always wants."""
        text = self._spec.text
        width = text.max_tokens if text.pad_to_max else max(len(row) for row in rows)
        ids = np.full((len(rows), width), text.pad_id, np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = 1
        return ids, mask


def read_vocabulary(path: Path) -> Vocabulary:
    """What masking needs to know of a tokenizer.json. Raises TrainingError without [MASK]."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    found = (tokenizer.token_to_id(token) for token in MASK_TOKENS)
    mask = next((token for token in found if token is not None), None)
    if mask is None:
        raise TrainingError(
            f"{path}: no token {' or '.join(MASK_TOKENS)}, which masked language modelling needs; "
            "model.mlm = false trains without it"
        )
    added = tokenizer.get_added_tokens_decoder()
    special = {token for token, entry in added.items() if entry.special}
    special |= {mask, *tokenizer.encode("").ids}
    plain = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()) - special)
    return Vocabulary(mask, tuple(sorted(special)), np.asarray(plain, np.int64))
