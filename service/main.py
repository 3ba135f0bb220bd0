"""The `hivlp` command: finds subcommands by name and imports only the one that is run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version

from hivlp.models.errors import HivlpError
from hivlp.models.runtime.stopping import SIGTERM_CODE, Terminated

COMMAND_GROUP = "hivlp.commands"
DONE, FAILED, USAGE = 0, 1, 2
ORDER = (
    "demo",
    "train",
    "fit-exits",
    "export",
    "build",
    "calibrate",
    "evaluate",
    "search",
    "snapshots",
    "serve",
    "worker",
    "bench",
)
SUMMARIES = {
    "demo": "real pictures and pretrained towers, fitted, indexed and served",
    "train": "train a HiVLP by a recipe, from scratch or from a checkpoint",
    "fit-exits": "fit early outputs on pretrained towers",
    "export": "write a fitted or trained model as an artifact of ONNX graphs",
    "build": "encode a corpus and publish it as a snapshot of an index",
    "calibrate": "measure an index's widths again, without building it",
    "evaluate": "measure R@K and ANN recall of an index, by level and plan",
    "search": "search an index for a text or a picture",
    "snapshots": "list, verify, activate, roll back, export, collect, pull or push snapshots",
    "serve": "serve indexes over HTTP",
    "worker": "build what was asked for over HTTP, beside the service",
    "bench": "what a cascade costs, by the paper's formula",
}

Command = Callable[[Sequence[str]], int]
"""A subcommand: its arguments in, its exit code out (0 done, 1 failed, 2 usage)."""


def _commands() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=COMMAND_GROUP)}


def _usage(commands: dict[str, EntryPoint]) -> str:
    known = [n for n in ORDER if n in commands] + sorted(set(commands) - set(ORDER))
    lines = [f"  {name:<10} {SUMMARIES.get(name, '')}".rstrip() for name in known]
    return "\n".join(
        ["usage: hivlp COMMAND [ARGUMENT ...]", "", *lines, "", "hivlp COMMAND --help tells more."]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Errors made on purpose print one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = _commands()
    if not given or given[0] in ("-h", "--help"):
        print(_usage(commands))
        return DONE if given else USAGE
    if given[0] in ("-V", "--version"):
        print(f"hivlp {version('hivlp')}")
        return DONE
    point = commands.get(given[0])
    if point is None:
        print(f"hivlp: no command {given[0]!r}\n\n{_usage(commands)}", file=sys.stderr)
        return USAGE
    return run(point.load(), given[0], given[1:])


def run(command: Command, name: str, arguments: Sequence[str]) -> int:
    """Run a loaded subcommand; turn errors made on purpose, the system's, and Ctrl-C into codes."""
    try:
        return command(arguments)
    except HivlpError as error:
        print(f"hivlp {name}: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:  # a full disk, a file that is in the way
        print(f"hivlp {name}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as stop:
        print(f"\nhivlp {name}: interrupted; run it again to go on", file=sys.stderr)
        return SIGTERM_CODE if isinstance(stop, Terminated) else 130


if __name__ == "__main__":
    sys.exit(main())
