"""What a run says of itself while it learns: a line on the terminal, a line a few steps in
`curves.jsonl`, and the same in TensorBoard where that is installed.

One JSON object a line: step, epoch, seconds, progress (0..1), learning_rate, gradient (its length
before clipping), pictures_per_second, and `losses`, each the mean since the line before. Of several
processes, losses are the first one's own; gradient and pictures_per_second are of all.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from hivlp.models.runtime.progress import say

FILE, TENSORBOARD = "curves.jsonl", "tensorboard"


class Curves:
    """Writes the curves of a run that goes on after `step` steps; what a kill left of later ones
    is dropped.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / FILE
        kept = [line for line in read_curves(folder) if line["step"] <= step]
        part = self._path.with_suffix(".part")
        part.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
        part.replace(self._path)
        self._stream = self._path.open("a", encoding="utf-8")
        self._board = _open_board(folder / TENSORBOARD, step)

    def __enter__(self) -> Curves:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()
        if self._board is not None:
            self._board.close()

    def write(self, line: dict[str, Any]) -> None:
        """Add one line."""
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()
        if self._board is None:
            return
        flat = {f"loss/{name}": value for name, value in line["losses"].items()}
        names = ("learning_rate", "gradient", "pictures_per_second", "epoch")
        for name, value in (flat | {name: line[name] for name in names}).items():
            self._board.add_scalar(name, value, line["step"])


def read_curves(folder: Path) -> list[dict[str, Any]]:
    """The lines written so far; one cut short by a kill is passed over."""
    path, found = folder / FILE, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _open_board(folder: Path, step: int) -> Any:
    """TensorBoard's writer, or None where it isn't installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("no TensorBoard here (pip install 'hivlp[tensorboard]'): curves are in curves.jsonl")
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
