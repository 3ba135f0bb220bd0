"""How many usable pictures each file of a stream has, as far as its readers have come.

`data/parts.jsonl` holds a list [file, pictures] a line, the first process's; others write
`data/parts-N.jsonl`. A run that goes on passes over whole passes by these numbers, where else it
would read them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FOLDER = "data"


class PartCounts:
    """The counts of a run's folder, of all processes, and this one's file. Raises OSError."""

    def __init__(self, folder: Path, process: int = 0) -> None:
        name = "parts.jsonl" if process == 0 else f"parts-{process}.jsonl"
        self._path = folder / FOLDER / name
        self.known: dict[int, int] = {}
        for path in sorted((folder / FOLDER).glob("parts*.jsonl")):
            self.known |= _read(path)

    def add(self, found: Mapping[int, int]) -> None:
        """Keep what is new."""
        new = {part: count for part, count in found.items() if self.known.get(part) != count}
        if not new:
            return
        self.known |= new
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.writelines(f"{json.dumps(each)}\n" for each in new.items())


def _read(path: Path) -> dict[int, int]:
    """What a file holds; a last line cut short by a kill is passed over."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            part, count = json.loads(line)
            found[int(part)] = int(count)
        except (ValueError, TypeError):
            continue
    return found
