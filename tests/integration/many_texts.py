"""A corpus that takes the tiny model seconds: so that something can happen in the middle."""

from __future__ import annotations

import json
from pathlib import Path


def many_texts(folder: Path, count: int, captions: int = 1) -> Path:
    """`count` items, each with captions of its own."""
    folder.mkdir(parents=True)
    rows = (
        {"id": f"t{n}", "captions": [f"a red square {captions * n + i}" for i in range(captions)]}
        for n in range(count)
    )
    file = folder / "many.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file
