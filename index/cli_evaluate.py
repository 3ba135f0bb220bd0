"""The command `hivlp evaluate`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hivlp.index.arguments import (
    DONE,
    USAGE,
    json_object,
    parse,
    parser_of,
    positive,
    share,
    store_of,
)
from hivlp.index.build.readers.base import SPLITS
from hivlp.index.errors import BuildError
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.artifact import MANIFEST_NAME
from hivlp.models.reranker import DEFAULT_RERANKED

if TYPE_CHECKING:
    from hivlp.index.build.model import Model
    from hivlp.index.evaluation.evaluate import Evaluation, EvaluationSettings
    from hivlp.index.snapshot.snapshot import Snapshot

SAMPLE = 2_000
MOST_AT, MOST_K = 10, 1_000
MOST_RESAMPLES = 100_000
DIRECTIONS = ("text-image", "image-text", "image-image", "text-text")


def evaluate(arguments: Sequence[str]) -> int:
    """`hivlp evaluate`: measure an index by level and plan."""
    parser = parser_of(
        "evaluate",
        "Measure R@K, AR, RSUM and ANN recall of an index, by direction, level and plan, with 95 % "
        "intervals.",
        "hivlp evaluate --index default --json report.json     or     hivlp evaluate --karpathy "
        "dataset_coco.json --images coco --model .hivlp/artifacts/mine --folds 5 --fold-size 1000",
    )
    _add_what(parser)
    parser.add_argument("--group", help="metadata column whose equals count as right")
    _add_protocol(parser)
    parser.add_argument("--json", type=Path, help="write the report to this file too")
    parser.add_argument(
        "--ranks", type=Path, help="write every query's ranks to this .parquet or .jsonl file"
    )
    parser.add_argument(
        "--report", type=Path, help="write a page with plots and samples: a folder or an .html file"
    )
    parser.add_argument(
        "--against",
        help="a ranks file, INDEX or INDEX@VERSION, or the folder of another model: print what "
        "both find and the paired difference",
    )
    parser.add_argument(
        "--rerank",
        type=positive,
        nargs="?",
        const=DEFAULT_RERANKED,
        default=0,
        metavar="N",
        help=f"re-rank the cascade's first N rows too ({DEFAULT_RERANKED}); needs a re-ranker",
    )
    parser.add_argument("--threads", type=positive, default=1, help="encoder threads (1)")
    given = parse(parser, arguments)
    if isinstance(given, int):
        return given
    if (wrong := _contradiction(given)) is not None:
        print(f"hivlp evaluate: {wrong}", file=sys.stderr)
        return USAGE
    return _evaluate(given)


def _add_what(parser: argparse.ArgumentParser) -> None:
    """Options that say what is measured: an index, or a split that becomes one."""
    parser.add_argument("--index", help="index name (default: default; of a split, its own)")
    parser.add_argument("--version", help="version (default: the active one)")
    parser.add_argument(
        "--artifact", "--model", type=Path, help="the model (default: the index's own)"
    )
    parser.add_argument("--karpathy", help="index a split of this Karpathy JSON first")
    parser.add_argument("--images", help="folder of its pictures (the JSON's own)")
    parser.add_argument("--split", choices=SPLITS, default="test", help="which split (test)")
    parser.add_argument(
        "--max-failures", type=share, default=0.0, help="share of its items that may fail (0)"
    )


def _contradiction(given: argparse.Namespace) -> str | None:
    """What is wrong with the options together, or None."""
    if (given.folds is None) != (given.fold_size is None):
        return "--folds and --fold-size belong together: COCO's 1K is 5 of 1000"
    if given.rerank and given.directions and not any(q != s for q, s in given.directions):
        return "--rerank compares texts with pictures, and none of --directions does"
    if given.ranks is not None and given.ranks == Path(given.against or ""):
        return "--ranks would write over the file that --against names"
    if given.karpathy is None:
        return "--images belongs to --karpathy" if given.images is not None else None
    if given.artifact is None:
        return "--karpathy needs a model to encode with: name it with --artifact"
    return "--karpathy indexes anew: it has no --version" if given.version is not None else None


def _add_protocol(parser: argparse.ArgumentParser) -> None:
    """Options that say what is counted, over which queries and galleries."""
    parser.add_argument("--at", type=ranks_at, default=(1, 5, 10), help="the K of R@K (1,5,10)")
    parser.add_argument(
        "--sample",
        type=sample,
        default=0,
        help="most queries of a modality, or `all` (2000; all with --folds or --karpathy)",
    )
    parser.add_argument(
        "--queries", type=json_object, help="""items that ask: '{"field": "split", "eq": "test"}'"""
    )
    parser.add_argument("--folds", type=positive, help="so many galleries, averaged")
    parser.add_argument("--fold-size", type=positive, help="items in each, in the corpus's order")
    parser.add_argument(
        "--cascade", type=widths, default=(), help="the cascade's widths, coarse first: 1000,100"
    )
    parser.add_argument(
        "--directions",
        type=directions,
        help=f"some of {','.join(DIRECTIONS)} (all; the first two with --folds or --karpathy)",
    )
    parser.add_argument(
        "--resamples", type=resamples, default=1_000, help="of the intervals; 0 for none (1000)"
    )


def sample(text: str) -> int | None:
    """A number of queries of at least 1, or None for `all`."""
    return None if text == "all" else positive(text)


def ranks_at(text: str) -> tuple[int, ...]:
    """Different whole numbers with commas between, ascending."""
    found = tuple(sorted({positive(word) for word in text.split(",")}))
    if len(found) > MOST_AT or found[-1] > MOST_K:
        raise argparse.ArgumentTypeError(
            f"{text!r}: at most {MOST_AT} numbers, of at most {MOST_K} each"
        )
    return found


def widths(text: str) -> tuple[tuple[int, int], ...]:
    """(level, keep) from widths with commas between, coarse first."""
    return tuple(enumerate((positive(word) for word in text.split(",")), start=1))


def directions(text: str) -> tuple[tuple[str, str], ...]:
    """Some of DIRECTIONS with commas between, as (query, searched)."""
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in DIRECTIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(DIRECTIONS)}")
    pairs = [word.split("-") for word in DIRECTIONS if word in words]
    return tuple((query, searched) for query, searched in pairs)


def resamples(text: str) -> int:
    """A whole number from 0 to MOST_RESAMPLES."""
    if not text.isascii() or not text.isdigit() or int(text) > MOST_RESAMPLES:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to {MOST_RESAMPLES}")
    return int(text)


def _evaluate(given: argparse.Namespace) -> int:
    from hivlp.index.evaluation.against import differences
    from hivlp.index.evaluation.evaluate import check_unchanged
    from hivlp.index.evaluation.tables import tables

    store = store_of(given)
    _check_files(given)
    ranks = given.ranks
    index = given.index or "default"
    if given.karpathy is not None:
        index = _indexed(given, store)
    check_unchanged(store.manifest(index, given.version))  # before `--against` is measured
    with ExitStack() as stack:
        other = stack.enter_context(_against(given, store, index))
        if other is not None and ranks is None:
            ranks = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "ranks.parquet"
        evaluation, model = _measured(given, store, index, given.version, ranks)
        report = evaluation.report
        if other is not None and (apart := differences(ranks, other, given.at, given.resamples)):
            report = replace(report, against=given.against, differences=apart)
    print(tables(report))
    if given.json is not None:
        given.json.write_text(report.to_json() + "\n", encoding="utf-8")
    if given.report is not None:
        print(_write_page(given.report, replace(evaluation, report=report), model))
    if other is not None and report.against is None:  # what was measured is not lost
        raise BuildError(
            f"against: {given.against} has no query, direction and system in common with this; "
            "queries are known by their items' ids"
        )
    return DONE


def _check_files(given: argparse.Namespace) -> None:
    """Raises BuildError for files that can't be written: before hours of work, not after."""
    from hivlp.index.evaluation.page import page_path
    from hivlp.index.evaluation.ranks_file import check_ranks_name

    if given.ranks is not None:
        check_ranks_name(given.ranks)
    page = given.report and page_path(given.report)
    for option, file in (("json", given.json), ("report", page), ("ranks", given.ranks)):
        if file is None:
            continue
        if file.is_dir():
            raise BuildError(f"--{option}: {file} is a folder, and a file is written")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(f"--{option}: no folder for {file.name}: {error}") from error
        if not os.access(file.parent, os.W_OK):
            raise BuildError(f"--{option}: nothing can be written in {file.parent}")


