"""A home with three versions of one index, for what swaps and activates them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hivlp.index.build.build import BuildSettings, build_index
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.model import Model
from hivlp.index.snapshot.store import SnapshotStore
from tests.integration.served_home import make_corpus, make_home
from tests.tiny_artifact import make_tiny_artifact


def make_three_versions(folder: Path, **other: Any) -> Path:
    """Built of all pictures, of half of them, and of all by another model; the first is active.

    `other` is what else `make_tiny_artifact` makes that model with.
    """
    corpus = make_corpus(folder / "corpus")
    home = make_home(folder / "home", corpus)
    lines = (corpus / "metadata.jsonl").read_text().splitlines()
    half = corpus / "half.jsonl"
    half.write_text("\n".join(lines[: len(lines) // 2]))
    settings = BuildSettings(quiet=True, sample=20, activate=False)
    store = SnapshotStore(home)
    build_index(open_corpus(half), Model.load(home / "artifacts/tiny"), store, "default", settings)
    model = make_tiny_artifact(home / "artifacts" / "other", seed=7, **other)
    build_index(open_corpus(corpus), Model.load(model), store, "default", settings)
    return home
