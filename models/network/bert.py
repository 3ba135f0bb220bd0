"""The BERT family of text towers, from a local Hugging Face folder.

Notable: pooling comes from the folder's `1_Pooling/config.json` (sentence-transformers), else it is
the first token, as BERT was trained. Post-norm blocks end in a LayerNorm, so an early exit's state
is normalised as the last one's is, and no further norm is applied before pooling. An early exit
says what every layer so far says, one pooled vector after the other: layers differ, and pooling
costs next to nothing. The last layer's exit is the checkpoint's own output and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hivlp.models.artifact import TextPreparation
from hivlp.models.network.checkpoint import load_strictly, read_json, read_safetensors
from hivlp.models.network.pooling import pool_first, pool_last, pool_mean
from hivlp.models.network.tower import Pooling, Tensors, Tower, TowerError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
POOLS: dict[Pooling, Callable[[Tensor, Tensor], Tensor]] = {
    "first": pool_first,
    "mean": pool_mean,
    "last": pool_last,
}
# `1_Pooling/config.json`: the flag that is set -> our name for it.
POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
# What a checkpoint carries that no early output reads.
_UNUSED = re.compile(r"(^|\.)position_ids$|^pooler\.|^cls\.")
_PREFIX = re.compile(r"^bert\.")


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes of a BERT, named as in its config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    hidden_act: str
    pad_token_id: int = 0


class BertBlock(nn.Module):
    """Self-attention and feed-forward, each added and then normalised (post-norm)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.heads = config.num_attention_heads
        self.activation = ACTIVATIONS[config.hidden_act]
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.mixed = nn.Linear(width, width)
        self.mixed_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.inner = nn.Linear(width, inner)
        self.outer = nn.Linear(inner, width)
        self.outer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """One layer: hidden (n, t, d), mask (n, 1, 1, t) bool, True where attended to."""
        attended = F.scaled_dot_product_attention(
            self._split(self.query(hidden)),
            self._split(self.key(hidden)),
            self._split(self.value(hidden)),
            attn_mask=mask,
        )  # (n, heads, t, d / heads)
        joined = attended.transpose(1, 2).flatten(2)  # (n, t, d)
        hidden = self.mixed_norm(hidden + self.mixed(joined))
        fed: Tensor = self.outer(self.activation(self.inner(hidden)))
        normed: Tensor = self.outer_norm(hidden + fed)
        return normed

    def _split(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        return x.reshape(n, tokens, self.heads, width // self.heads).transpose(1, 2)


class BertTower(Tower):
    """A BERT whose layers are run in pieces."""

    modality = "text"
    family = "bert"
    input_names = ("input_ids", "attention_mask")
    carried_inputs = ("attention_mask",)

    def __init__(
        self, config: BertConfig, *, folder: Path, pooling: Pooling, max_tokens: int
    ) -> None:
        super().__init__()
        self.config = config
        self.folder = folder
        self.max_tokens = max_tokens
        self._pooling = pooling
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.types = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.blocks = nn.ModuleList(BertBlock(config) for _ in range(config.num_hidden_layers))

    @property
    def depth(self) -> int:
        """The number of layers."""
        return self.config.num_hidden_layers

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return self.config.vocab_size

    @property
    def pooling(self) -> Pooling:
        """first, mean or last, as the checkpoint says."""
        return self._pooling

    @property
    def preparation(self) -> TextPreparation:
        """The checkpoint's tokenizer, token limit and padding id."""
        return TextPreparation(
            tokenizer_file="tokenizer.json",
            max_tokens=self.max_tokens,
            pad_id=self.config.pad_token_id,
        )

    @property
    def sources(self) -> tuple[Path, ...]:
        """Configuration, weights and tokenizer."""
        names = ("config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json")
        return tuple(self.folder / name for name in names if (self.folder / name).is_file())

    def width(self, layer: int) -> int:
        """The hidden size, once for every state so far; at the last layer once."""
        return self.config.hidden_size * (1 if layer == self.depth else layer + 1)

    def begin(self, inputs: Tensors) -> Tensors:
        """Embeddings of `input_ids` (n, t) int64; every token is of type 0."""
        ids = inputs["input_ids"]
        places = self.positions.weight[: ids.shape[1]]
        hidden = self.norm(self.words(ids) + places + self.types.weight[0])  # (n, t, d)
        return {"hidden": hidden, "pooled": self._vector(hidden, inputs)}

    def advance(self, state: Tensors, inputs: Tensors, start: int, stop: int) -> Tensors:
        """Run layers start+1..stop on `hidden` (n, t, d), adding to `pooled` (n, width(stop))."""
        mask = inputs["attention_mask"].bool()[:, None, None, :]
        hidden, pooled = state["hidden"], [state["pooled"]]
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


def is_bert(path: Path) -> bool:
    """Whether `path` is a Hugging Face folder of model type bert."""
    config = path / "config.json"
    return config.is_file() and read_json(config).get("model_type") == "bert"


def load_bert(path: Path) -> BertTower:
    """Load a folder of config.json, model.safetensors and tokenizer.json. Raises TowerError."""
    settings = read_json(path / "config.json")
    config = _config(settings, path / "config.json")
    if not (path / "tokenizer.json").is_file():
        raise TowerError(path / "tokenizer.json", "no such file")
    tower = BertTower(
        config,
        folder=path,
        pooling=_pooling(path / "1_Pooling" / "config.json"),
        max_tokens=_max_tokens(path, config),
    )
    weights = read_safetensors(path / "model.safetensors")
    kept = {_PREFIX.sub("", name): value for name, value in weights.items()}
    named = {_our_name(n): v.float() for n, v in kept.items() if not _UNUSED.search(n)}
    load_strictly(tower, named, path / "model.safetensors")
    return tower


def _config(settings: dict[str, Any], path: Path) -> BertConfig:
    fields = BertConfig.__dataclass_fields__
    missing = [n for n in fields if n not in settings and n != "pad_token_id"]
    if missing:
        raise TowerError(path, f"field {missing[0]!r} is missing")
    config = BertConfig(**{name: settings[name] for name in fields if name in settings})
    if config.hidden_act not in ACTIVATIONS:
        raise TowerError(path, f"hidden_act {config.hidden_act!r}: one of {', '.join(ACTIVATIONS)}")
    if settings.get("position_embedding_type", "absolute") != "absolute":
        raise TowerError(path, "position_embedding_type: only 'absolute' is implemented")
    if config.hidden_size % config.num_attention_heads:
        raise TowerError(path, "hidden_size must be a multiple of num_attention_heads")
    return config


def _pooling(path: Path) -> Pooling:
    if not path.is_file():
        return "first"
    chosen = [
        flag for flag, on in read_json(path).items() if flag.startswith("pooling_mode") and on
    ]
    if len(chosen) != 1 or chosen[0] not in POOLING_FLAGS:
        wanted = ", ".join(POOLING_FLAGS)
        raise TowerError(path, f"pooling modes {chosen}: exactly one of {wanted} is implemented")
    return POOLING_FLAGS[chosen[0]]


def _max_tokens(path: Path, config: BertConfig) -> int:
    stated = path / "sentence_bert_config.json"
    if not stated.is_file():
        return config.max_position_embeddings
    limit = read_json(stated).get("max_seq_length") or config.max_position_embeddings
    return min(int(limit), config.max_position_embeddings)


_RENAMES = (
    ("embeddings.word_embeddings.", "words."),
    ("embeddings.position_embeddings.", "positions."),
    ("embeddings.token_type_embeddings.", "types."),
    ("embeddings.LayerNorm.", "norm."),
    ("encoder.layer.", "blocks."),
    ("attention.self.", ""),
    ("attention.output.dense.", "mixed."),
    ("attention.output.LayerNorm.", "mixed_norm."),
    ("intermediate.dense.", "inner."),
    ("output.dense.", "outer."),
    ("output.LayerNorm.", "outer_norm."),
)


def _our_name(name: str) -> str:
    for theirs, ours in _RENAMES:
        name = name.replace(theirs, ours)
    return name
