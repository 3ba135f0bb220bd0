"""A corpus that takes the tiny model seconds: so that something can happen in the middle."""

from __future__ import annotations

import json
from pathlib import Path


def many_texts(folder: Path, count: int) -> Path:
    """`count` items, each with a caption of its own."""
    folder.mkdir(parents=True)
    rows = ({"id": f"t{n}", "caption": f"a red square {n}"} for n in range(count))
    file = folder / "many.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file
