"""The commands `hivlp build` and `hivlp search`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hivlp.index.arguments import (
    DONE,
    USAGE,
    above_zero,
    add_index,
    artifact_of,
    json_object,
    model_of,
    musts,
    parse,
    parser_of,
    positive,
    share,
    size_bytes,
    store_of,
)
from hivlp.index.errors import BuildError
from hivlp.index.journal import Journal, journal
from hivlp.index.level_index import CODECS, FAMILIES, ROWS_TYPES
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.reranker import DEFAULT_RERANKED
from hivlp.models.runtime.progress import begin
from hivlp.models.runtime.stopping import ending_on_sigterm
from hivlp.models.runtime.threads import available_threads

CORPUS_HELP = """a folder of pictures, .csv, .jsonl, .parquet, webdataset .tar or Karpathy split
.json; several tables or tars by a folder or a pattern ('shard-{000..099}.tar'); or a URL of these
"""
SPLITS = ("all", "train", "val", "test", "restval")
if TYPE_CHECKING:
    from hivlp.index.build.wishes import Wishes


def build(arguments: Sequence[str]) -> int:
    """`hivlp build`: encode a corpus and publish it as a version of an index."""
    parser = parser_of(
        "build",
        "Encode a corpus and publish it as a snapshot of an index.",
        "hivlp build pictures/ --artifact .hivlp/artifacts/demo --index default",
    )
    parser.add_argument("corpus", help=CORPUS_HELP)
    parser.add_argument("--artifact", type=Path, help="the model (default: the index's last one)")
    parser.add_argument("--index", default="default", help="index name (default: default)")
    parser.add_argument(
        "--materialise", action="store_true", help="keep every level as a FAISS index, not only 1"
    )
    parser.add_argument("--batch-size", type=positive, default=32, help="items a batch (32)")
    parser.add_argument(
        "--max-failures", type=share, default=0.05, help="share of bad items allowed (0.05)"
    )
    parser.add_argument(
        "--workers", type=positive, default=2, help="threads that read and decode pictures (2)"
    )
    parser.add_argument(
        "--split", choices=SPLITS, default="all", help="of a Karpathy split JSON (all)"
    )
    parser.add_argument("--images", help="folder of its pictures (the JSON's own)")
    parser.add_argument(
        "--aliases", choices=("img2dataset",), help="columns are named as this program does it"
    )
    parser.add_argument("--metadata-group", help="metadata column whose equals answer each other")
    parser.add_argument(
        "--build-threads", type=positive, help="threads that build graphs (all that may be used)"
    )
    parser.add_argument("--threads", type=positive, default=1, help="encoder threads (1)")
    parser.add_argument(
        "--store-states",
        action="store_true",
        help="keep pictures' token states for the model's re-ranker, which makes re-ranking cheap "
        "and takes room: tokens x width x 2 bytes a picture, and as much in the cache",
    )
    parser.add_argument(
        "--forget-changes",
        action="store_true",
        help="the corpus alone, without items that were put or deleted since",
    )
    parser.add_argument(
        "--no-activate", action="store_true", help="publish without making it the active version"
    )
    parser.add_argument(
        "--progress-json",
        type=Path,
        metavar="FILE",
        help="tell progress and result to this file or pipe (/dev/fd/3), one JSON object a line",
    )
    add_choice(parser)
    given = parse(parser, arguments)
    if isinstance(given, int):
        return given
    with ending_on_sigterm(), journal(given.progress_json) as told:
        return _build(given, told)


def search(arguments: Sequence[str]) -> int:
    """`hivlp search`: search an index for a text, a picture or a vector."""
    parser = parser_of(
        "search",
        "Search an index for a text, a picture or a vector.",
        'hivlp search "red heart" --k 5     or     hivlp search --image photo.jpg',
    )
    parser.add_argument("text", nargs="?", help="what to search for")
    parser.add_argument("--image", type=Path, help="search for this picture instead")
    parser.add_argument(
        "--vector", type=Path, help=".npy of one vector instead, as /search/vector takes it"
    )
    add_index(parser)
    parser.add_argument("--k", type=positive, default=10, help="results wanted (10)")
    parser.add_argument(
        "--modality", choices=("image", "text"), default="image", help="what is searched (image)"
    )
    parser.add_argument(
        "--plan", choices=("auto", "cascade", "funnel", "exact"), default="auto", help="(auto)"
    )
    parser.add_argument(
        "--early-exit", action="store_true", help="stop at a level that is sure enough"
    )
    parser.add_argument(
        "--rerank", action="store_true", help="sort the first results by the model's re-ranker"
    )
    parser.add_argument(
        "--rerank-k", type=positive, help=f"results that are re-ranked ({DEFAULT_RERANKED})"
    )
    parser.add_argument(
        "--filter",
        type=json_object,
        help="""metadata wanted: '{"field": "x", "eq": 1}'""",
    )
    parser.add_argument("--threads", type=positive, default=1, help="encoder threads (1)")
    given = parse(parser, arguments)
    if isinstance(given, int):
        return given
    if sum(one is not None for one in (given.text, given.image, given.vector)) != 1:
        print(
            "hivlp search: give a text, --image FILE or --vector FILE, one of them", file=sys.stderr
        )
        return USAGE
    if (wrong := _contradiction(given)) is not None:
        print(f"hivlp search: {wrong}", file=sys.stderr)
        return USAGE
    return _search(given)


def _contradiction(given: argparse.Namespace) -> str | None:
    if given.vector is not None and given.early_exit:
        return "--early-exit saves nothing with --vector"
    if given.vector is not None and given.rerank:
        return "--rerank needs a text or a picture to compare with, not --vector"
    if given.rerank_k is not None and not given.rerank:
        return "--rerank-k says how many are re-ranked, and --rerank isn't given"
    return None


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Options that say how the index should find, or the limits to choose within."""
    parser.add_argument("--family", choices=("auto", *FAMILIES), default="auto", help="(auto)")
    parser.add_argument(
        "--level1", choices=("auto", *CODECS), default="auto", help="level 1's codes (auto)"
    )
    parser.add_argument("--rows", choices=ROWS_TYPES, default="fp32", help="rows kept as (fp32)")
    parser.add_argument(
        "--must", type=musts, default=("mask",), help="what it is for: mask,batch,rebuild (mask)"
    )
    parser.add_argument("--max-memory", type=size_bytes, help="most bytes searched, as 2GiB")
    parser.add_argument("--max-query-ms", type=above_zero, help="most ms of one query's search")
    parser.add_argument(
        "--max-build-s", type=above_zero, default=1_800.0, help="most s to build levels (1800)"
    )
    parser.add_argument("--target", type=share, default=0.99, help="ANN recall wanted (0.99)")
    parser.add_argument("--explain", action="store_true", help="print what was chosen from")


