"""The command `hivlp items`: put items into an index that is there, or take them out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from hivlp.index.arguments import (
    DONE,
    FAILED,
    USAGE,
    artifact_of,
    parse,
    parser_of,
    positive,
    seconds,
    share,
    store_of,
)
from hivlp.index.errors import BuildError
from hivlp.index.snapshot.amend import amend
from hivlp.index.snapshot.changes import Delete

NAMED = 10


def items(arguments: Sequence[str]) -> int:
    """`hivlp items`: upsert or delete items."""
    parser = parser_of(
        "items",
        "Put items into an index, or delete them, without building it again.",
        "hivlp items upsert new-pictures/     or     hivlp items delete sku-1 sku-2",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    upsert = actions.add_parser(
        "upsert", help="encode a corpus and put its items in, replacing those of the same id"
    )
    upsert.add_argument("corpus", type=Path, help="a folder of pictures, .csv, .jsonl or .parquet")
    upsert.add_argument("--artifact", type=Path, help="the model (default: the index's own)")
    upsert.add_argument(
        "--max-failures", type=share, default=0.05, help="share of bad items allowed (0.05)"
    )
    upsert.add_argument("--threads", type=positive, default=1, help="encoder threads (1)")
    delete = actions.add_parser("delete", help="take items out")
    delete.add_argument("ids", nargs="*", metavar="ID", help="ids of the items")
    delete.add_argument("--from", dest="file", type=Path, help="a file of ids, one a line")
    delete.add_argument(
        "--erase", action="store_true", help="leave their vectors and texts in no file"
    )
    delete.add_argument(
        "--wait", type=seconds, default=60.0, help="s to wait for readers of old versions (60)"
    )
    for action in (upsert, delete):
        action.add_argument("--home", type=Path, help="state folder (HIVLP_HOME, .hivlp)")
        action.add_argument("--index", default="default", help="index name (default: default)")
    given = parse(parser, arguments)
    if isinstance(given, int):
        return given
    if given.action == "upsert":
        return _upsert(given)
    if not given.ids and given.file is None:
        print("hivlp items delete: give ids, or --from FILE", file=sys.stderr)
        return USAGE
    ids = [*given.ids, *(_ids(given.file) if given.file is not None else [])]
    return _erase(given, ids) if given.erase else _delete(given, ids)


def _upsert(given: argparse.Namespace) -> int:
    from hivlp.index.build.corpus import open_corpus
    from hivlp.index.build.model import Model
    from hivlp.index.build.upsert_corpus import failures_file, upsert_corpus

    store = store_of(given)
    artifact = given.artifact or artifact_of(store, store.manifest(given.index))
    corpus, model = open_corpus(given.corpus), Model.load(artifact, threads=given.threads)
    report = upsert_corpus(corpus, model, store, given.index, max_failures=given.max_failures)
    replaced = report.upserts - report.created
    print(f"{given.index} {report.version}: {report.created} items new, {replaced} replaced")
    if report.failures:
        left = failures_file(store, given.index)
        print(f"left out {report.failures}, listed in {left}")
    return DONE


def _erase(given: argparse.Namespace, ids: Sequence[str]) -> int:
    from hivlp.index.build.erase import erase

    report = erase(store_of(given), given.index, ids, wait_s=given.wait)
    print(
        f"{given.index} {report.version}: {len(report.erased)} items erased; removed "
        f"{len(report.removed)} versions, {report.cached} vectors from the cache, "
        f"{report.pictures} pictures"
    )
    for note in report.notes:
        print(note)
    if report.left:
        left = ", ".join(report.left)
        print(f"still open somewhere, and not erased: {left}; run this again", file=sys.stderr)
    _say_unknown(report.unknown)
    return FAILED if report.left or report.unknown else DONE


def _delete(given: argparse.Namespace, ids: Sequence[str]) -> int:
    store = store_of(given)
    amended = amend(store, given.index, [Delete(item_id) for item_id in ids])
    print(f"{given.index} {amended.version}: {amended.deletes} items deleted")
    _say_unknown(amended.unknown)
    return FAILED if amended.unknown else DONE


def _say_unknown(unknown: Collection[str]) -> None:
    if unknown:
        some = ", ".join(repr(item_id) for item_id in sorted(unknown)[:NAMED])
        more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
        print(f"not there: {some}{more}", file=sys.stderr)


def _ids(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{file}: can't be read: {error}") from error
    return [line.strip() for line in lines if line.strip()]
