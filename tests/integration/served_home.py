"""A home folder with a real tiny model and a real index of coloured squares."""

from __future__ import annotations

import json
from pathlib import Path

from hivlp.index.build.build import BuildSettings, build_index
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.model import Model
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.levels import GalleryKind
from tests.tiny_artifact import COLOURS, Likes, make_tiny_artifact, png, solid

ATTRIBUTION = "Squares drawn by a test"


def make_corpus(folder: Path) -> Path:
    """One square a colour in two sizes, with captions and metadata."""
    (folder / "squares").mkdir(parents=True)
    lines = []
    for colour in COLOURS:
        for side in (24, 300):
            name = f"squares/{colour}-{side}.png"
            (folder / name).write_bytes(png(solid(colour, (side, side))))
            row = {
                "file_name": name,
                "id": f"{colour}/{side}",
                "captions": [colour, f"a {colour} square"],
                "name": f"{colour} square",
                "attribution": ATTRIBUTION,
                "licence": "CC0-1.0",
            }
            lines.append(json.dumps(row))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def make_home(
    home: Path,
    corpus: Path,
    gallery: GalleryKind = "nested",
    *,
    reranker: Likes | None = None,
    states: bool = False,
) -> Path:
    """A model and an index `default` of the corpus; `states` keeps those of the re-ranker."""
    artifact = make_tiny_artifact(home / "artifacts" / "tiny", gallery=gallery, reranker=reranker)
    settings = BuildSettings(quiet=True, sample=20, store_states=states)
    model = Model.load(artifact, rerank=states)
    build_index(open_corpus(corpus), model, SnapshotStore(home), "default", settings)
    return home


def colour_png(colour: str) -> bytes:
    """A square of its own size: like none in the corpus, and near all of its colour."""
    return png(solid(colour, (50, 40)))
