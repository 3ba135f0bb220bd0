"""The command `hivlp import`. torch is imported when it is run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hivlp.models.cli import DONE, hivlp_home, need_torch, parse, parser_of


def import_model(arguments: Sequence[str]) -> int:
    """`hivlp import`: a pretrained checkpoint, converted and checked, under HIVLP_HOME."""
    given = parse(import_parser(), arguments)
    if isinstance(given, int):
        return given
    need_torch()
    from hivlp.models.training.importing import describe, next_command
    from hivlp.models.training.run_import import run_import

    imported = run_import(given.source, given.name, given.home or hivlp_home())
    print("\n".join(describe(imported)))
    print(f"next: {next_command(imported)}")
    return DONE


def import_parser() -> argparse.ArgumentParser:
    """The arguments of `hivlp import`."""
    parser = parser_of(
        "import",
        "Take in a pretrained checkpoint: BERT, RoBERTa, MiniLM, ViT, DeiT, CLIP, SigLIP or "
        "OpenCLIP, from a local folder or by its name on the hub. Weights are loaded strictly, and "
        "compared with transformers' own forward where that is installed.",
        "hivlp import openai/clip-vit-base-patch32",
    )
    parser.add_argument("source", help="a folder, or a hub's owner/name or owner/name@revision")
    parser.add_argument("--name", help="its name under HIVLP_HOME/checkpoints (the source's last)")
    parser.add_argument("--home", type=Path, help="in place of HIVLP_HOME")
    return parser
