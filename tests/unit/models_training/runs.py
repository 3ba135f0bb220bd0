"""Runs of `hivlp train` with a tiny model, in this process, and what they left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from hivlp.models.cli_train import train
from hivlp.models.training.loop.checkpoints import Checkpoints

SHORT = ("train.steps=8", "train.batch=8", "train.log_steps=1", "model.text.dropout=0.1")


def arguments(corpus: Path, out: Path, changes: Sequence[str]) -> list[str]:
    """Of the command."""
    sets = [word for change in changes for word in ("--set", change)]
    # one thread: weights are the same to the bit only where sums are added in the same order
    return ["hivlp-tiny", "--corpus", str(corpus), "--out", str(out), "--threads", "1", *sets]


def run(corpus: Path, out: Path, *changes: str) -> Path:
    """Run it; returns the run's folder."""
    assert train(arguments(corpus, out, changes)) == 0
    return out


def weights(out: Path) -> dict[str, Tensor]:
    """Of the newest checkpoint, by name."""
    return dict(load_file(Checkpoints(out, 1).all()[-1] / "model.safetensors"))
