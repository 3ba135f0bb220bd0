"""The commands `hivlp fit-exits` and `hivlp export`. torch is imported when one is run."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from hivlp.models.errors import MissingExtra

DONE, FAILED, USAGE = 0, 1, 2


def fit_exits(arguments: Sequence[str]) -> int:
    """`hivlp fit-exits`: fit early outputs on two frozen pretrained towers."""
    given = parse(fit_parser(), arguments)
    if isinstance(given, int):
        return given
    need_torch()
    from hivlp.models.training.run_fit import run_fit

    return run_fit(given)


def fit_parser() -> argparse.ArgumentParser:
    """The arguments of `hivlp fit-exits`."""
    parser = parser_of(
        "fit-exits",
        "Freeze two pretrained towers and fit early outputs on them. Two towers of one checkpoint "
        "(CLIP, SigLIP) need no captions: the finest level is the checkpoint's own space, early "
        "ones are distilled to it from pictures and texts. Any other two are brought together by "
        "pictures with captions. Interrupted and run again, it goes on.",
        "hivlp fit-exits --towers clip/ --images pictures/ --texts sentences.txt.gz --out fit/\n"
        "         hivlp fit-exits --pairs pictures/ --texts sentences.txt.gz --text-tower MiniLM/ "
        "--image-tower efficientnet-lite0.pth --out fit/",
    )
    _add_data(parser)
    _add_towers(parser)
    _add_recipe(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder for the fitted heads")
    parser.add_argument("--threads", type=threads, help="CPU threads (default: every core)")
    parser.add_argument("--cache", type=Path, help="folder for features (HIVLP_HOME/cache)")
    return parser


def export(arguments: Sequence[str]) -> int:
    """`hivlp export`: write a fitted model as an artifact of ONNX graphs."""
    parser = parser_of(
        "export",
        "Write a fitted or trained model as an artifact: one ONNX graph per tower and stage, "
        "checked against torch before anything is put in place.",
        "hivlp export fit/ --name demo --out .hivlp/artifacts/demo",
    )
    parser.add_argument(
        "fit", type=Path, help="folder that `hivlp fit-exits` or `hivlp train` wrote"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the artifact")
    parser.add_argument("--name", help="the artifact's name (default: its folder's)")
    parser.add_argument("--towers", type=Path, help="where the checkpoint of both lies now")
    parser.add_argument("--text-tower", type=Path, help="where the text tower lies now")
    parser.add_argument("--image-tower", type=Path, help="where the image tower lies now")
    parser.add_argument(
        "--sources",
        type=Path,
        action="append",
        default=[],
        help="JSON list of {name, licence, url, attribution} for the manifest",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "w8-heads"),
        default="fp32",
        help="w8-heads: early text heads with 8-bit weights; a short query alone takes less time, "
        "the finest level and the gallery stay fp32 (fp32)",
    )
    parser.add_argument(
        "--check-texts",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="real queries, one a line, that w8-heads must rank as fp32 does: at least 100",
    )
    given = parse(parser, arguments)
    if isinstance(given, int):
        return given
    need_torch()
    from hivlp.models.training.run_fit import run_export

    return run_export(given)


def _add_data(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument(
        "--pairs",
        type=Path,
        help="folder of pictures with metadata.jsonl (file_name, id, captions) or .txt sidecars; "
        "needed unless both towers are of one checkpoint",
    )
    data.add_argument(
        "--images",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="pictures without captions, for --space checkpoint; may be given again",
    )
    data.add_argument(
        "--group", metavar="FIELD", help="metadata field whose equals show the same thing"
    )
    data.add_argument(
        "--texts",
        type=Path,
        action="append",
        default=[],
        help="texts without pictures, one a line, .txt or .gz; may be given again",
    )
    data.add_argument(
        "--max-texts", type=_positive, default=20_000, help="most texts used, a sample (20000)"
    )
    data.add_argument(
        "--max-failures", type=_share, default=0.05, help="share of broken pictures allowed (0.05)"
    )


def _add_towers(parser: argparse.ArgumentParser) -> None:
    towers = parser.add_argument_group("towers")
    towers.add_argument(
        "--towers", type=Path, metavar="FOLDER", help="a checkpoint of both (CLIP, SigLIP)"
    )
    towers.add_argument("--text-tower", type=Path, help="a checkpoint with a text tower")
    towers.add_argument(
        "--image-tower", type=Path, help="a checkpoint with a vision tower, or EfficientNet's .pth"
    )
    layers = "layers to read, coarse first (default: the tower's own)"
    towers.add_argument("--text-exits", type=_whole_numbers, metavar="2,4,6", help=layers)
    towers.add_argument("--image-exits", type=_whole_numbers, metavar="6,7,8", help=layers)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument(
        "--dims",
        type=_whole_numbers,
        help="one a level (128,300,768; in a checkpoint's own space 128,300 and all of it)",
    )
    recipe.add_argument(
        "--space",
        choices=("checkpoint", "pairs"),
        help="where the finest level lies: in the space that both towers share, which then ranks "
        "as the checkpoint does, or in one fitted on pairs (checkpoint where they share one)",
    )
    for name in ("text", "image"):
        recipe.add_argument(
            f"--unfreeze-{name}",
            type=_folds,
            default=0,
            metavar="LAYERS",
            help=f"train the {name} tower's first layers too, with its early heads (0: frozen)",
        )
    recipe.add_argument(
        "--gallery",
        choices=("nested", "per_exit"),
        default="nested",
        help="levels are prefixes of the full vector, or each exit's own (nested)",
    )
    recipe.add_argument("--seed", type=_seed, default=0, help="(0)")
    recipe.add_argument(
        "--max-seconds",
        type=_seconds,
        default=1800.0,
        help="longest time for a fit, features apart; each fold has as long, and each tower that "
        "is unfrozen (1800)",
    )
    recipe.add_argument(
        "--folds",
        type=_folds,
        default=0,
        help="cross-validate over groups first, and write OUT/crossval.json (0: don't)",
    )
    recipe.add_argument("--only-folds", action="store_true", help="cross-validate and stop")
    recipe.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PART.FIELD=VALUE",
        help="change one setting of the recipe, such as finest.epochs=60",
    )


def parser_of(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """A command's parser, with an example below its options."""
    return argparse.ArgumentParser(
        prog=f"hivlp {name}",
        description=description,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace | int:
    """The parsed arguments, or the exit code where argparse has already answered."""
    try:
        return parser.parse_args(list(arguments))
    except SystemExit as stop:
        return DONE if stop.code in (None, 0) else USAGE


def need_torch() -> None:
    """Raises MissingExtra where torch or safetensors is absent."""
    # Waiting threads that spin make a fit many times slower wherever a core is shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import safetensors  # noqa: F401
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "torch", "train") from error


