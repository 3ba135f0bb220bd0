"""SigLIP (arXiv 2303.15343) and SigLIP 2 (2502.14786) of a fixed resolution, both towers.

Notable: the text tower attends to its padding, up to the length it was trained with, and is read at
the last place; the vision tower has no class token and is read by attention. SigLIP 2's checkpoints
of a fixed resolution are SigLIP's but for the tokenizer; those of any resolution (NaFlex, model
type siglip2) are another network, which isn't read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hivlp.models.artifact import TextPreparation
from hivlp.models.levels import Modality
from hivlp.models.network.blocks import BlockShape
from hivlp.models.network.captions import CaptionShape, CaptionTower
from hivlp.models.network.checkpoint import load_strictly
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
from hivlp.models.network.pictures import PictureShape, PictureTower
from hivlp.models.network.pretrained import Layers, read_layers
from hivlp.models.network.tokenizer_files import (
    CONFIG,
    PIECES,
    TOKENIZER,
    check_tokenizer,
    pad_id,
)
from hivlp.models.network.tower import TowerError

# What a field that isn't said is in Hugging Face's configuration of this family.
BASE = Layers(12, BlockShape(768, 12, 3072))
EPS = 1e-6


class SiglipText(CaptionTower):
    """SigLIP's text tower."""

    family = "siglip"
    input_names = ("input_ids",)


class SiglipPicture(PictureTower):
    """SigLIP's vision tower."""

    family = "siglip"


def is_siglip(path: Path, modality: Modality) -> bool:
    """Whether `path` is a Hugging Face folder of SigLIP with this tower in it."""
    side = TEXT if modality == "text" else VISION
    return model_type(path) in ("siglip", "siglip2", f"siglip_{side}_model")


def load_siglip_text(path: Path) -> SiglipText:
    """The text tower of a folder. Raises TowerError."""
    folder = _folder(path, TEXT)
    own, layers = folder.own, _layers(folder.own)
    shape = CaptionShape(
        layers,
        own.whole("vocab_size", 32000),
        own.whole("max_position_embeddings", 64),
        "last",
        out=own.whole("projection_size", layers.block.width),
        bias=True,
    )
    tokenizer = check_tokenizer(path, PIECES, shape.vocabulary)
    if (path / CONFIG).is_file():
        # padding is attended to, so it must stand where it stood in training
        Fields.read(path / CONFIG).refuse("padding_side", "right")
    prepared = TextPreparation(
        tokenizer_file=TOKENIZER,
        max_tokens=shape.positions,
        pad_id=pad_id(path, tokenizer, own.whole("pad_token_id", 1, least=0)),
        pad_to_max=True,
    )
    tower = SiglipText(shape, folder.files(path / TOKENIZER), prepared)
    theirs = text_name(folder.prefix, norm="final_layer_norm", last=f"{folder.prefix}head")
    load_strictly(tower, folder.weights, folder.weight_file, theirs)
    return tower


def load_siglip_picture(path: Path) -> SiglipPicture:
    """The vision tower of a folder. Raises TowerError."""
    folder = _folder(path, VISION)
    own = folder.own
    own.refuse("num_channels", 3)
    own.refuse("vision_use_head", True)
    shape = PictureShape(
        _layers(own),
        own.sides("image_size", 224),
        own.sides("patch_size", 16),
        tokens=0,
        patch_bias=True,
        first_norm=False,
        pooling="attention",
    )
    processor = processor_file(path)
    tower = SiglipPicture(shape, folder.files(processor), read_processor(processor, shape.image))
    load_strictly(tower, folder.weights, folder.weight_file, picture_name(folder.prefix))
    return tower


def _folder(path: Path, side: Literal["text", "vision"]) -> TowerFolder:
    if model_type(path) == "siglip2":
        raise TowerError(
            path / "config.json",
            "field 'model_type' is 'siglip2': SigLIP 2 of any resolution (NaFlex) isn't read, only "
            "its checkpoints of a fixed resolution, whose model type is 'siglip'",
        )
    return TowerFolder.read(path, side)


def _layers(own: Fields) -> Layers:
    return read_layers(own, activation="gelu_pytorch_tanh", eps=EPS, base=BASE)
