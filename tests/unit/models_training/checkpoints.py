"""Small pretrained-looking checkpoints, pictures and towers that the tests make themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from hivlp.models.artifact import ImagePreparation
from hivlp.models.network.tower import Pooling, Tensors, Tower

WORDS = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
    *("red", "green", "blue", "yellow", "black", "white", "a", "picture", "of", "square"),
)
COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}
WIDTH, LAYERS = 16, 3


def bert_weights(seed: int = 0, *, layers: int = LAYERS) -> dict[str, Tensor]:
    """Random weights under Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    weights: dict[str, Tensor] = {
        "embeddings.word_embeddings.weight": random(len(WORDS), WIDTH),
        "embeddings.position_embeddings.weight": random(32, WIDTH),
        "embeddings.token_type_embeddings.weight": random(2, WIDTH),
        "embeddings.position_ids": torch.arange(32)[None],
        "pooler.dense.weight": random(WIDTH, WIDTH),
        "pooler.dense.bias": random(WIDTH),
    }

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = 1 + random(WIDTH)
        weights[f"{name}.bias"] = random(WIDTH)

    def linear(name: str, inner: int, outer: int) -> None:
        weights[f"{name}.weight"] = random(outer, inner)
        weights[f"{name}.bias"] = random(outer)

    norm("embeddings.LayerNorm")
    for layer in range(layers):
        prefix = f"encoder.layer.{layer}."
        for part in ("query", "key", "value"):
            linear(f"{prefix}attention.self.{part}", WIDTH, WIDTH)
        linear(f"{prefix}attention.output.dense", WIDTH, WIDTH)
        norm(f"{prefix}attention.output.LayerNorm")
        linear(f"{prefix}intermediate.dense", WIDTH, 2 * WIDTH)
        linear(f"{prefix}output.dense", 2 * WIDTH, WIDTH)
        norm(f"{prefix}output.LayerNorm")
    return weights


def bert_config(*, layers: int = LAYERS) -> dict[str, object]:
    """The config.json of `bert_weights`."""
    return {
        "model_type": "bert",
        "vocab_size": len(WORDS),
        "hidden_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 2 * WIDTH,
        "max_position_embeddings": 32,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "pad_token_id": 0,
    }


def make_bert(folder: Path, *, pooling: str | None = "mean_tokens", seed: int = 0) -> Path:
    """A Hugging Face folder of a small BERT; `pooling` None leaves 1_Pooling out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(bert_config()))
    save_file(bert_weights(seed), folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    if pooling is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        flags = {f"pooling_mode_{pooling}": True, "pooling_mode_max_tokens": False}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    return folder


def write_modules(folder: Path, *kinds: str, pooled: str) -> None:
    """modules.json as sentence-transformers writes it, with the pooling in folder `pooled`."""
    places = {"Pooling": pooled, "Normalize": "2_Normalize"}
    told = [{"type": f"sentence_transformers.{k}", "path": places.get(k, "")} for k in kinds]
    (folder / "modules.json").write_text(json.dumps(told))


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def tokens(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Token ids, padded to the longest: `input_ids` and `attention_mask`, (n, t) int64."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


class TinyVision(Tower):
    """A tower of 3 small convolutions, from a .tiny file: a family of the tests' own."""

    modality = "image"
    family = "tiny-vision"
    input_names = ("pixel_values",)

    def __init__(self, path: Path) -> None:
        super().__init__()
        torch.manual_seed(int(path.read_text()))
        self.path = path
        self.layers = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8))

    @property
    def depth(self) -> int:
        return 3

    @property
    def pooling(self) -> Pooling:
        return "mean"

    @property
    def preparation(self) -> ImagePreparation:
        return ImagePreparation(
            height=8, width=8, fit="stretch", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
        )

    @property
    def sources(self) -> tuple[Path, ...]:
        return (self.path,)

    def width(self, layer: int) -> int:
        return 8

    def begin(self, inputs: Tensors) -> Tensors:
        return {"maps": inputs["pixel_values"]}

    def advance(self, state: Tensors, inputs: Tensors, start: int, stop: int) -> Tensors:
        maps = state["maps"]
        for layer in self.layers[start:stop]:
            maps = layer(maps).tanh()
        return {"maps": maps}

    def pool(self, state: Tensors, inputs: Tensors, layer: int) -> Tensor:
        return state["maps"].mean((2, 3))


def make_pairs(folder: Path, *, of_each: int = 2) -> Path:
    """Pictures of noisy colours, `of_each` a colour, with metadata.jsonl."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    lines = []
    for name, colour in COLOURS.items():
        for i in range(of_each):
            noise = rng.integers(-20, 20, (10, 10, 3))
            pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{name}{i}.png")
            captions = [name, f"a picture of {name}", f"{name} square"]
            row = {"file_name": f"{name}{i}.png", "id": f"{name}-{i}", "captions": captions}
            lines.append(json.dumps(row | {"concept": name}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder
