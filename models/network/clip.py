"""CLIP (arXiv 2103.00020), both towers, from a Hugging Face folder of both or of one.

Notable: the end token. The first checkpoints say `eos_token_id` 2, which is wrong, and are read at
the highest id of each text; later ones at the first token of the stated id. Both are followed.
"""

from __future__ import annotations

from pathlib import Path

from hivlp.models.artifact import TextPreparation
from hivlp.models.levels import Modality
from hivlp.models.network.blocks import BlockShape
from hivlp.models.network.captions import HIGHEST, CaptionShape, CaptionTower
from hivlp.models.network.checkpoint import has_weights, load_strictly
from hivlp.models.network.fields import Fields
from hivlp.models.network.folders import (
    TEXT,
    VISION,
    TowerFolder,
    model_type,
    picture_name,
    text_name,
)
from hivlp.models.network.image_processors import processor_file, read_processor
from hivlp.models.network.openclip import has_open_weights
from hivlp.models.network.pictures import PictureShape, PictureTower
from hivlp.models.network.pretrained import Layers, read_layers
from hivlp.models.network.tokenizer_files import CLIP_PAIRS, TOKENIZER, check_tokenizer

LEGACY_END, END = 2, 49407
# What a field that isn't said is in Hugging Face's configuration of this family.
TEXT_BASE = Layers(12, BlockShape(512, 8, 2048))
PICTURE_BASE = Layers(12, BlockShape(768, 12, 3072))
EPS = 1e-5
PROJECTION = 512


class ClipText(CaptionTower):
    """CLIP's text tower."""

    family = "clip"


class ClipPicture(PictureTower):
    """CLIP's vision tower."""

    family = "clip"


def is_clip(path: Path, modality: Modality) -> bool:
    """Whether `path` is a Hugging Face folder of CLIP with this tower in it."""
    own = f"clip_{TEXT if modality == 'text' else VISION}_model"
    # OpenCLIP's folders may bear a config.json of this family without weights for it
    read_there = has_open_weights(path) and not has_weights(path)
    return model_type(path) in ("clip", own) and not read_there


def load_clip_text(path: Path) -> ClipText:
    """The text tower of a folder. Raises TowerError."""
    folder = TowerFolder.read(path, TEXT)
    own, layers = folder.own, _layers(folder.own, TEXT_BASE)
    end = own.whole("eos_token_id", END, least=0)
    shape = CaptionShape(
        layers,
        own.whole("vocab_size", 49408),
        own.whole("max_position_embeddings", 77),
        "eos",
        HIGHEST if end == LEGACY_END else end,
        out=_projection(folder, "text_projection.weight"),
    )
    check_tokenizer(path, CLIP_PAIRS, shape.vocabulary)
    prepared = TextPreparation(
        tokenizer_file=TOKENIZER,
        max_tokens=shape.positions,
        pad_id=own.whole("pad_token_id", 1, least=0),
    )
    tower = ClipText(shape, folder.files(path / TOKENIZER), prepared)
    theirs = text_name(folder.prefix, norm="final_layer_norm", last="text_projection")
    load_strictly(tower, folder.weights, folder.weight_file, theirs)
    return tower


def load_clip_picture(path: Path) -> ClipPicture:
    """The vision tower of a folder. Raises TowerError."""
    folder = TowerFolder.read(path, VISION)
    own, layers = folder.own, _layers(folder.own, PICTURE_BASE)
    own.refuse("num_channels", 3)
    out = _projection(folder, "visual_projection.weight")
    shape = PictureShape(
        layers,
        own.sides("image_size", 224),
        own.sides("patch_size", 32),
        tokens=1,
        patch_bias=False,
        first_norm=True,
        pooling="first",
        last="projection" if out else "nothing",
        out=out,
    )
    processor = processor_file(path)
    tower = ClipPicture(shape, folder.files(processor), read_processor(processor, shape.image))
    theirs = picture_name(folder.prefix, last="visual_projection")
    load_strictly(tower, folder.weights, folder.weight_file, theirs)
    return tower


def _layers(own: Fields, base: Layers) -> Layers:
    return read_layers(own, activation="quick_gelu", eps=EPS, base=base)


def _projection(folder: TowerFolder, weight: str) -> int:
    """How many numbers come out; 0 where a tower was saved without its projection."""
    if folder.joint:
        return folder.whole.whole("projection_dim", PROJECTION)
    return folder.own.whole("projection_dim", PROJECTION) if weight in folder.weights else 0
