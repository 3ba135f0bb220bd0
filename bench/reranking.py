"""What re-ranking costs: the states of a text and of a picture, and pairs of them, by text length.

    python -m bench.reranking [--threads 1] [--layers 6]

Graphs as `hivlp export` writes them, of the paper's size unless told otherwise, with random
weights; the least of a few runs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hivlp.models.network.blocks import Block, BlockShape
from hivlp.models.network.cross_modal import CrossModalEncoder, CrossModalShape
from hivlp.models.runtime.providers import choose_providers, open_session
from hivlp.models.training.export_reranker import PairsModule
from hivlp.models.training.graphs import Ports, write_graph

WIDTH, HEADS, PATCHES = 768, 12, 197
TOWERS = {"text": 6, "image": 12}
RUNS = 5


class Layers(nn.Module):
    """A tower's blocks alone: what its states cost, but for the embedding."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        shape = BlockShape(WIDTH, HEADS, 4 * WIDTH)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(depth))

    def forward(self, *given: Tensor) -> Tensor:
        (hidden,) = given
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def least_ms(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=6, help="of the cross-modal encoder")
    given = parser.parse_args()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for name, depth in TOWERS.items():
            tokens = 12 if name == "text" else PATCHES
            file = Path(folder) / f"{name}.onnx"
            ports = Ports(("hidden",), ("states",), {"hidden": 1})
            write_graph(Layers(depth), (torch.randn(2, tokens, WIDTH),), ports, file)
            feed = {"hidden": rng.standard_normal((1, tokens, WIDTH), dtype=np.float32)}
            print(f"{name}: {depth} layers, {tokens} tokens: {timed(file, feed, given):.0f} ms")
            file.unlink()
        pairs(Path(folder) / "cross.onnx", rng, given)


def pairs(file: Path, rng: np.random.Generator, given: argparse.Namespace) -> None:
    cross = CrossModalEncoder(CrossModalShape(depth=given.layers)).eval()
    names = ("text_states", "attention_mask", "image_states")
    sample = (torch.randn(2, 7, WIDTH), torch.ones(2, 7, dtype=torch.int64))
    arguments = (*sample, torch.randn(2, PATCHES, WIDTH))
    ports = Ports(names, ("probability",), {"text_states": 1, "attention_mask": 1})
    write_graph(PairsModule(cross), arguments, ports, file)
    for count, tokens in ((1, 12), (20, 6), (20, 12), (20, 32), (20, 64)):
        feed = {
            "text_states": rng.standard_normal((count, tokens, WIDTH), dtype=np.float32),
            "attention_mask": np.ones((count, tokens), np.int64),
            "image_states": rng.standard_normal((count, PATCHES, WIDTH), dtype=np.float32),
        }
        took = timed(file, feed, given)
        print(f"{count} pairs, {given.layers} layers, {tokens} tokens of text: {took:.0f} ms")


def timed(file: Path, feed: dict[str, Any], given: argparse.Namespace) -> float:
    providers = choose_providers("auto")
    session = open_session(file.parent, file.name, threads=given.threads, providers=providers)
    return least_ms(lambda: session.run(None, feed))


if __name__ == "__main__":
    main()
