"""The command `hivlp import-vectors`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hivlp.index.arguments import DONE, USAGE, parse, parser_of, positive, share, store_of
from hivlp.index.cli import add_choice, wishes_of
from hivlp.models.runtime.threads import available_threads

if TYPE_CHECKING:
    from hivlp.index.build.vectors.importing import ImportReport
    from hivlp.index.build.vectors.source import VectorSource
    from hivlp.index.snapshot.manifest import Metric
    from hivlp.index.snapshot.store import SnapshotStore


def import_vectors(arguments: Sequence[str]) -> int:
    """`hivlp import-vectors`: publish vectors that were made elsewhere as a version of an index."""
    parser = parser_of(
        "import-vectors",
        "Publish vectors that you already own as a snapshot of an index. A rotation is fitted on "
        "them, so that their prefixes are the best views of fewer numbers; cosines stay what they "
        "are. No model is needed: `hivlp serve` then takes queries as vectors.",
        "hivlp import-vectors --vectors img_emb/ --metadata metadata/ --index catalogue\n"
        "         hivlp import-vectors --parquet vectors.parquet --rows fp16\n"
        "         hivlp import-vectors --qdrant http://localhost:6333 --collection things",
    )
    _add_source(parser)
    _add_vectors(parser)
    parser.add_argument("--index", default="default", help="index name (default: default)")
    parser.add_argument(
        "--max-failures", type=share, default=0.05, help="share of bad vectors allowed (0.05)"
    )
    parser.add_argument(
        "--build-threads", type=positive, help="threads that build graphs (all that may be used)"
    )
    parser.add_argument(
        "--forget-changes",
        action="store_true",
        help="these vectors alone, without items that were put or deleted since",
    )
    parser.add_argument(
        "--no-activate", action="store_true", help="publish without making it the active version"
    )
    add_choice(parser)
    given = parse(parser, arguments)
    if isinstance(given, int):
        return given
    if trouble := _contradiction(given):
        print(f"hivlp import-vectors: {trouble}", file=sys.stderr)
        return USAGE
    return _import(given)


def _add_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    files = "a file, a folder or a pattern"
    source.add_argument("--vectors", type=Path, metavar="NPY", help=f"{files} of .npy arrays")
    source.add_argument("--parquet", type=Path, metavar="PARQUET", help=f"{files} with vectors")
    source.add_argument("--qdrant", metavar="URL", help="a running Qdrant (key: QDRANT_API_KEY)")
    parser.add_argument("--metadata", type=Path, help=f"{files} of Parquet beside --vectors")
    parser.add_argument(
        "--column", default="embedding", help="column of --parquet's vectors (embedding)"
    )
    parser.add_argument("--collection", help="collection of --qdrant")
    parser.add_argument("--vector-name", help="which of the collection's vectors")
    parser.add_argument("--pictures", type=Path, help="folder that pictures' paths start at")


def _add_vectors(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--modality", choices=("image", "text"), default="image", help="what they are of (image)"
    )
    parser.add_argument("--dims", type=dims, help="coarse levels, as 128,300 (these, where fewer)")
    parser.add_argument(
        "--no-rotate", action="store_true", help="they nest already, as Matryoshka vectors do"
    )
    parser.add_argument(
        "--metric",
        choices=("cosine", "dot", "euclid"),
        help="what they are ranked by (cosine; a collection says itself)",
    )
    parser.add_argument(
        "--as-cosine", action="store_true", help="rank by cosine whatever they were ranked by"
    )
    parser.add_argument("--model", help="name of what made them, part of their space")
    parser.add_argument("--queries", type=Path, help=".npy of real queries to measure with")


def dims(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between."""
    return tuple(positive(word.strip()) for word in text.split(","))


def _contradiction(given: argparse.Namespace) -> str | None:
    """What doesn't go together, or None."""
    belongs = (
        ("metadata", given.metadata, "vectors", given.vectors),
        ("collection", given.collection, "qdrant", given.qdrant),
        ("vector-name", given.vector_name, "qdrant", given.qdrant),
    )
    for name, value, owner, there in belongs:
        if value is not None and there is None:
            return f"--{name} belongs to --{owner}"
    if given.qdrant is not None and given.collection is None:
        return "--qdrant needs --collection NAME"
    if given.qdrant is not None and given.metric is not None:
        return "--metric is the collection's own with --qdrant; --as-cosine takes any"
    return None


def _import(given: argparse.Namespace) -> int:
    from hivlp.index.build.explain import table
    from hivlp.index.build.vectors.importing import import_vectors as publish
    from hivlp.index.build.vectors.qdrant import QdrantSource
    from hivlp.index.build.vectors.record import ImportSettings

    store = store_of(given)
    source, metric = _source(given, store)
    settings = ImportSettings(
        modality=given.modality,
        dims=given.dims,
        rotate=not given.no_rotate,
        metric=metric,
        as_cosine=given.as_cosine,
        max_failures=given.max_failures,
        queries=given.queries,
        target=given.target,
        rows_type=given.rows,
        wishes=wishes_of(given),
        build_threads=given.build_threads or available_threads(),
        model=given.model,
        pictures=given.pictures,
        forget_changes=given.forget_changes,
        activate=not given.no_activate,
    )
    try:
        report = publish(source, store, given.index, settings)
        if isinstance(source, QdrantSource):
            source.discard()
    finally:
        if isinstance(source, QdrantSource):
            source.close()
    _print(report)
    if given.explain:
        manifest = report.manifest
        print(f"must: {', '.join(manifest.build.must) or 'nothing in particular'}")
        print("\n".join(table(side, options) for side, options in manifest.options.items()))
    return DONE


def _source(given: argparse.Namespace, store: SnapshotStore) -> tuple[VectorSource, Metric]:
    """What is read, and what it was ranked by."""
    if given.qdrant is not None:
        from hivlp.index.build.vectors import qdrant

        client = qdrant.connect(given.qdrant)
        name, vector = given.collection, given.vector_name
        spooled = qdrant.download(client, given.qdrant, name, vector, store.home)
        return spooled, spooled.metric
    if given.parquet is not None:
        from hivlp.index.build.vectors.parquet import ParquetSource

        return ParquetSource(given.parquet, given.column), given.metric or "cosine"
    from hivlp.index.build.vectors.npy import NpySource

    return NpySource(given.vectors, given.metadata), given.metric or "cosine"


def _print(report: ImportReport) -> None:
    manifest = report.manifest
    imported = manifest.imported
    assert imported is not None
    ((modality, side),) = manifest.sides.items()
    print(
        f"{manifest.index} {manifest.version}: {side.rows} {modality} vectors of {imported.dim} "
        f"numbers, {side.family} over {side.level1} codes"
    )
    how = "the rotation's" if imported.rotated else "their own"
    parts = zip(manifest.levels, imported.shares, strict=True)
    shares = ", ".join(f"{level.dim}: {part:.1%}" for level, part in parts)
    print(f"squared length in {how} first numbers: {shares}")
    if report.failures:
        print(f"left out {report.failures}, listed in {report.failures_file}")
    for note in report.notes:
        print(note)
    seconds = ", ".join(f"{name} {wall:.0f}" for name, (wall, _) in report.phases.items())
    print(f"seconds: {seconds}")
