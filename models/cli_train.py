"""The command `hivlp train`. torch is imported when it is run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hivlp.models.cli import DONE, USAGE, need_torch, parse, parser_of, threads

CORPUS_HELP = """a folder of pictures, .csv, .jsonl, .parquet, webdataset .tar or Karpathy split
.json; several tables or tars by a folder or a pattern ('shard-{000..099}.tar'); or a URL of these;
may be given again
"""


def train(arguments: Sequence[str]) -> int:
    """`hivlp train`: train a HiVLP by a recipe."""
    parser = _train_parser()
    given = parse(parser, arguments)
    if isinstance(given, int):
        return given
    missing = [f"--{name}" for name in ("corpus", "out") if not getattr(given, name)]
    if not given.list and (given.recipe is None or missing):
        wanted = "a recipe (see --list)" if given.recipe is None else " and ".join(missing)
        print(f"hivlp train: {wanted} is needed", file=sys.stderr)
        return USAGE
    need_torch()
    if given.list:
        return _list()
    from hivlp.models.training.loop.command import run_train

    return run_train(given)


def _train_parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "train",
        "Train a HiVLP by a recipe, from scratch or from a checkpoint. Killed and run again with "
        "the same arguments, it goes on. On several GPUs or nodes: accelerate launch -m "
        "hivlp.service.main train ...",
        "hivlp train hivlp-small --corpus pictures/ --out run/\n"
        "         hivlp train hivlp --corpus dataset_coco.json --split train --split restval "
        "--images coco/ --out run/",
    )
    parser.add_argument("recipe", nargs="?", help="a .toml file, or the name of a packaged recipe")
    parser.add_argument("--list", action="store_true", help="list packaged recipes, and stop")
    parser.add_argument("--out", "--output", type=Path, help="folder of the run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PART.FIELD=VALUE",
        help="change one field of the recipe, such as train.batch=64; may be given again",
    )
    parser.add_argument("--threads", type=threads, help="CPU threads (default: torch's)")
    data = parser.add_argument_group("data")
    data.add_argument("--corpus", action="append", default=[], help=CORPUS_HELP)
    data.add_argument(
        "--split",
        action="append",
        default=[],
        choices=("train", "restval", "val", "test"),
        help="of a Karpathy split JSON; may be given again (all)",
    )
    data.add_argument("--images", help="folder of its pictures (the JSON's own)")
    data.add_argument(
        "--aliases", choices=("img2dataset",), help="columns are named as this program does it"
    )
    data.add_argument(
        "--group", metavar="FIELD", help="metadata field whose equals show the same thing"
    )
    return parser


def _list() -> int:
    from hivlp.models.training.recipe import packaged, read_recipe

    for name in packaged():
        print(f"{name:<16} {read_recipe(name).about}")
    return DONE
