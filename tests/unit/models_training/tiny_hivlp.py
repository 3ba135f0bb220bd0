"""A HiVLP of a few thousand weights, its tokenizer, and batches for it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from hivlp.models.network.hivlp import CrossConfig, Hivlp, HivlpConfig, make_hivlp
from hivlp.models.network.text_tower import TextShape
from hivlp.models.network.vision import VisionShape
from hivlp.models.training.hivlp_losses import NOT_MASKED, Batch

SPECIAL = ("[PAD]", "[UNK]", "[TXT]", "[SEP]", "[MASK]")
WORDS = (
    *SPECIAL,
    *("a", "red", "green", "blue", "square", "circle", "on", "the", "left", "right", "of"),
    *("big", "small", "thing"),
)
MASK = SPECIAL.index("[MASK]")

TINY = HivlpConfig(
    vision=VisionShape(depth=3, width=12, heads=2, inner=16, image_size=8, patch=4),
    text=TextShape(depth=3, width=12, heads=2, inner=16, max_tokens=10),
    dims=(3, 5, 8),
    head_hidden=9,
    cross=CrossConfig(depth=2, heads=2, inner=16),
)


def save_tokenizer(path: Path, *, template: str = "[TXT] $A [SEP]") -> Path:
    """A word-piece tokenizer whose texts start with [TXT]."""
    pieces = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("[TXT]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path))
    return path


def make_tiny(folder: Path, config: HivlpConfig = TINY, *, seed: int = 0) -> Hivlp:
    """In float64 and evaluation mode, its weights far enough from the start that all matter."""
    torch.manual_seed(seed)
    model = make_hivlp(config, save_tokenizer(folder / "tokenizer.json")).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() and "norm" not in name:
                weight.normal_(std=0.3)
    return model


def make_batch(lengths: tuple[int, ...] = (5, 3, 7, 4), *, seed: int = 0) -> Batch:
    """Pairs of noise and words; texts of these lengths, two words of each hidden."""
    generator = torch.Generator().manual_seed(seed)
    n, t = len(lengths), max(lengths)
    ids = torch.randint(len(SPECIAL), len(WORDS), (n, t), generator=generator)
    mask = (torch.arange(t)[None, :] < torch.tensor(lengths)[:, None]).long()
    ids[:, 0] = 2
    ids = ids * mask
    hidden, labels = ids.clone(), torch.full_like(ids, NOT_MASKED)
    for row, places in enumerate([(1, 2)] * n):
        labels[row, list(places)] = ids[row, list(places)]
        hidden[row, list(places)] = MASK
    pixels = torch.randn(n, 3, 8, 8, generator=generator, dtype=torch.float64)
    return Batch(pixels, ids, mask, torch.arange(n), hidden, labels)
