"""HiVLP as one module: two towers with exits, a cross-modal encoder, a head for hidden words.

Notable: what searches is `Hivlp.dual`, exported as any dual encoder is; `cross` re-ranks; `mlm` and
the temperature are there in training only. Defaults are the paper's sizes with our nested gallery,
L2-normalised embeddings and a learned temperature; `paper_literal` is the form of its text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from torch import Tensor, nn
from torch.nn import functional as F

from hivlp.models.errors import TrainingError
from hivlp.models.fields import number
from hivlp.models.levels import GalleryKind, LevelSpec, check_levels
from hivlp.models.network.blocks import Activation, NormPlacement
from hivlp.models.network.cross_modal import CrossModalEncoder, CrossModalShape
from hivlp.models.network.dual_encoder import DualEncoder
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.heads import MlpHead
from hivlp.models.network.mlm import Fusion, MlmHead
from hivlp.models.network.stack import (
    DROPOUT,
    EPS,
    MOST_INNER,
    MOST_LAYERS,
    MOST_WIDTH,
    StackShape,
    StackTower,
    at_least,
)
from hivlp.models.network.text_tower import TextShape, TextTower, TokenizerFile
from hivlp.models.network.vision import VisionShape, VisionTower
from hivlp.models.network.weights import initialise
from hivlp.models.objectives.temperature import Temperature

LEAST_SCALE, MOST_SCALE = 0.01, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossConfig:
    """Sizes of the cross-modal encoder; what it reads is as wide as the towers. `width` = 0 is the
    text tower's, `inner` = 0 four times the width.
    """

    depth: int = number(6, 1, MOST_LAYERS, "layers")
    width: int = number(0, 0, MOST_WIDTH)
    heads: int = number(12, 1, MOST_WIDTH)
    inner: int = number(0, 0, MOST_INNER)
    norm: NormPlacement = "pre"
    activation: Activation = "gelu"
    eps: float = number(1e-6, *EPS)
    dropout: float = number(0.0, *DROPOUT)

    def shape(self, text: int, image: int) -> CrossModalShape:
        """For towers of these widths. Raises TrainingError naming the field that can't be."""
        at_least("width", self.width, 0)
        return CrossModalShape(
            depth=self.depth,
            width=self.width or text,
            heads=self.heads,
            inner=self.inner,
            text=text,
            image=image,
            norm=self.norm,
            activation=self.activation,
            eps=self.eps,
            dropout=self.dropout,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HivlpConfig:
    """Everything that shapes a HiVLP besides its tokenizer.

    `vision_exits` and `text_exits`: layers after which each level is read, () for equal distances
    (4, 8, 12 of 12; 2, 4, 6 of 6); the last is the tower's depth. `dims`: numbers of each level's
    embedding, growing. `head_hidden`: width of the heads' MLP, 0 for linear heads.
    `temperature`: the factor that scores start from in a loss, trained where `learn_temperature`.
    `cross` None leaves the cross-modal encoder out, `mlm` False the head for hidden words; `fusion`
    is how that sees the picture. Raises TrainingError naming the field that can't be.
    """

    vision: VisionShape = field(default_factory=VisionShape)
    text: TextShape = field(default_factory=TextShape)
    vision_exits: tuple[int, ...] = number((), 1, MOST_LAYERS)
    text_exits: tuple[int, ...] = number((), 1, MOST_LAYERS)
    dims: tuple[int, ...] = number((128, 300, 768), 1, MOST_WIDTH)
    head_hidden: int = number(1536, 0, MOST_INNER)
    gallery: GalleryKind = "nested"
    normalise: bool = True
    temperature: float = number(20.0, LEAST_SCALE, MOST_SCALE)
    learn_temperature: bool = True
    cross: CrossConfig | None = field(default_factory=CrossConfig)
    mlm: bool = True
    fusion: Fusion = "add"

    def __post_init__(self) -> None:
        at_least("head_hidden", self.head_hidden, 0)
        for name, known in (("gallery", GalleryKind), ("fusion", Fusion)):
            if (given := getattr(self, name)) not in get_args(known):
                raise TrainingError(f"{name}: {given!r} is none of {', '.join(get_args(known))}")
        if not LEAST_SCALE <= self.temperature <= MOST_SCALE:
            limits = f"{LEAST_SCALE:g}..{MOST_SCALE:g}"
            raise TrainingError(f"temperature: {self.temperature} is not within {limits}")
        if self.gallery == "nested" and not self.normalise:
            raise TrainingError(
                "normalise: a nested gallery's levels are normalised prefixes; "
                "without it, gallery must be 'per_exit'"
            )
        self.levels("vision")
        self.levels("text")
        self.cross_shape()

    def levels(self, tower: str) -> tuple[LevelSpec, ...]:
        """The levels of the tower `vision` or `text`, coarse first."""
        shape: StackShape = getattr(self, tower)
        exits: tuple[int, ...] = getattr(self, f"{tower}_exits") or _equal_distances(
            shape.depth, len(self.dims)
        )
        if len(exits) != len(self.dims):
            raise TrainingError(
                f"{tower}_exits: {len(exits)} exits, but dims has {len(self.dims)} levels"
            )
        pairs = zip(exits, self.dims, strict=True)
        specs = [LevelSpec(i, layer, dim) for i, (layer, dim) in enumerate(pairs, 1)]
        try:
            check_levels(specs)
        except ValueError as error:
            raise TrainingError(
                f"{tower}_exits {list(exits)}, dims {list(self.dims)}: {error}"
            ) from error
        if exits[-1] != shape.depth:
            raise TrainingError(
                f"{tower}_exits: the last, {exits[-1]}, must be the tower's depth, {shape.depth}"
            )
        return tuple(specs)

    def cross_shape(self) -> CrossModalShape | None:
        """The cross-modal encoder's sizes beside these towers, if it has one."""
        if self.cross is None:
            return None
        try:
            return self.cross.shape(self.text.width, self.vision.width)
        except TrainingError as error:
            raise TrainingError(f"cross.{error}") from error


def _equal_distances(depth: int, count: int) -> tuple[int, ...]:
    if not 1 <= count <= depth:
        raise TrainingError(f"dims: {count} levels of a tower with depth {depth}")
    return tuple(round(depth * (i + 1) / count) for i in range(count))


def paper_literal(config: HivlpConfig) -> HivlpConfig:
    """The same sizes, trained as the paper's text reads: every exit has its own gallery vector,
    scores are plain inner products, nothing is normalised and no temperature divides.
    """
    return replace(
        config, gallery="per_exit", normalise=False, temperature=1.0, learn_temperature=False
    )


class Hivlp(nn.Module):
    """The dual encoder that searches, and what trains and re-ranks beside it.

    `normalise`: whether losses see L2-normalised embeddings; what `dual` answers always is, see
    docs/papers.md. Raises TrainingError for an `mlm` beside a text tower without word embeddings.
    """

    def __init__(
        self,
        dual: DualEncoder,
        *,
        cross: CrossModalEncoder | None = None,
        mlm: MlmHead | None = None,
        temperature: Temperature | None = None,
        normalise: bool = True,
    ) -> None:
        super().__init__()
        self.dual = dual
        self.cross = cross
        self.mlm = mlm
        self.temperature = Temperature(limit=MOST_SCALE) if temperature is None else temperature
        self.normalise = normalise
        words = getattr(dual.text.tower, "words", None)
        if mlm is not None and not isinstance(words, nn.Embedding):
            raise TrainingError(
                f"mlm: a text tower of family {dual.text.tower.family} has no word embeddings"
            )

    @property
    def word_embeddings(self) -> Tensor:
        """(vocabulary, width), those of the text tower."""
        words = self.dual.text.tower.words
        assert isinstance(words, nn.Embedding)
        return words.weight

    def compared(self, vectors: Tensor) -> Tensor:
        """A head's answers as the losses compare them: (n, dim) in and out."""
        return F.normalize(vectors, dim=1) if self.normalise else vectors


def make_hivlp(config: HivlpConfig, tokenizer: Path) -> Hivlp:
    """A HiVLP with fresh weights, drawn from torch's global generator.

    `tokenizer`: a tokenizer.json. Raises TowerError for one that a text tower can't be built on.
    """
    vision = VisionTower(config.vision)
    text = TextTower(config.text, TokenizerFile.read(tokenizer, config.text.pad_token))
    dual = DualEncoder(
        _with_heads(text, config.levels("text"), config.head_hidden),
        _with_heads(vision, config.levels("vision"), config.head_hidden),
        config.gallery,
    )
    cross = config.cross_shape()
    head = None
    if config.mlm:
        width, image = config.text.width, config.vision.width
        head = MlmHead(width, text.vocabulary, image=image, fusion=config.fusion)
    temperature = Temperature(config.temperature, limit=MOST_SCALE)
    return Hivlp(
        dual,
        cross=None if cross is None else CrossModalEncoder(cross),
        mlm=head,
        temperature=temperature.requires_grad_(config.learn_temperature),
        normalise=config.normalise,
    )


def _with_heads(tower: StackTower, levels: tuple[LevelSpec, ...], hidden: int) -> TowerExits:
    heads = [MlpHead(tower.width(spec.exit_layer), spec.dim, hidden) for spec in levels]
    for head in heads:
        initialise(head, tower.shape.width)
    return TowerExits(tower, [spec.exit_layer for spec in levels], heads)
