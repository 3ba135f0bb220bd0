"""A folder of small checkpoints, pictures and texts, and `hivlp fit-exits` on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hivlp.models import cli
from hivlp.models.training import features
from tests.unit.models_training import hf_checkpoints as made
from tests.unit.models_training.checkpoints import make_bert

HASTY = (
    *("--set", "distil.text_epochs=3", "--set", "distil.image_epochs=3"),
    *("--set", "distil.hidden=8", "--threads", "1", "--text-exits", "1,3", "--image-exits", "1,3"),
)
WORDS = ("red", "green", "blue", "a picture of red", "squares", "of", "two greens", "bluer")
TEXTS = [f"{a} {b} {c}" for a in WORDS for b in ("cat", "dog", "tree", "sky") for c in "xyz"]


def make_pictures(folder: Path, count: int = 60) -> Path:
    """Pictures of the tower's own size, so that nothing hangs on how they are resized."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        pixels = rng.integers(0, 256, (made.SIDE, made.SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.png")
    return folder


@contextmanager
def features_in_torch() -> Iterator[None]:
    """Features without graphs, as of towers too large for one: writing them takes longest here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "LARGEST_GRAPH", 0)
        yield


def make_root(folder: Path) -> Path:
    """Both kinds of checkpoint, 60 pictures, texts, and a tower that shares no space."""
    made.make_clip(folder / "clip")
    made.make_siglip(folder / "siglip")
    make_pictures(folder / "pictures")
    make_bert(folder / "bert")
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    return folder


def fit(root: Path, *more: str, towers: str = "clip", out: str = "fit", dims: str = "3,8") -> int:
    given = ["--towers", str(root / towers), "--texts", str(root / "texts.txt")]
    given += ["--images", str(root / "pictures"), "--cache", str(root / "cache")]
    return cli.fit_exits([*given, "--out", str(root / out), "--dims", dims, *HASTY, *more])
