"""What a run leaves out: listed in a file as it is met, and too much when it is too much.

`failures.jsonl` holds one JSON object a line (place, id, reason), the first process's; others write
`failures-N.jsonl`. A run that goes on reads its own file, so that nothing is listed twice; what it
counts is met in this sitting, since a corpus may have been mended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from hivlp.models.corpus import Unusable
from hivlp.models.errors import TrainingError

SHOWN = 3


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something left out, and the row that is thereby lost: several may have one picture."""

    what: Unusable
    row: str


class FailureLog:
    """The file, with each place once. Raises OSError."""

    def __init__(self, folder: Path, process: int = 0) -> None:
        self.path = folder / ("failures.jsonl" if process == 0 else f"failures-{process}.jsonl")
        self._places = _read_places(self.path)

    def begin_anew(self) -> None:
        """Forget what an earlier reading of the corpora has listed."""
        self.path.unlink(missing_ok=True)
        self._places.clear()

    def add(self, failure: Unusable) -> bool:
        """List one thing; whether it is new."""
        if failure.place in self._places:
            return False
        self._places.add(failure.place)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(failure)) + "\n")
        return True

    def check_share(self, left_out: int, tried: int, allowed: float) -> None:
        """Raises TrainingError where more than the share `allowed` of `tried` was left out."""
        if left_out > allowed * max(tried, 1):
            raise TrainingError(
                f"{left_out} of {tried} pictures can't be used, over the share of {allowed:g} "
                f"that data.max_failures allows; they are listed in {self.path}"
            )


def told(failures: Iterable[Unusable]) -> str:
    """The last few of them, for a message."""
    return "; ".join(f"{each.place}: {each.reason}" for each in list(failures)[-SHOWN:])


def _read_places(path: Path) -> set[str]:
    """Places listed before; a last line cut short by a kill is passed over."""
    places = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            places.add(str(json.loads(line)["place"]))
        except (ValueError, KeyError, TypeError):
            continue
    return places
