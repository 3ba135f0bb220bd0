"""`hivlp demo`: from installed packages to a served index, in steps that are each done once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from hivlp.models.runtime.threads import available_threads
from hivlp.service.demo import sources
from hivlp.service.demo.corpus import make_corpus
from hivlp.service.demo.steps import StampFile, Step, run_steps
from hivlp.service.demo.texts import make_texts

MOST_PORT = 65535
MODEL_NAME = "demo"
INDEX_NAME = "default"
# MiniLM is 384 wide: a finest level of 768 numbers would be half zeros.
DIMS = "128,300,384"
# So that the whole chain stays within five minutes on two cores; more texts make level 1 better.
MAX_TEXTS = "15000"
# Raised when a step of ours makes another product from the same packages.
RECIPE_VERSION = "2"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hivlp demo",
        description="Fit, index and serve the demo: emoji drawn by two hands, and photographs. "
        "What is done is kept under HIVLP_HOME (default .hivlp) and never done twice.",
        epilog="example: hivlp demo --port 9000",
    )
    parser.add_argument("--no-serve", action="store_true", help="do all but serve")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (%(default)s)")
    parser.add_argument("--port", type=_port, default=8080, help="port to serve on (%(default)s)")
    return parser


def _port(given: str) -> int:
    number = int(given) if given.isascii() and given.isdigit() else -1
    if not 0 <= number <= MOST_PORT:
        raise argparse.ArgumentTypeError(f"{given!r} is not a whole number within 0..{MOST_PORT}")
    return number


def demo_steps(home: Path) -> list[Step]:
    """The chain: pictures, texts, fit, export, build. Raises MissingExtra."""
    work, artifact = home / "demo", home / "artifacts" / MODEL_NAME
    corpus, texts, fit = work / "corpus", work / "texts.txt.gz", work / "fit"
    packages = sources.versions() | {"hivlp": version("hivlp"), "recipe": RECIPE_VERSION}
    work.mkdir(parents=True, exist_ok=True)
    fit_command = [
        "fit-exits",
        *("--pairs", str(corpus)),
        *("--group", "concept"),
        *("--texts", str(texts)),
        *("--text-tower", str(sources.text_tower())),
        *("--image-tower", str(sources.image_tower())),
        *("--dims", DIMS),
        *("--max-texts", MAX_TEXTS),
        *("--out", str(fit)),
    ]
    credit = work / "sources.json"
    export_command = [
        *("export", str(fit)),
        *("--name", MODEL_NAME),
        *("--sources", str(credit)),
        *("--out", str(artifact)),
    ]
    build_command = [
        "build",
        str(corpus),
        *("--artifact", str(artifact)),
        *("--index", INDEX_NAME),
        *("--metadata-group", "concept"),
    ]
    # how many cores there are changes nothing of what is built, and so is no input
    quick_build = [*build_command, "--threads", str(available_threads())]
    pointer = home / "indexes" / INDEX_NAME / "CURRENT"
    return [
        Step("pictures", lambda: make_corpus(corpus), corpus / "metadata.jsonl", packages),
        Step("texts", lambda: make_texts(texts), texts, {}),
        Step("credits", lambda: sources.write_credits(credit), credit, {}),
        Step(
            "fit early outputs", fit_command, fit / "fit.json", {"command": " ".join(fit_command)}
        ),
        Step("export to ONNX", export_command, artifact / "manifest.json", {}),
        Step("build the index", quick_build, pointer, {"command": " ".join(build_command)}),
    ]


def demo(arguments: Sequence[str]) -> int:
    """Run the demo's steps, then serve; returns the exit code."""
    options = _parser().parse_args(arguments)
    home = Path(os.environ.get("HIVLP_HOME", ".hivlp"))
    os.environ["HIVLP_HOME"] = str(home)
    stamps = StampFile(home / "demo" / "steps.json")
    ran = run_steps(demo_steps(home), stamps, lambda line: print(line, file=sys.stderr, flush=True))
    if not ran:
        print("the demo is already built", file=sys.stderr)
    if options.no_serve:
        return 0
    from hivlp.service.cli import serve

    return serve(["--host", options.host, "--port", str(options.port)])
