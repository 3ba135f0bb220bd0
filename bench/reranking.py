"""What re-ranking costs: a text against its candidates, with and without kept states of pictures.

    python bench/reranking.py [--candidates 20] [--tokens 12] [--threads 1] [--layers 6]
    python bench/reranking.py --lengths      # pairs alone, by the text's length

The three graphs of a re-ranker as `hivlp export` writes them, of the paper's size unless told
otherwise, with random weights (which change no time): towers of 12 and 6 layers and a cross-modal
encoder of 6, 768 wide, pictures of 224 x 224 in patches of 16. Kept states are read as an index
keeps them, half precision in a mapped file; pictures without are already decoded and prepared,
which takes milliseconds where encoding takes hundreds. About four minutes. With `--lengths`, pairs
as they are exported (`FewQueries`) stand beside attention as it is trained.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from measure import interleaved, machine, median
from tokenizers import Tokenizer, models, processors
from torch import Tensor, nn

from hivlp.models.network.cross_modal import CrossModalEncoder
from hivlp.models.network.hivlp import CrossConfig, HivlpConfig, make_hivlp
from hivlp.models.runtime.providers import choose_providers, open_session
from hivlp.models.training.export_reranker import IMAGE, MASK, PROBABILITY, TEXT, write_reranker
from hivlp.models.training.graphs import Ports, write_graph

PICTURES = 200
LENGTHS = (6, 12, 32, 60)
BASE = "re-ranked, states kept"
Work = Callable[[int], object]
Floats = npt.NDArray[np.float32]
Kept = npt.NDArray[np.float16]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Graphs:
    """The re-ranker's three steps, the last one as it is trained too, and tokens and width of one
    picture's states.
    """

    text: Callable[[Ids], Floats]
    images: Callable[[Floats], Floats]
    match: Callable[[Floats, Floats], Floats]
    match_as_trained: Callable[[Floats, Floats], Floats]
    shape: tuple[int, int]


class AsTrained(nn.Module):
    """Pairs to probabilities with the attention that training uses."""

    def __init__(self, cross: CrossModalEncoder) -> None:
        super().__init__()
        self.cross = cross

    def forward(self, *given: Tensor) -> Tensor:
        return self.cross.probability(*given)


def write_as_trained(cross: CrossModalEncoder, path: Path) -> None:
    """The pairs' graph without `FewQueries`."""
    ports = Ports((TEXT, MASK, IMAGE), (PROBABILITY,), {TEXT: 1, MASK: 1})
    shape = cross.shape
    text, image = torch.randn(2, 7, shape.text), torch.randn(2, 197, shape.image)
    arguments = (text, torch.ones(2, 7, dtype=torch.int64), image)
    write_graph(AsTrained(cross), arguments, ports, path)


