"""What a command queries an index with: an artifact, or, for imported vectors, vectors."""

from __future__ import annotations

import argparse

from hivlp.index.arguments import model_of
from hivlp.index.build.model import Model
from hivlp.index.build.vectors.queries import OwnVectors
from hivlp.index.snapshot.manifest import SnapshotManifest
from hivlp.index.snapshot.store import SnapshotStore


def query_model(
    given: argparse.Namespace,
    store: SnapshotStore,
    manifest: SnapshotManifest,
    threads: int = 1,
    *,
    rerank: bool = False,
) -> Model:
    """The artifact named or recorded; imported vectors that were never calibrated with one have
    none, and are their own queries. `rerank`: with its re-ranker, which it must have.

    Raises ArtifactError, MissingExtra, BuildError.
    """
    if manifest.imported is not None and given.artifact is None and not manifest.artifact:
        return OwnVectors.of(manifest)
    return Model.load(model_of(given, store, manifest), threads=threads, rerank=rerank)
