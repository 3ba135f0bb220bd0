"""Servers that `service.py` asks: ours over a synthetic index, and a plain one to hold it against.

    python bench/timed_servers.py hivlp --home HOME --index NAME --queries Q.npz --port 8080
    python bench/timed_servers.py plain --home HOME --index NAME --queries Q.npz --port 8080

`hivlp` is the app of `hivlp serve` with its own settings; only the encoder is a timed one. `plain`
is what a good engineer writes in an afternoon: FastAPI, one ONNX graph, one faiss HNSW over all 768
numbers (M 32, efConstruction 200) with a beam measured to find .99 of the exact ten, metadata from
a list, a thread pool of the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from pydantic import BaseModel
from timed_encoder import DEPTH, DIMS, TimedEncoder, write_stages

from hivlp.index.snapshot.live import LiveSnapshot
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.artifact import ArtifactManifest, StageRecord, TowerRecord
from hivlp.models.levels import LevelSpec
from hivlp.service.serving import Catalogue, ServedModel, ServedVersion
from hivlp.service.settings import Settings, load_settings

NAME = "timed"


class Wanted(BaseModel):
    """What the plain server is asked."""

    query: str
    k: int = 10


@dataclass(frozen=True)
class Given:
    """Where the index, the queries' early answers and the graphs of the encoder lie."""

    home: Path
    index: str
    queries: Path

    def answers(self) -> list[np.ndarray]:
        """Per level, (n, dim) float32."""
        with np.load(self.queries) as found:
            return [found[f"level{n}"] for n in range(1, 1 + len(DIMS))]

    @property
    def graphs(self) -> Path:
        return self.queries.parent / "timed-encoder"


def timed_model(given: Given, space: str) -> ServedModel:
    """What takes the place of an artifact that aims at the index's space."""
    answers = given.answers()
    encoder = TimedEncoder(
        write_stages(given.graphs), answers, gallery_space=space, query_encoder="e" * 64
    )
    return ServedModel(_manifest(encoder.levels, space), {"text": encoder})


def _manifest(levels: Sequence[LevelSpec], space: str) -> ArtifactManifest:
    stages = tuple(
        StageRecord(level=s.level, exit_layer=s.exit_layer, dim=s.dim, file="-", inputs=())
        for s in levels
    )
    return ArtifactManifest(
        name=NAME,
        created_at="2026-01-01T00:00:00Z",
        gallery="nested",
        gallery_space=space,
        query_encoder="e" * 64,
        towers=(TowerRecord(modality="text", family="bert", pooling="mean", stages=stages),),
        files={},
    )


def load(given: Given, settings: Settings) -> Catalogue:
    """The index as `hivlp serve` opens it, asked with the timed encoder."""
    from hivlp.service.loading import Loader

    loader = Loader(settings)
    plain = loader.open(given.index)
    model = timed_model(given, plain.model.gallery_space)
    served = ServedVersion(plain.searcher, model, plain.pictures, plain.snapshot, plain.close_with)
    loader.make_ready(plain)
    for _ in range(3):
        encoder = model.encoders["text"]
        list(encoder.encode(encoder.prepare(["q0"])))
    live: LiveSnapshot[ServedVersion] = LiveSnapshot(served)
    return Catalogue({given.index: live}, loader.store)


def serve_hivlp(given: Given, port: int) -> None:
    """`hivlp serve`, with another model."""
    import uvicorn

    from hivlp.service.app import create_app
    from hivlp.service.begin import SWITCH_S

    sys.setswitchinterval(SWITCH_S)
    settings = load_settings(home=given.home, indexes=(given.index,))
    app = create_app(settings, load=lambda own: load(given, own))
    uvicorn.run(app, port=port, loop="uvloop", http="httptools", ws="none", access_log=False,
                log_level="warning")  # fmt: skip


def serve_plain(given: Given, port: int, ef: int) -> None:
    """One encoder, one graph, one route."""
    import faiss
    import uvicorn
    from fastapi import FastAPI

    from hivlp.models.runtime.threads import available_threads

    faiss.omp_set_num_threads(1)
    index = open_graph(given, ef)
    encoder = one_graph(given)
    names = [{"id": str(row)} for row in range(index.ntotal)]
    pool = ThreadPoolExecutor(available_threads())
    app = FastAPI()

    def find(wanted: Wanted) -> dict[str, Any]:
        (output,) = encoder.encode(encoder.prepare([wanted.query]))
        scores, rows = index.search(output.vectors, wanted.k)
        pairs = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
        return {"hits": [{"score": score, "metadata": names[row]} for row, score in pairs]}

    @app.post("/search/text")
    async def search(wanted: Wanted) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(pool, find, wanted)

    @app.get("/readyz")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    uvicorn.run(app, port=port, loop="uvloop", http="httptools", ws="none", access_log=False,
                log_level="warning")  # fmt: skip


def one_graph(given: Given) -> TimedEncoder:
    """The same encoder without early exits: one graph, the finest answer alone."""
    graph, full = write_stages(given.graphs, (DEPTH,)), given.answers()[-1]
    return TimedEncoder(graph, [full], gallery_space="0" * 64, query_encoder="0" * 64)


def open_graph(given: Given, ef: int) -> Any:
    """An HNSW over the index's own rows, made once and kept."""
    import faiss

    path = given.queries.parent / f"plain-{given.index}.faiss"
    if not path.exists():
        store = SnapshotStore(given.home)
        rows = np.load(store.path(given.index, store.current(given.index)) / "image/rows.npy", "r")
        faiss.omp_set_num_threads(os.cpu_count() or 1)
        graph = faiss.IndexHNSWFlat(rows.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = 200
        for start in range(0, len(rows), 10_000):
            graph.add(np.asarray(rows[start : start + 10_000], np.float32))
            print(f"plain graph: {graph.ntotal} of {len(rows)} rows", file=sys.stderr, flush=True)
        faiss.write_index(graph, str(path))
        faiss.omp_set_num_threads(1)
    index = faiss.read_index(str(path))
    index.hnsw.efSearch = ef
    return index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("hivlp", "plain"))
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--index", required=True)
    parser.add_argument("--queries", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ef", type=int, default=128)
    options = parser.parse_args()
    given = Given(options.home, options.index, options.queries)
    if options.kind == "hivlp":
        serve_hivlp(given, options.port)
    else:
        serve_plain(given, options.port, options.ef)


if __name__ == "__main__":
    main()
