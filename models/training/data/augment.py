"""Random changes of a picture while training: crop, flip, colours. PIL only.

Notable: a crop is taken from what inference would show the tower, so where that cuts a picture's
middle out or pads it, a crop is no more stretched than that. A picture is never mirrored where its
caption speaks of a side. Every change is drawn from the generator that is passed, so a picture's
changes follow from the seed, the pass and the picture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageEnhance

from hivlp.models.artifact import ImagePreparation
from hivlp.models.encoder import RgbImage
from hivlp.models.runtime.preprocess import fit, resampling
from hivlp.models.training.data.settings import AugmentSettings

TRIES, MOST_LARGER = 10, 2.0
Box = tuple[float, float, float, float]


def augment(
    image: RgbImage,
    caption: str,
    spec: ImagePreparation,
    settings: AugmentSettings,
    rng: np.random.Generator,
) -> RgbImage:
    """A changed picture of the tower's size: (height, width, 3) uint8 in and out.

    With `crop_least` = 1 the picture keeps its size, and is fitted as it is for inference.
    """
    picture = Image.fromarray(image)
    if settings.crop_least < 1:
        picture = _seen(picture, spec, settings)
        box = crop_box(picture.width, picture.height, settings, rng)
        size = (spec.width, spec.height)
        picture = picture.resize(size, resampling(spec), box=box)
    if rng.random() < settings.flip and not speaks_of(caption, settings.flip_unless):
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(_recolour(picture, settings, rng))


def _seen(picture: Image.Image, spec: ImagePreparation, settings: AugmentSettings) -> Image.Image:
    """What inference sees of a picture, large enough that the smallest crop isn't blown up much.

    All of a picture that is stretched: cutting and stretching it is one step then.
    """
    if spec.fit == "stretch" and spec.crop_ratio == 1:
        return picture
    larger = min(1 / math.sqrt(settings.crop_least), MOST_LARGER)
    sides = {"width": round(spec.width * larger), "height": round(spec.height * larger)}
    return fit(picture, spec.model_copy(update=sides))


def crop_box(width: int, height: int, settings: AugmentSettings, rng: np.random.Generator) -> Box:
    """Left, top, right, bottom of a random part: share of the area and aspect within limits.

    The aspect is drawn evenly in its logarithm around that of the whole, so that what the tower
    sees is stretched by at most `crop_aspect` beyond what inference does. Where the part doesn't
    fit inside the picture after TRIES draws, the whole picture is taken.
    """
    for _ in range(TRIES):
        area = rng.uniform(settings.crop_least, 1.0)
        change = math.exp(rng.uniform(-1.0, 1.0) * math.log(settings.crop_aspect) / 2)
        wide, high = width * math.sqrt(area) * change, height * math.sqrt(area) / change
        if wide <= width and high <= height:
            left, top = rng.uniform(0, width - wide), rng.uniform(0, height - high)
            return left, top, left + wide, top + high
    return 0.0, 0.0, float(width), float(height)


def speaks_of(caption: str, words: Sequence[str]) -> bool:
    """Whether any word of a caption begins with one of `words`, whatever stands around it:
    "top-left" and "(left) arrow" speak of a side.
    """
    sides = tuple(word.lower() for word in words)
    return any(found.startswith(sides) for found in re.findall(r"\w+", caption.lower()))


def _recolour(
    picture: Image.Image, settings: AugmentSettings, rng: np.random.Generator
) -> Image.Image:
    """Brightness, contrast and saturation, each times a factor around 1."""
    for spread, change in (
        (settings.brightness, ImageEnhance.Brightness),
        (settings.contrast, ImageEnhance.Contrast),
        (settings.saturation, ImageEnhance.Color),
    ):
        factor = rng.uniform(1.0 - spread, 1.0 + spread)  # drawn always, so that streams stay alike
        if spread:
            picture = change(picture).enhance(factor)
    return picture