def hivlp_home() -> Path:
    """Where everything is kept: HIVLP_HOME, .hivlp unless set."""
    return Path(os.environ.get("HIVLP_HOME", ".hivlp"))


def default_cache() -> Path:
    """Where features are kept unless told otherwise: HIVLP_HOME/cache/features."""
    return hivlp_home() / "cache" / "features"


def _whole_numbers(given: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in given.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r} is not a list such as 2,4,6") from None
    if any(number < 1 for number in found):
        raise argparse.ArgumentTypeError(f"{given!r}: every number must be at least 1")
    if any(b <= a for a, b in pairwise(found)):
        raise argparse.ArgumentTypeError(f"{given!r}: the numbers must grow")
    return found


def _whole(given: str, least: int, most: int) -> int:
    try:
        number = int(given)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{given!r} is not a whole number within {least}..{most}")
    return number


def _positive(given: str) -> int:
    return _whole(given, 1, 10**9)


def threads(given: str) -> int:
    """A number of threads."""
    return _whole(given, 1, 1024)


def _seed(given: str) -> int:
    return _whole(given, 0, 2**63 - 1)


def _folds(given: str) -> int:
    return _whole(given, 0, 10**6)


def _share(given: str) -> float:
    number = _float(given)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{given!r} is not a number within 0..1")
    return number


def _seconds(given: str) -> float:
    number = _float(given)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{given!r} is not a number of more than 0")
    return number


def _float(given: str) -> float:
    try:
        return float(given)
    except ValueError:
        return math.nan
