"""The BERT family of text towers (BERT, MiniLM, RoBERTa), from a local Hugging Face folder.

Notable: pooling comes from the file that sentence-transformers' list of modules names. A folder
without that list is read as its `1_Pooling` says, or at the first token, as BERT was trained.
Post-norm blocks end in a LayerNorm, so an early exit's state is normalised as the last one's is,
and no further norm is applied before pooling. An early exit says what every layer so far says, one
pooled vector after the other: layers differ, and pooling costs next to nothing. The last layer's
exit is the checkpoint's own output and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hivlp.models.artifact import TextPreparation
from hivlp.models.network.blocks import Block, BlockShape, attention_mask
from hivlp.models.network.checkpoint import (
    load_strictly,
    read_weights,
    renaming,
    shards,
    weight_file,
)
from hivlp.models.network.fields import Fields, read_list
from hivlp.models.network.folders import CONFIG, model_type
from hivlp.models.network.pooling import pool_first, pool_last, pool_mean
from hivlp.models.network.pretrained import Layers, read_layers
from hivlp.models.network.tokenizer_files import (
    BYTE_PAIRS,
    SENTENCE_CONFIG,
    TOKENIZER,
    WORD_PIECES,
    check_tokenizer,
)
from hivlp.models.network.tokenizer_files import CONFIG as TOKENIZER_CONFIG
from hivlp.models.network.tower import Pooling, Tensors, Tower, TowerError

POOLS: dict[Pooling, Callable[[Tensor, Tensor], Tensor]] = {
    "first": pool_first,
    "mean": pool_mean,
    "last": pool_last,
}
POOLING = Path("1_Pooling") / "config.json"
MODULE_LIST = "modules.json"
MODULES = ("Transformer", "Pooling", "Normalize")
# What sentence-transformers' newer file says under `pooling_mode` -> our name for it.
POOLING_MODES: dict[str, Pooling] = {"cls": "first", "mean": "mean", "lasttoken": "last"}
# The flag that is set in older files -> our name for it.
POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
# What a checkpoint carries that no early output reads.
_UNUSED = re.compile(
    r"(^|\.)(position_ids|token_type_ids)$|^pooler\.|^cls\.|^lm_head\.|^classifier\."
)
_PREFIX = re.compile(r"^(bert|roberta)\.")
# The first checkpoints (bert-base-uncased) have a norm's weights under TensorFlow's names.
_OLD_NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
_NEW_NORM = {"gamma": "weight", "beta": "bias"}
_NAMES = renaming(
    ("words.", "embeddings.word_embeddings."),
    ("positions.", "embeddings.position_embeddings."),
    ("types.", "embeddings.token_type_embeddings."),
    ("blocks.", "encoder.layer."),
    ("attention.query", "attention.self.query"),
    ("attention.key", "attention.self.key"),
    ("attention.value", "attention.self.value"),
    ("attention.out", "attention.output.dense"),
    ("attention_norm", "attention.output.LayerNorm"),
    ("feed.inner", "intermediate.dense"),
    ("feed.outer", "output.dense"),
    ("feed_norm", "output.LayerNorm"),
)


@dataclass(frozen=True, slots=True)
class BertShape:
    """Sizes of a BERT, and the row of `positions` that the first token has."""

    layers: Layers
    vocabulary: int
    positions: int
    types: int
    pad_id: int
    first_place: int = 0


# What a field that isn't said is in Hugging Face's configurations of the two families.
BERT = BertShape(
    Layers(12, BlockShape(768, 12, 3072, norm="post", eps=1e-12)), 30522, 512, 2, pad_id=0
)
ROBERTA = replace(BERT, vocabulary=50265, pad_id=1, first_place=2)


class BertTower(Tower):
    """A BERT whose layers are run in pieces."""

    modality = "text"
    family = "bert"
    input_names = ("input_ids", "attention_mask")
    carried_inputs = ("attention_mask",)

    def __init__(
        self, shape: BertShape, *, files: tuple[Path, ...], pooling: Pooling, max_tokens: int
    ) -> None:
        super().__init__()
        self.shape, self.layers, self.files = shape, shape.layers, files
        self.max_tokens = max_tokens
        self._pooling = pooling
        width, eps = self.layers.block.width, self.layers.block.eps
        self.words = nn.Embedding(shape.vocabulary, width)
        self.positions = nn.Embedding(shape.positions, width)
        self.types = nn.Embedding(shape.types, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.blocks = nn.ModuleList(Block(self.layers.block) for _ in range(self.layers.depth))

    @property
    def depth(self) -> int:
        """The number of layers."""
        return self.layers.depth

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return self.shape.vocabulary

    @property
    def layer_modules(self) -> Sequence[nn.Module]:
        """The blocks."""
        return list(self.blocks)

    @property
    def pooling(self) -> Pooling:
        """first, mean or last, as the checkpoint says."""
        return self._pooling

    @property
    def preparation(self) -> TextPreparation:
        """The checkpoint's tokenizer, token limit and padding id."""
        return TextPreparation(
            tokenizer_file=TOKENIZER,
            max_tokens=self.max_tokens,
            pad_id=self.shape.pad_id,
        )

    @property
    def sources(self) -> tuple[Path, ...]:
        """Configuration, weights and tokenizer."""
        return self.files

    def width(self, layer: int) -> int:
        """The hidden size, once for every state so far; at the last layer once."""
        return self.layers.block.width * (1 if layer == self.depth else layer + 1)

    def begin(self, inputs: Tensors) -> Tensors:
        """Embeddings of `input_ids` (n, t) int64; every token is of type 0."""
        ids = inputs["input_ids"]
        first = self.shape.first_place
        places = self.positions.weight[first : first + ids.shape[1]]
        hidden = self.norm(self.words(ids) + places + self.types.weight[0])  # (n, t, d)
        return {"hidden": hidden, "pooled": self._vector(hidden, inputs)}

    def advance(self, state: Tensors, inputs: Tensors, start: int, stop: int) -> Tensors:
        """Run layers start+1..stop on `hidden` (n, t, d), adding to `pooled` (n, width(stop))."""
        hidden, pooled = state["hidden"], [state["pooled"]]
        mask = attention_mask(hidden, inputs["attention_mask"])
        for block in self.blocks[start:stop]:
            hidden = block(hidden, mask)
            pooled.append(self._vector(hidden, inputs))
        return {"hidden": hidden, "pooled": torch.cat(pooled, 1)}

    def pool(self, state: Tensors, inputs: Tensors, layer: int) -> Tensor:
        """(n, width(layer)): a vector of length 1 for every state so far, or the last one's."""
        return self._vector(state["hidden"], inputs) if layer == self.depth else state["pooled"]

    def _vector(self, hidden: Tensor, inputs: Tensors) -> Tensor:
        """The checkpoint's pooling, (n, d), scaled to length 1 as the family's users do."""
        pooled = POOLS[self._pooling](hidden, inputs["attention_mask"])
        return F.normalize(pooled, dim=1)


