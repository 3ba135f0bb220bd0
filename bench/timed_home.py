"""The index that `service.py` asks: synthetic rows, queries in its own space, widths measured.

The first half of the queries calibrates the index, as captions would; loads and recall use the
second. Everything is kept once made.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measure import WORK, exact_top
from synthetic import make_queries, make_rows
from timed_encoder import DIMS, Space, TimedEncoder, write_stages

from hivlp.models.levels import Modality

NAME = "timed"
QUERIES, MEASURED_WITH = 4_000, 2_000
KIND_SHARES = (0.12, 0.08)
SHADES = 100
K = 10


@dataclass(frozen=True)
class Given:
    """Where the index, the queries' early answers and the graphs of the encoders lie."""

    home: Path
    index: str
    queries: Path

    @staticmethod
    def of(rows: int) -> Given:
        """The one of so many rows, made or not."""
        folder = WORK / f"service-{rows}"
        return Given(folder / "home", NAME, folder / "queries.npz")

    @property
    def graphs(self) -> Path:
        """One folder for all sizes."""
        return self.queries.parent.parent / "timed-encoder"

    def answers(self) -> list[np.ndarray]:
        """Per level, (n, dim) float32."""
        with np.load(self.queries) as found:
            return [found[f"level{n}"] for n in range(1, 1 + len(DIMS))]

    def truth(self) -> np.ndarray:
        """(n, 10): the rows that exact search finds."""
        with np.load(self.queries) as found:
            rows: np.ndarray = found["truth"]
        return rows

    def encoder(self, modality: Modality, space: str) -> TimedEncoder:
        """The tower in stages."""
        stages = write_stages(self.graphs, modality)
        return TimedEncoder(modality, stages, self.answers(), Space(space))

    def one_graph(self, modality: Modality) -> TimedEncoder:
        """The same tower without early exits: one graph, the finest answer alone."""
        graph = write_stages(self.graphs, modality, staged=False)
        return TimedEncoder(modality, graph, self.answers()[-1:], Space("0" * 64, "0" * 64))


def make_home(rows: int) -> Given:
    """Whatever of the index is not there yet."""
    given = Given.of(rows)
    given.queries.parent.mkdir(parents=True, exist_ok=True)
    array = make_rows(WORK / f"service-rows-{rows}.npy", rows)
    if not (given.home / "indexes" / NAME / "CURRENT").exists():
        _import(rows, given)
    if not given.queries.exists():
        _make_queries(array, given)
    _calibrate(given)
    return given


def _import(rows: int, given: Given) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = given.queries.parent / "metadata.parquet"
    shades = np.random.default_rng(5).integers(0, SHADES, rows)
    ids = [str(row) for row in range(rows)]
    pq.write_table(pa.table({"id": ids, "shade": shades}), metadata)
    command = (
        *("import-vectors", "--vectors", str(WORK / f"service-rows-{rows}.npy")),
        *("--metadata", str(metadata), "--home", str(given.home), "--index", NAME),
        *("--family", "graph", "--rows", "fp16"),
    )
    subprocess.run([sys.executable, "-m", "hivlp.service.main", *command], check=True)


def _make_queries(array: np.ndarray, given: Given) -> None:
    turn = _rotation(given)
    queries = make_queries(array, QUERIES, seed=1)
    finest = queries.levels[-1] @ turn
    levels = [_early(finest, *pair) for pair in zip(DIMS, KIND_SHARES, strict=False)]
    truth = exact_top(np.asarray(array), queries.levels[-1], K)
    named = {f"level{n}": part for n, part in enumerate((*levels, finest), 1)}
    order = np.random.default_rng(2).permutation(QUERIES)  # they come in the order of their rows
    np.savez(given.queries, truth=truth[order], **{key: part[order] for key, part in named.items()})


def _rotation(given: Given) -> np.ndarray:
    from hivlp.index.snapshot.store import SnapshotStore

    store = SnapshotStore(given.home)
    found: np.ndarray = np.load(store.path(NAME, store.current(NAME)) / "rotation.npy")
    return found


def _early(finest: np.ndarray, dim: int, share: float) -> np.ndarray:
    """The queries' own prefixes with noise of this share of their length: an early answer."""
    rng = np.random.default_rng(dim)
    prefix = finest[:, :dim] / np.linalg.norm(finest[:, :dim], axis=1, keepdims=True)
    shake = rng.standard_normal(prefix.shape).astype(np.float32)
    shaken = prefix + share * shake / np.linalg.norm(shake, axis=1, keepdims=True)
    return (shaken / np.linalg.norm(shaken, axis=1, keepdims=True)).astype(np.float32)


def _calibrate(given: Given) -> None:
    """Measure widths, beams, early exits and paces with the text tower, unless that was done."""
    from hivlp.index.build.calibrate import CalibrationSettings, calibrate
    from hivlp.index.build.model import Model
    from hivlp.index.snapshot.store import SnapshotStore

    store = SnapshotStore(given.home)
    manifest = store.manifest(NAME)
    if any(record.query == "text" for record in manifest.widths):
        return
    texts = given.queries.parent / "measured-with.txt"
    texts.write_text("\n".join(f"q{n}" for n in range(MEASURED_WITH)), encoding="utf-8")
    model = Model(NAME, Path(), given.encoder("text", manifest.gallery_space), None)
    settings = CalibrationSettings(queries=texts, sample=MEASURED_WITH)
    print(calibrate(store, NAME, None, model, settings).to_text(), flush=True)