def write_tokenizer(path: Path) -> Path:
    """One whose texts start with a special token; no text is read here."""
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[TXT]": 1, "heart": 2}, "[PAD]"))
    tokenizer.add_special_tokens(["[PAD]", "[TXT]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        "[TXT] $A", special_tokens=[("[TXT]", 1)]
    )
    tokenizer.save(str(path))
    return path


def open_reranker(folder: Path, given: argparse.Namespace) -> Graphs:
    """Write a re-ranker's graphs into a folder, and open them."""
    torch.manual_seed(0)
    config = HivlpConfig(mlm=False, cross=CrossConfig(depth=given.layers))
    model = make_hivlp(config, write_tokenizer(folder / "tokenizer.json"))
    assert model.cross is not None
    record = write_reranker(model.dual, model.cross, folder, lambda: None)
    write_as_trained(model.cross, folder / "as_trained.onnx")
    providers = choose_providers("auto")
    text, image, cross, trained = (
        open_session(folder, file, threads=given.threads, providers=providers).run
        for file in (record.text_states, record.image_states, record.cross, "as_trained.onnx")
    )

    def encode_text(ids: Ids) -> Floats:
        (states,) = text(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        return np.asarray(states)

    def encode_images(pixels: Floats) -> Floats:
        (states,) = image(None, {"pixel_values": pixels})
        return np.asarray(states)

    def match(texts: Floats, images: Floats, run: Callable[..., list[Floats]] = cross) -> Floats:
        mask = np.ones(texts.shape[:2], np.int64)
        feed = {"text_states": texts, "attention_mask": mask, "image_states": images}
        (found,) = run(None, feed)
        return np.asarray(found)

    shape = (record.image_tokens, record.image_width)
    return Graphs(encode_text, encode_images, match, partial(match, run=trained), shape)


def keep_states(path: Path, shape: tuple[int, int], rng: np.random.Generator) -> Kept:
    """States of PICTURES pictures as an index keeps them, mapped."""
    np.save(path, rng.standard_normal((PICTURES, *shape), dtype=np.float32).astype(np.float16))
    kept: Kept = np.load(path, mmap_mode="r")
    return kept


def contenders(graphs: Graphs, kept: Kept, given: argparse.Namespace) -> dict[str, Work]:
    """By name, what is timed; kept states are other ones at every pass."""
    rng = np.random.default_rng(1)
    count: int = given.candidates
    prepared = rng.standard_normal((count, 3, 224, 224), dtype=np.float32)
    ids = np.full((1, given.tokens), 2, np.int64)
    picks = [np.sort(rng.choice(PICTURES, count, replace=False)) for _ in range(64)]

    def chosen(number: int) -> Floats:
        return np.asarray(kept[picks[number % len(picks)]]).astype(np.float32)

    def spread(states: Floats) -> Floats:
        return np.broadcast_to(states, (count, *states.shape[1:]))

    def by_states(number: int) -> Floats:
        return graphs.match(spread(graphs.text(ids)), chosen(number))

    def by_pictures(_: int) -> Floats:
        return graphs.match(spread(graphs.text(ids)), graphs.images(prepared))

    text, images = graphs.text(ids), chosen(0)
    return {
        "the text's states": lambda _: graphs.text(ids),
        "kept states, read": chosen,
        "one pair": lambda _: graphs.match(text, images[:1]),
        "all pairs, one batch": lambda _: graphs.match(spread(text), images),
        "all pairs, one by one": lambda _: [
            graphs.match(text, images[i : i + 1]) for i in range(count)
        ],
        BASE: by_states,
        "re-ranked, pictures encoded": by_pictures,
    }


def by_length(graphs: Graphs, kept: Kept, given: argparse.Namespace) -> dict[str, Work]:
    """Pairs by the text's length, as exported and as trained."""
    images = np.asarray(kept[: given.candidates]).astype(np.float32)
    found: dict[str, Work] = {}
    for tokens in LENGTHS:
        states = graphs.text(np.full((1, tokens), 2, np.int64))
        texts = np.broadcast_to(states, (given.candidates, *states.shape[1:]))
        exported, trained = graphs.match(texts, images), graphs.match_as_trained(texts, images)
        assert np.abs(exported - trained).max() < 1e-4
        found[f"{tokens} tokens, as exported"] = partial(_run, graphs.match, texts, images)
        found[f"{tokens} tokens, as trained"] = partial(
            _run, graphs.match_as_trained, texts, images
        )
    return found


def _run(
    match: Callable[[Floats, Floats], Floats], texts: Floats, images: Floats, _: int
) -> Floats:
    return match(texts, images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=12, help="of the text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=6, help="of the cross-modal encoder")
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--lengths", action="store_true", help="pairs alone, by the text's length")
    given = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        graphs = open_reranker(Path(name), given)
        kept = keep_states(Path(name) / "states.npy", graphs.shape, np.random.default_rng(0))
        print(f"states of a picture: {graphs.shape}, {kept[0].nbytes} bytes kept")
        timed = (by_length if given.lengths else contenders)(graphs, kept, given)
        times = interleaved(timed, given.passes, warm=1)
    base = median(times.get(BASE, next(iter(times.values()))))
    print(f"{given.candidates} candidates, {given.tokens} tokens, threads {given.threads}")
    for name, found in times.items():
        middle = median(found)
        print(
            f"| {name} | {middle:.1f} ({min(found):.1f}..{max(found):.1f}) | {middle / base:.3f} |"
        )


if __name__ == "__main__":
    main()
