"""From how large weights a narrow HiVLP learns: .02 at any width, or .02 sqrt(768 / width).

    python bench/initial_std.py [--width 192] [--steps 210] [--seeds 2]

Two coloured shapes side by side, told by a sentence; 36 things, 24 a batch, noise over everything.
A vision tower of 4 layers, a text tower of 2, two levels, a cross-modal encoder of one layer, the
nested form. Both starts of a seed see the same batches, step by step. Some minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from measure import machine
from tokenizers import Tokenizer, models, processors
from torch import nn

from hivlp.models.network.hivlp import CrossConfig, Hivlp, HivlpConfig, make_hivlp
from hivlp.models.network.text_tower import TextShape
from hivlp.models.network.vision import VisionShape
from hivlp.models.network.weights import BASE_STD, initial_std
from hivlp.models.training.hivlp_losses import Batch, LossSettings, hivlp_losses

COLOURS = {"red": (1, -1, -1), "green": (-1, 1, -1), "blue": (-1, -1, 1)}
SHAPES = ("square", "circle")
WORDS = ("[PAD]", "[TXT]", *COLOURS, *SHAPES)
THINGS = list(itertools.product(COLOURS, SHAPES, COLOURS, SHAPES))
BATCH, SIDE, SHAPE_SIDE, WARM_UP, MEAN_OVER = 24, 32, 14, 24, 20
SHOWN = ("retrieval_2", "early_1", "matching")
ROUND = np.hypot(*(np.mgrid[:SHAPE_SIDE, :SHAPE_SIDE] - (SHAPE_SIDE - 1) / 2)) < SHAPE_SIDE / 2


def make_model(width: int, std: float, seed: int, folder: Path) -> Hivlp:
    """A model whose weights start with deviation `std`."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[PAD]"))
    tokenizer.add_special_tokens(["[PAD]", "[TXT]"])
    template = processors.TemplateProcessing("[TXT] $A", special_tokens=[("[TXT]", 1)])
    tokenizer.post_processor = template
    tokenizer.save(str(folder / "tokenizer.json"))
    heads = max(1, width // 32)
    config = HivlpConfig(
        vision=VisionShape(depth=4, width=width, heads=heads, image_size=SIDE, patch=8),
        text=TextShape(depth=2, width=width, heads=heads, max_tokens=8),
        dims=(32, 64),
        head_hidden=256,
        cross=CrossConfig(depth=1, heads=heads),
        mlm=False,
    )
    torch.manual_seed(seed)
    model = make_hivlp(config, folder / "tokenizer.json")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(std / initial_std(width))
    return model


def drawn(thing: tuple[str, str, str, str], rng: np.random.Generator) -> np.ndarray:
    """Both shapes at any height, each in its half: (3, SIDE, SIDE) float64."""
    picture = rng.normal(0, 0.2, (3, SIDE, SIDE))
    for half, (colour, shape) in enumerate((thing[:2], thing[2:])):
        left = 1 + SIDE // 2 * half + rng.integers(0, 2)
        top = rng.integers(0, SIDE - SHAPE_SIDE)
        place = np.s_[:, top : top + SHAPE_SIDE, left : left + SHAPE_SIDE]
        inside = ROUND if shape == "circle" else np.ones_like(ROUND)
        picture[place] = np.where(inside, np.array(COLOURS[colour])[:, None, None], picture[place])
    return picture


def make_batch(rng: np.random.Generator) -> Batch:
    """Different things, each with a new picture."""
    picks = rng.permutation(len(THINGS))[:BATCH]
    ids = torch.tensor([[1, *(WORDS.index(word) for word in THINGS[i])] for i in picks])
    pictures = np.stack([drawn(THINGS[i], rng) for i in picks]).astype(np.float32)
    item = torch.from_numpy(picks)
    return Batch(torch.from_numpy(pictures), ids, torch.ones_like(ids), item)


def train(model: Hivlp, steps: int) -> list[list[float]]:
    """The shown losses, step by step."""
    rng, settings = np.random.default_rng(0), LossSettings(score_weight=10)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05)
    history = []
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / WARM_UP)
        losses = hivlp_losses(model, make_batch(rng), settings)
        optimiser.zero_grad()
        losses["total"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        history.append([losses[name].item() for name in SHOWN])
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--steps", type=int, default=210)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    print(machine())
    print(f"| start | seed | step | {' | '.join(SHOWN)} |, means over {MEAN_OVER} steps")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            for std in (BASE_STD, initial_std(given.width)):
                history = train(make_model(given.width, std, seed, Path(folder)), given.steps)
                for end in range(given.steps // 3, given.steps + 1, given.steps // 3):
                    means = np.mean(history[max(0, end - MEAN_OVER) : end], axis=0)
                    cells = " | ".join(f"{mean:.2f}" for mean in means)
                    print(f"| {std:.3f} | {seed} | {end} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
