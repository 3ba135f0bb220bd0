"""The command `hivlp worker`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from hivlp.models.errors import MissingExtra
from hivlp.service import logs
from hivlp.service.settings import load_settings

EXAMPLE = """example:
  HIVLP_JOBS__URL=redis://127.0.0.1:6379/1 hivlp worker --home .hivlp

It shares the home with `hivlp serve`, and Redis, named by the same settings (docs/operations.md,
Builds over HTTP)."""


def worker(arguments: Sequence[str]) -> int:
    """Build what was asked for over HTTP, until told to end; then 0."""
    parser = argparse.ArgumentParser(
        prog="hivlp worker",
        description="Build what was asked for over HTTP: one build at a time.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--home", type=Path, help="where artifacts and indexes lie (.hivlp)")
    given = vars(parser.parse_args(list(arguments)))
    settings = load_settings(**{name: one for name, one in given.items() if one is not None})
    logs.set_up(settings.log)
    try:
        from hivlp.service.jobs.worker import work
    except ModuleNotFoundError as error:
        raise MissingExtra("saq", "jobs") from error

    def ready() -> None:
        print("hivlp worker is ready", file=sys.stderr, flush=True)

    asyncio.run(work(settings, ready))
    return 0
