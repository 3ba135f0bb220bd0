"""Small captioned corpora in every form, which the tests of training make themselves."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.tiny_artifact import COLOURS, png

Row = tuple[str, bytes, list[str]]


def two_coloured(above: str, below: str, side: int = 16) -> bytes:
    """A PNG whose halves have a colour each."""
    pixels = np.empty((side, side, 3), np.uint8)
    pixels[: side // 2], pixels[side // 2 :] = COLOURS[above], COLOURS[below]
    return png(pixels)


def rows(count: int = 45) -> list[Row]:
    """Up to 45 pictures of two colours each, which no other has: name, PNG, two captions."""
    names = list(COLOURS)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return [
        (f"{a}-{b}", two_coloured(a, b), [f"{a} and {b}", f"{b} beside {a}"])
        for a, b in pairs[:count]
    ]


def folder(target: Path, given: Sequence[Row]) -> Path:
    """Pictures with `metadata.jsonl`."""
    target.mkdir(parents=True)
    lines = []
    for name, data, captions in given:
        (target / f"{name}.png").write_bytes(data)
        lines.append(json.dumps({"file_name": f"{name}.png", "captions": captions, "pair": name}))
    (target / "metadata.jsonl").write_text("\n".join(lines))
    return target


def sidecars(target: Path, given: Sequence[Row]) -> Path:
    """Pictures, each with a `.txt` beside it."""
    target.mkdir(parents=True)
    for name, data, captions in given:
        (target / f"{name}.png").write_bytes(data)
        (target / f"{name}.txt").write_text("\n".join(captions))
    return target


def csv_file(target: Path, given: Sequence[Row]) -> Path:
    """A CSV with paths, captions as JSON lists."""
    folder(target, given)
    (target / "metadata.jsonl").unlink()
    with (target / "list.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "image", "captions"])
        writer.writerows([name, f"{name}.png", json.dumps(captions)] for name, _, captions in given)
    return target / "list.csv"


def jsonl_file(target: Path, given: Sequence[Row]) -> Path:
    """A JSONL file with paths."""
    folder(target, given)
    (target / "metadata.jsonl").unlink()
    lines = [json.dumps({"id": n, "image": f"{n}.png", "captions": c}) for n, _, c in given]
    (target / "list.jsonl").write_text("\n".join(lines))
    return target / "list.jsonl"


def parquet_file(target: Path, given: Sequence[Row]) -> Path:
    """A Parquet file with the pictures' bytes in it."""
    target.mkdir(parents=True)
    columns = {
        "id": [name for name, _, _ in given],
        "image": [data for _, data, _ in given],
        "captions": [captions for _, _, captions in given],
    }
    pq.write_table(pa.table(columns), target / "list.parquet")
    return target / "list.parquet"


def tars(target: Path, given: Sequence[Row], shards: int = 2) -> Path:
    """webdataset shards; returns the folder."""
    target.mkdir(parents=True)
    for shard in range(shards):
        with tarfile.open(target / f"shard-{shard:03d}.tar", "w") as tar:
            for name, data, captions in given[shard::shards]:
                _add(tar, f"{name}.png", data)
                _add(tar, f"{name}.txt", "\n".join(captions).encode())
    return target


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def karpathy(target: Path, given: Sequence[Row]) -> Path:
    """Karpathy's JSON; pictures are of the splits train, val, train, val and so on."""
    folder(target / "images", given)
    images = [
        {
            "filename": f"{name}.png",
            "filepath": "images",
            "imgid": number,
            "split": ("train", "val")[number % 2],
            "sentences": [{"raw": caption} for caption in captions],
        }
        for number, (name, _, captions) in enumerate(given)
    ]
    (target / "dataset.json").write_text(json.dumps({"images": images}))
    return target / "dataset.json"


FORMS: dict[str, Callable[[Path, Sequence[Row]], Path]] = {
    "folder": folder,
    "sidecars": sidecars,
    "csv": csv_file,
    "jsonl": jsonl_file,
    "parquet": parquet_file,
    "webdataset": tars,
    "karpathy": karpathy,
}


def noise(seed: int, side: int = 24) -> Image.Image:
    """A picture without symmetry."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    return Image.fromarray(pixels)