def wishes_of(given: argparse.Namespace) -> Wishes:
    """What `add_choice` asked for. Raises BuildError for what contradicts itself."""
    from hivlp.index.build.wishes import Wishes

    return Wishes(
        family=given.family,
        level1=given.level1,
        must=given.must,
        max_memory_bytes=given.max_memory,
        max_query_ms=given.max_query_ms,
        max_build_s=given.max_build_s,
    )


def _build(given: argparse.Namespace, told: Journal) -> int:
    from hivlp.index.build.build import BuildSettings, build_index
    from hivlp.index.build.corpus import CorpusOptions, open_corpus
    from hivlp.index.build.explain import table
    from hivlp.index.build.model import Model
    from hivlp.index.snapshot.layout import STATES

    store = store_of(given)
    corpus = open_corpus(given.corpus, CorpusOptions(given.split, given.images, given.aliases))
    artifact = given.artifact or _last_artifact(store, given.index)
    settings = BuildSettings(
        batch_size=given.batch_size,
        workers=given.workers,
        max_failures=given.max_failures,
        materialise=given.materialise,
        metadata_group=given.metadata_group,
        target=given.target,
        rows_type=given.rows,
        build_threads=given.build_threads or available_threads(),
        wishes=wishes_of(given),
        store_states=given.store_states,
        forget_changes=given.forget_changes,
        activate=not given.no_activate,
    )
    begin("load the model")
    model = Model.load(artifact, threads=given.threads, rerank=given.store_states)
    report = build_index(corpus, model, store, given.index, settings)
    manifest = report.manifest
    told.done(
        index=given.index,
        snapshot=manifest.version,
        active=settings.activate,
        items=manifest.items,
        encoded=report.fresh,
        left_out=report.failures,
        notes=report.notes,
    )
    sides = ", ".join(f"{side.rows} {name} rows" for name, side in manifest.sides.items())
    print(f"{given.index} {manifest.version}: {manifest.items} items, {sides}")
    print(f"encoded {report.fresh} pictures and texts; the others were in the cache")
    if (kept := manifest.states) is not None:
        size = manifest.files[STATES].size_bytes / 2**20
        print(f"states: {kept.tokens} x {kept.width} numbers a picture, {size:.1f} MiB")
    if report.failures:
        print(f"left out {report.failures}, listed in {report.failures_file}")
    for note in report.notes:
        print(note)
    if given.explain:
        print(f"must: {', '.join(manifest.build.must) or 'nothing in particular'}")
        print("\n".join(table(side, options) for side, options in manifest.options.items()))
    return DONE


def _search(given: argparse.Namespace) -> int:
    from hivlp.index.search_once import print_search

    store = store_of(given)
    manifest = store.manifest(given.index, given.version)
    artifact = None if given.vector is not None else model_of(given, store, manifest)
    return print_search(given, store, artifact)


def _last_artifact(store: SnapshotStore, index: str) -> Path:
    """The model of the index's active version. Raises BuildError where there is none yet."""
    if not store.versions(index):
        raise BuildError(f"index {index!r} has no version yet: name the model with --artifact")
    return artifact_of(store, store.manifest(index))