class RobertaTower(BertTower):
    """A RoBERTa: its positions begin behind the padding token's own."""

    family = "roberta"


def is_bert(path: Path) -> bool:
    """Whether `path` is a Hugging Face folder of model type bert."""
    return model_type(path) == "bert"


def is_roberta(path: Path) -> bool:
    """Whether `path` is a Hugging Face folder of model type roberta."""
    return model_type(path) == "roberta"


def load_bert(path: Path) -> BertTower:
    """Load a folder of config.json, weights and tokenizer.json. Raises TowerError."""
    shape = _shape(Fields.read(path / CONFIG), BERT)
    check_tokenizer(path, WORD_PIECES, shape.vocabulary)
    return _load(path, BertTower, shape)


def load_roberta(path: Path) -> RobertaTower:
    """Load a folder of config.json, weights and tokenizer.json. Raises TowerError."""
    fields = Fields.read(path / CONFIG)
    shape = _shape(fields, ROBERTA)
    shape = replace(shape, first_place=shape.pad_id + 1)
    if shape.positions <= shape.first_place:
        raise fields.error("max_position_embeddings", f"must be above {shape.first_place}")
    check_tokenizer(path, BYTE_PAIRS, shape.vocabulary)
    return _load(path, RobertaTower, shape)


Kind = TypeVar("Kind", bound=BertTower)


