"""One search from the command line: encode, search, print a table with times."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hivlp.index.build.model import Model, query_outputs
from hivlp.index.build.vectors.queries import one_vector, own_space
from hivlp.index.cascade import PlanRequest
from hivlp.index.errors import BuildError
from hivlp.index.filters import parse_filter
from hivlp.index.plans import run_early
from hivlp.index.reranking import PairMeans, Reranked, check_pair, rerank
from hivlp.index.searcher import FoundItem, Searcher
from hivlp.index.searchers import open_searcher
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.index.snapshot.uploads import picture_roots
from hivlp.models.encoder import RgbImage
from hivlp.models.errors import ImageError
from hivlp.models.levels import FloatArray, nested_prefix
from hivlp.models.reranker import DEFAULT_RERANKED
from hivlp.models.runtime.images import ImageLimits, decode_image
from hivlp.models.runtime.texts import clean_text

MAX_TEXT_CHARS = 2_000
NAME_COLUMNS = ("name", "title", "caption")


@dataclass(frozen=True, slots=True)
class SearchTimes:
    """Milliseconds of each part."""

    open_ms: float
    encode_ms: float
    search_ms: float
    rerank_ms: float | None = None


def print_search(given: argparse.Namespace, store: SnapshotStore, artifact: Path | None) -> int:
    """Search and print; a vector needs no artifact. Raises HivlpError for what can't be."""
    if given.rerank:
        check_pair(_query(given), given.modality)
    times = [time.perf_counter()]
    snapshot = store.open(given.index, given.version)
    model = _model(given, artifact, snapshot)
    searcher = open_searcher(snapshot, None if model is None else model.query_encoder)
    times.append(time.perf_counter())
    content, outputs = _asked(given, snapshot, model)
    times.append(time.perf_counter())
    need = max(given.k, _reranked(given)) if given.rerank else given.k
    request = PlanRequest(
        given.modality, _query(given), need, _plan(given), early_exit=given.early_exit
    )
    mask = None
    if given.filter is not None:
        mask = searcher.mask(given.modality, parse_filter(given.filter))
    plan = searcher.plan(request, allowed=None if mask is None else mask.count)
    found, level = run_early(searcher, given.modality, plan, outputs, mask)
    ranked = Reranked(tuple(searcher.items(given.modality, found, need, 0)), {})
    times.append(time.perf_counter())
    if given.rerank:
        ranked = _rerank(searcher, store, model, given, content, ranked.items)
        times.append(time.perf_counter())
    hits = ranked.items[: given.k]
    run = [stage for stage in plan.stages if stage.level <= level]
    stages = " > ".join(f"{s.method} level {s.level} keep {s.keep}" for s in run)
    print(table(hits, searcher.metadata([hit.id for hit in hits], None), ranked.matches))
    took = SearchTimes(*(1e3 * (after - before) for before, after in pairwise(times)))
    again = "" if took.rerank_ms is None else f"re-ranked in {took.rerank_ms:.1f} ms; "
    print(
        f"\n{len(hits)} of {searcher.info.items} items; encoded in {took.encode_ms:.1f} ms, "
        f"searched in {took.search_ms:.2f} ms ({plan.name}: {stages}); {again}"
        f"opened in {took.open_ms:.0f} ms"
    )
    return 0


def _model(given: argparse.Namespace, artifact: Path | None, snapshot: Snapshot) -> Model | None:
    """The model of the query, with its re-ranker where one is asked for. Raises HivlpError."""
    if artifact is None:
        return None
    model = Model.load(artifact, threads=given.threads, rerank=given.rerank)
    model.check_fits(snapshot.manifest.gallery_space)
    return model


def _asked(
    given: argparse.Namespace, snapshot: Snapshot, model: Model | None
) -> tuple[str | RgbImage | None, dict[int, FloatArray]]:
    """The text or picture, None for a vector, and every level's query."""
    if model is None:
        return None, _vector(snapshot, given)
    content = _content(given)
    return content, _encode(model, content)