def _write_page(given: Path, evaluation: Evaluation, model: Model) -> str:
    """Write the report page; says where it is."""
    from hivlp.index.evaluation.page import page_path, write_page
    from hivlp.index.evaluation.samples import samples

    shown = samples(evaluation, model)
    path = page_path(given)
    write_page(path, evaluation.report, shown)
    return f"report page: {path}"


def _indexed(given: argparse.Namespace, store: SnapshotStore) -> str:
    """The index of the split that is named; built."""
    from hivlp.index.build.model import Model
    from hivlp.index.evaluation.karpathy import KarpathySplit, index_split

    wanted = KarpathySplit(given.karpathy, given.split, given.images)
    name = given.index or wanted.index
    model = Model.load(given.artifact, threads=given.threads, rerank=given.rerank > 0)
    report = index_split(store, wanted, model, name, max_failures=given.max_failures)
    print(f"index {name} {report.manifest.version}: {report.manifest.items} pictures indexed")
    if report.failures:
        print(f"left out {report.failures}, listed in {report.failures_file}")
    return name


def _measured(
    given: argparse.Namespace,
    store: SnapshotStore,
    index: str,
    version: str | None,
    ranks: Path | None,
) -> tuple[Evaluation, Model]:
    """One version, measured, and what with; `ranks` is where to write those of every query."""
    from hivlp.index.evaluation.evaluate import evaluate as evaluate_snapshot
    from hivlp.index.evaluation.ranks_file import RanksWriter

    snapshot, model = _opened(given, store, index, version)
    settings = _settings(given, snapshot, model)
    if ranks is None:
        return evaluate_snapshot(snapshot, model, settings), model
    with RanksWriter(ranks) as writer:
        return evaluate_snapshot(snapshot, model, settings, writer), model