def _load(path: Path, kind: type[Kind], shape: BertShape) -> Kind:
    file, pooling = weight_file(path), pooling_file(path)
    others = () if pooling is None else (pooling,)
    tower = kind(
        shape,
        files=(path / CONFIG, *shards(file), path / TOKENIZER, *others),
        pooling="first" if pooling is None else _pooling(Fields.read(pooling)),
        max_tokens=_max_tokens(path, shape.positions - shape.first_place),
    )
    kept = {_present_name(name): value for name, value in read_weights(file).items()}
    weights = {name: value for name, value in kept.items() if not _UNUSED.search(name)}
    load_strictly(tower, weights, file, _their_name)
    return tower


def _present_name(name: str) -> str:
    return _OLD_NORM.sub(lambda found: _NEW_NORM[found[0]], _PREFIX.sub("", name))


def _their_name(name: str) -> str:
    if name.startswith("norm."):
        return f"embeddings.LayerNorm.{name.removeprefix('norm.')}"
    return _NAMES(name)


def _shape(fields: Fields, base: BertShape) -> BertShape:
    """Sizes from config.json; what it doesn't say is as in `base`."""
    fields.refuse("position_embedding_type", "absolute")
    # a decoder's attention is causal
    fields.refuse("is_decoder", False)
    return replace(
        base,
        layers=read_layers(fields, activation="gelu", eps=base.layers.block.eps, base=base.layers),
        vocabulary=fields.whole("vocab_size", base.vocabulary),
        positions=fields.whole("max_position_embeddings", base.positions),
        types=fields.whole("type_vocab_size", base.types),
        pad_id=fields.whole("pad_token_id", base.pad_id, least=0),
    )


def pooling_file(folder: Path) -> Path | None:
    """Where sentence-transformers keeps the pooling: its list of modules says so.

    None for a folder without such a list and without `1_Pooling`, which is read at the first token.
    Raises TowerError for a list that names no pooling, or a file that isn't in the folder.
    """
    path, found = folder / MODULE_LIST, folder / POOLING
    if not path.is_file():
        return found if found.is_file() else None
    listed: Path | None = None
    for module in read_list(path):
        kind = module.text("type").rpartition(".")[2]
        if kind not in MODULES:
            raise module.error("type", f"is a {kind}: only {', '.join(MODULES)} are implemented")
        if kind == "Pooling":
            listed = _within(folder, module) / POOLING.name
            if not listed.is_file():
                missing = listed.relative_to(folder)
                raise module.error("path", f"is of a Pooling, but there is no {missing}")
    if listed is None:
        raise TowerError(path, "lists no Pooling: which of the tokens is read isn't said")
    return listed


def _within(folder: Path, module: Fields) -> Path:
    place = Path(module.text("path"))
    if place.is_absolute() or ".." in place.parts:
        raise module.error("path", f"leaves the folder: {str(place)!r}")
    return folder / place


def _pooling(told: Fields) -> Pooling:
    if "pooling_mode" in told:
        return POOLING_MODES[told.word("pooling_mode", POOLING_MODES)]
    chosen = [flag for flag, on in told.values.items() if flag.startswith("pooling_mode_") and on]
    if len(chosen) != 1 or chosen[0] not in POOLING_FLAGS:
        wanted = ", ".join(POOLING_FLAGS)
        raise TowerError(
            told.path, f"pooling modes {chosen}: exactly one of {wanted} is implemented"
        )
    return POOLING_FLAGS[chosen[0]]


def _max_tokens(path: Path, most: int) -> int:
    """The limit that sentence-transformers applies: its own file's before the tokenizer's."""
    own = Fields.read_if_there(path / SENTENCE_CONFIG)
    if "max_seq_length" in own:
        return min(own.whole("max_seq_length", least=2), most)
    # a float, as transformers writes 1e30 for no limit at all
    tokenizer = Fields.read_if_there(path / TOKENIZER_CONFIG)
    limit = tokenizer.number("model_max_length", most, above=1)
    return int(min(limit, most))
