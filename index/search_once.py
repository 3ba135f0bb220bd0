"""One search from the command line: encode, search, print a table with times."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivlp.index.build.model import Model, query_outputs
from hivlp.index.build.vectors.queries import one_vector, own_space
from hivlp.index.cascade import PlanRequest
from hivlp.index.errors import BuildError
from hivlp.index.filters import parse_filter
from hivlp.index.plans import run_early
from hivlp.index.searcher import FoundItem
from hivlp.index.searchers import open_searcher
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.errors import ImageError
from hivlp.models.levels import FloatArray, nested_prefix
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


def print_search(given: argparse.Namespace, store: SnapshotStore, artifact: Path | None) -> int:
    """Search and print; a vector needs no artifact. Raises HivlpError for what can't be."""
    began = time.perf_counter()
    snapshot = store.open(given.index, given.version)
    model = None if artifact is None else Model.load(artifact, threads=given.threads)
    if model is not None:
        model.check_fits(snapshot.manifest.gallery_space)
    searcher = open_searcher(snapshot, None if model is None else model.query_encoder)
    opened = time.perf_counter()
    outputs = _vector(snapshot, given) if model is None else _encode(model, given)
    encoded = time.perf_counter()
    request = PlanRequest(
        given.modality, _query(given), given.k, _plan(given), early_exit=given.early_exit
    )
    mask = None
    if given.filter is not None:
        mask = searcher.mask(given.modality, parse_filter(given.filter))
    plan = searcher.plan(request, allowed=None if mask is None else mask.count)
    found, level = run_early(searcher, given.modality, plan, outputs, mask)
    hits = searcher.items(given.modality, found, given.k, 0)
    done = time.perf_counter()
    times = SearchTimes(1e3 * (opened - began), 1e3 * (encoded - opened), 1e3 * (done - encoded))
    run = [stage for stage in plan.stages if stage.level <= level]
    stages = " > ".join(f"{s.method} level {s.level} keep {s.keep}" for s in run)
    print(table(hits, searcher.metadata([hit.id for hit in hits], None)))
    print(
        f"\n{len(hits)} of {searcher.info.items} items; encoded in {times.encode_ms:.1f} ms, "
        f"searched in {times.search_ms:.2f} ms ({plan.name}: {stages}); "
        f"opened in {times.open_ms:.0f} ms"
    )
    return 0


def table(hits: Sequence[FoundItem], metadata: Sequence[dict[str, Any]]) -> str:
    """Rank, score, id, and the caption that matched or the item's name."""
    if not hits:
        return "nothing found"
    width = max(2, *(len(hit.id) for hit in hits))
    lines = [f"{'rank':>4}  {'score':>6}  {'id':<{width}}  name"]
    for rank, (hit, values) in enumerate(zip(hits, metadata, strict=True), start=1):
        name = hit.text or next((str(values[n]) for n in NAME_COLUMNS if n in values), "")
        lines.append(f"{rank:>4}  {hit.score:>6.3f}  {hit.id:<{width}}  {name}".rstrip())
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


def _encode(model: Model, given: argparse.Namespace) -> dict[int, FloatArray]:
    """Every early output of the query, one row each. Raises InputError, BuildError."""
    if given.image is None:
        if model.text is None:
            raise BuildError(f"the model {model.name!r} has no text tower")
        text = clean_text(given.text, max_chars=MAX_TEXT_CHARS)
        return query_outputs(model.text, model.text.prepare([text]))
    if model.image is None:
        raise BuildError(f"the model {model.name!r} has no image tower")
    return query_outputs(model.image, model.image.prepare([_picture(given.image)]))


def _picture(path: Path) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ImageError("unreadable_image", f"{path}: {error.strerror}", param="image") from error
    return decode_image(data, ImageLimits())