def _reranked(given: argparse.Namespace) -> int:
    return int(given.rerank_k or DEFAULT_RERANKED)


def _rerank(
    searcher: Searcher,
    store: SnapshotStore,
    model: Model | None,
    given: argparse.Namespace,
    content: str | RgbImage | None,
    hits: Sequence[FoundItem],
) -> Reranked:
    """The first hits sorted by the re-ranker, the others behind them."""
    assert model is not None, "a vector is no pair"
    assert model.reranker is not None, "loaded with it"
    assert content is not None
    manifest = store.manifest(given.index, searcher.info.version)
    roots = picture_roots(store.folder(given.index), manifest.corpus.root)
    means = PairMeans(searcher, model.reranker, roots.read)
    head = hits[: _reranked(given)]
    ranked = rerank(content, head, means)
    return Reranked((*ranked.items, *hits[len(head) :]), ranked.matches)


def table(
    hits: Sequence[FoundItem],
    metadata: Sequence[dict[str, Any]],
    matches: Mapping[int, float] | None = None,
) -> str:
    """Rank, score, id, and the caption that matched or the item's name.

    `matches` are a re-ranker's probabilities, by row; without any there is no column of them.
    """
    if not hits:
        return "nothing found"
    width = max(2, *(len(hit.id) for hit in hits))
    head = f"{'match':>6}  " if matches else ""
    lines = [f"{'rank':>4}  {head}{'score':>6}  {'id':<{width}}  name"]
    for rank, (hit, values) in enumerate(zip(hits, metadata, strict=True), start=1):
        name = hit.text or next((str(values[n]) for n in NAME_COLUMNS if n in values), "")
        match = ""
        if matches:
            match = f"{matches[hit.row]:>6.3f}  " if hit.row in matches else f"{'':>6}  "
        lines.append(f"{rank:>4}  {match}{hit.score:>6.3f}  {hit.id:<{width}}  {name}".rstrip())
    return "\n".join(lines)


def _query(given: argparse.Namespace) -> Any:
    if given.vector is not None:  # taken for what is searched, as the service does
        return given.modality
    return "text" if given.image is None else "image"


def _plan(given: argparse.Namespace) -> Any:
    """A vector has no encoder that a cascade could hide behind."""
    return "funnel" if given.vector is not None and given.plan == "auto" else given.plan


def _vector(snapshot: Snapshot, given: argparse.Namespace) -> dict[int, FloatArray]:
    """Every level's query of the vector in a file. Raises BuildError."""
    manifest = snapshot.manifest
    if manifest.gallery != "nested":
        raise BuildError(f"{given.vector}: a per_exit index can't cut its levels from one vector")
    array = one_vector(given.vector, manifest.specs[-1].dim)
    finest = own_space(array, snapshot.rotation, str(given.vector))
    return {spec.level: nested_prefix(finest, spec.dim) for spec in manifest.specs}


def _content(given: argparse.Namespace) -> str | RgbImage:
    """The text, cleaned, or the picture, decoded. Raises InputError."""
    if given.image is None:
        return clean_text(given.text, max_chars=MAX_TEXT_CHARS)
    return _picture(given.image)


def _encode(model: Model, content: str | RgbImage) -> dict[int, FloatArray]:
    """Every early output of the query, one row each. Raises InputError, BuildError."""
    if isinstance(content, str):
        if model.text is None:
            raise BuildError(f"the model {model.name!r} has no text tower")
        return query_outputs(model.text, model.text.prepare([content]))
    if model.image is None:
        raise BuildError(f"the model {model.name!r} has no image tower")
    return query_outputs(model.image, model.image.prepare([content]))


def _picture(path: Path) -> RgbImage:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ImageError("unreadable_image", f"{path}: {error.strerror}", param="image") from error
    return decode_image(data, ImageLimits())
