"""Servers that `service.py` asks: ours over a synthetic index, and a plain one to hold it against.

    python bench/timed_servers.py hivlp --rows 100000 --port 8080
    python bench/timed_servers.py plain --rows 100000 --port 8080

`hivlp` is the app of `hivlp serve` with its own settings; only the encoders are timed ones, and
with `--instant` they take no time. `plain` is what a good engineer writes in an afternoon: FastAPI,
one ONNX graph for texts and one for pictures, one faiss HNSW over all 768 numbers (M 32,
efConstruction 200, fp32 rows in memory) with a beam (`--ef`) that finds .99 of the exact ten,
metadata from a list, a thread pool of the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from pydantic import BaseModel
from timed_encoder import DIMS, Space
from timed_home import NAME, Given, K

from hivlp.index.snapshot.live import LiveSnapshot
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.artifact import ArtifactManifest, StageRecord, TowerRecord
from hivlp.models.levels import LevelSpec
from hivlp.service.serving import Catalogue, ServedModel, ServedVersion
from hivlp.service.settings import Settings, load_settings


class Text(BaseModel):
    """What the plain server is asked."""

    query: str
    k: int = K


class Picture(BaseModel):
    """A picture as base64."""

    image: str
    k: int = K


def timed_model(given: Given, space: str, *, instant: bool = False) -> ServedModel:
    """What takes the place of an artifact that aims at the index's space."""
    text, image = (given.encoder(modality, space) for modality in ("text", "image"))
    encoders = {"text": text, "image": image}
    if instant:
        text.skip_graphs()
    return ServedModel(_manifest(text.levels, space), encoders)


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
        query_encoder=Space(space).encoder,
        towers=(TowerRecord(modality="text", family="hivlp-text", pooling="mean", stages=stages),),
        files={},
    )


def load(given: Given, settings: Settings, *, instant: bool = False) -> Catalogue:
    """The index as `hivlp serve` opens it, asked with the timed encoders."""
    from hivlp.service.loading import Loader

    loader = Loader(settings)
    plain = loader.open(given.index)
    model = timed_model(given, plain.model.gallery_space, instant=instant)
    served = ServedVersion(plain.searcher, model, plain.pictures, plain.snapshot, plain.close_with)
    loader.make_ready(served)
    live: LiveSnapshot[ServedVersion] = LiveSnapshot(served)
    return Catalogue({given.index: live}, loader.store)


def serve_hivlp(given: Given, port: int, *, instant: bool) -> None:
    """`hivlp serve`, with another model."""
    from hivlp.service.begin import begin_process
    from hivlp.service.cli import listening
    from hivlp.service.running import run_server

    settings = load_settings(home=given.home, indexes=(given.index,), port=port)
    begin_process(settings)
    catalogue = load(given, settings, instant=instant)
    with listening(settings.host, settings.port) as bound:
        run_server(settings, bound, lambda _: None, load=lambda _: catalogue)


def serve_plain(given: Given, port: int, ef: int) -> None:
    """Two encoders, one graph, two routes."""
    import faiss
    import uvicorn
    from fastapi import FastAPI
    from PIL import Image

    from hivlp.models.runtime.threads import available_threads

    faiss.omp_set_num_threads(1)
    index, _storage = open_graph(given, ef)
    texts, pictures = given.one_graph("text"), given.one_graph("image")
    names = [{"id": str(row)} for row in range(index.ntotal)]
    pool = ThreadPoolExecutor(available_threads())
    app = FastAPI()

    def answer(vectors: np.ndarray, k: int) -> dict[str, Any]:
        scores, rows = index.search(vectors, k)
        pairs = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
        return {"hits": [{"score": score, "metadata": names[row]} for row, score in pairs]}

    def find_text(wanted: Text) -> dict[str, Any]:
        (output,) = texts.encode(texts.prepare([wanted.query]))
        return answer(output.vectors, wanted.k)

    def find_picture(wanted: Picture) -> dict[str, Any]:
        picture = Image.open(io.BytesIO(base64.b64decode(wanted.image))).convert("RGB")
        (output,) = pictures.encode(pictures.prepare([np.asarray(picture)]))
        return answer(output.vectors, wanted.k)

    @app.post("/search/text")
    async def search_text(wanted: Text) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(pool, find_text, wanted)

    @app.post("/search/image")
    async def search_image(wanted: Picture) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(pool, find_picture, wanted)

    @app.get("/readyz")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    uvicorn.run(app, port=port, loop="uvloop", http="httptools", ws="none", access_log=False,
                log_level="warning")  # fmt: skip


def open_graph(given: Given, ef: int) -> tuple[Any, Any]:
    """An HNSW over the finest rows as fp32 in memory, with the links that our index has too.

    Both would be built by faiss with the same parameters from the same rows; they are built once.
    Returned with its rows, which it doesn't own.
    """
    import faiss

    store = SnapshotStore(given.home)
    folder = store.path(given.index, store.current(given.index)) / "image"
    (links,) = folder.glob(f"level{len(DIMS)}.hnsw")
    rows = np.load(folder / "rows.npy", "r")
    storage = faiss.IndexFlatIP(rows.shape[1])
    for start in range(0, len(rows), 10_000):
        storage.add(np.asarray(rows[start : start + 10_000], np.float32))
    index = faiss.read_index(str(links), faiss.IO_FLAG_SKIP_STORAGE)
    index.storage, index.own_fields = storage, False
    index.hnsw.efSearch = ef
    return index, storage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("hivlp", "plain"))
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ef", type=int, default=128)
    parser.add_argument("--instant", action="store_true")
    options = parser.parse_args()
    given = Given.of(options.rows)
    os.environ.pop("HIVLP_BENCH_HOME", None)  # no setting of the service's, which would say so
    if options.kind == "hivlp":
        serve_hivlp(given, options.port, instant=options.instant)
    else:
        serve_plain(given, options.port, options.ef)


if __name__ == "__main__":
    main()