def _opened(
    given: argparse.Namespace, store: SnapshotStore, index: str, version: str | None
) -> tuple[Snapshot, Model]:
    from hivlp.index.query_model import query_model

    snapshot = store.open(index, version)
    rerank = given.rerank > 0
    return snapshot, query_model(given, store, snapshot.manifest, given.threads, rerank=rerank)


def _settings(given: argparse.Namespace, snapshot: Snapshot, model: Model) -> EvaluationSettings:
    """What was asked for. Raises BuildError where nothing says which rows are right."""
    from hivlp.index.evaluation.evaluate import DIRECTIONS as EVERY
    from hivlp.index.evaluation.evaluate import EvaluationSettings, Folds
    from hivlp.index.evaluation.figures import CROSS

    group = given.group or snapshot.manifest.build.metadata_group
    if not model.encodes and group is None:
        raise BuildError(
            f"index {snapshot.manifest.index!r} holds imported vectors, and nothing says which "
            "rows answer which: name a metadata column whose equals do with --group. What its "
            "plans find of the exact answer, `hivlp snapshots verify --recall` measures"
        )
    folds = None if given.folds is None else Folds(given.folds, given.fold_size)
    benchmark = folds is not None or given.karpathy is not None
    return EvaluationSettings(
        sample=given.sample if given.sample != 0 else None if benchmark else SAMPLE,
        group=group,
        at=given.at,
        folds=folds,
        keeps=given.cascade,
        only=given.queries,
        directions=given.directions or (CROSS if benchmark else EVERY),
        resamples=given.resamples,
        rerank=given.rerank,
        sweep=given.report is not None,
    )


@contextmanager
def _against(given: argparse.Namespace, store: SnapshotStore, own: str) -> Iterator[Path | None]:
    """The ranks file to compare with: the one given, or that of what is measured for it: another
    version with its own model, or index `own` with another model.
    """
    from hivlp.index.evaluation.ranks_file import ENDINGS, read_ranks

    if given.against is None:
        yield None
    elif given.against.endswith(ENDINGS):
        read_ranks(Path(given.against))  # before hours of encoding, not after
        yield Path(given.against)
    else:
        folder = Path(given.against)
        if (folder / MANIFEST_NAME).is_file():
            artifact, index, version = folder, own, given.version
        else:
            artifact = None
            index, _, version = given.against.partition("@")
        with tempfile.TemporaryDirectory() as kept:
            ranks = Path(kept) / "ranks.parquet"
            other = argparse.Namespace(**{**vars(given), "artifact": artifact})
            _measured(other, store, index, version or None, ranks)
            yield ranks
