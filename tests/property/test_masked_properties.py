"""Filters and deletions through the `Searcher` protocol: every codec, both families, any share.

The oracle scores every allowed row at the finest level. Wide stages must equal it; with the widths
an index gives by itself, all k allowed rows come back, and nearly the right ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hivlp.index.backends.exact import best_rows
from hivlp.index.backends.rows import LevelRows
from hivlp.index.candidates import Candidates
from hivlp.index.cascade import Plan, PlanRequest
from hivlp.index.level_index import CODECS, FAST_SCAN, Codec, Family
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.masks import RowMask
from hivlp.index.plans import stage_query
from hivlp.index.searcher import Searcher
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.levels import FloatArray, nested_prefix, normalise
from tests.fakes import DIMS, unit_vectors, write_snapshot

ROWS = 7_000
SPECTRUM = np.geomspace(4, 0.2, DIMS[-1], dtype=np.float32)
GALLERY = normalise(unit_vectors(ROWS, DIMS[-1]) * SPECTRUM)
GALLERY[100:160] = GALLERY[100]  # equal rows, some allowed and some not
SHARES = {"nothing": 0.0, "1 %": 0.01, "10 %": 0.1, "50 %": 0.5, "5 % deleted": 0.95}
KINDS: tuple[tuple[Family, Codec], ...] = (
    *(("scan", codec) for codec in CODECS),
    ("graph", "flat"),
    ("graph", "sq8"),
)
TASTE = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
MANY = 1_000_000
"""More rows than are scored without a cascade."""


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def searcher(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LocalSearcher:
    family, codec = request.param
    store = SnapshotStore(tmp_path_factory.mktemp(f"{family}-{codec}"))
    write_snapshot(store, images=GALLERY, family=family, level1=codec)
    return LocalSearcher(store.open("default"))


def exits_of(seed: int) -> dict[int, FloatArray]:
    """Early outputs of one query near a row: noisy prefixes of the finest."""
    rng = np.random.default_rng(seed)
    near = GALLERY[rng.integers(ROWS)][None]
    finest = normalise(near + 0.2 * unit_vectors(1, DIMS[-1], seed))
    outputs = {len(DIMS): finest}
    for level, dim in enumerate(DIMS[:-1], start=1):
        wobble = 0.1 * unit_vectors(1, dim, seed + level)
        outputs[level] = normalise(nested_prefix(finest, dim) + wobble)
    return outputs


def run_masked(
    searcher: Searcher, plan: Plan, outputs: Mapping[int, FloatArray], mask: RowMask
) -> Candidates:
    """Every stage of a masked plan, by the protocol alone."""
    dims = {spec.level: spec.dim for spec in searcher.info.levels}
    found: list[Candidates] | None = None
    for stage in plan.stages:
        query = stage_query(stage, outputs, dims[stage.level])
        found = searcher.step("image", stage, query, found, mask=mask)
    assert found is not None
    return found[0]


def masked(share: float, seed: int) -> RowMask:
    return RowMask.of(np.random.default_rng(seed).random(ROWS) < share)


def truth(outputs: Mapping[int, FloatArray], k: int, mask: RowMask) -> Candidates:
    return best_rows(LevelRows(GALLERY, DIMS[-1]), outputs[len(DIMS)][0], k, mask)


@pytest.mark.parametrize("share", SHARES)
@TASTE
@given(
    seed=st.integers(0, 2**31), k=st.integers(1, 60), name=st.sampled_from(["cascade", "funnel"])
)
def test_stages_wide_enough_find_exactly_the_best_allowed_rows(
    searcher: LocalSearcher,
    share: str,
    seed: int,
    k: int,
    name: str,
) -> None:
    outputs, mask = exits_of(seed), masked(SHARES[share], seed)
    keeps = ((1, ROWS), (2, ROWS), (3, k)) if name == "cascade" else ((1, ROWS), (3, k))
    request = PlanRequest("image", "text", k, name, keeps)  # type: ignore[arg-type]
    found = run_masked(searcher, searcher.plan(request, allowed=MANY), outputs, mask)
    expected = truth(outputs, k, mask)
    assert len(found) == min(k, mask.count)
    assert found.rows.tolist() == expected.rows.tolist()
    np.testing.assert_array_equal(found.scores, expected.scores)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["auto", "cascade", "funnel", "exact"])
def test_an_index_s_own_plan_returns_all_k_allowed_rows_nearly_all_the_best(
    searcher: LocalSearcher,
    share: str,
    name: str,
) -> None:
    plan = searcher.plan(PlanRequest("image", "text", 10, name), allowed=MANY)  # type: ignore[arg-type]
    held = []
    for seed in range(20):
        outputs, mask = exits_of(seed), masked(SHARES[share], seed)
        found, expected = run_masked(searcher, plan, outputs, mask), truth(outputs, 10, mask)
        assert len(found) == min(10, mask.count)
        assert mask.allowed[found.rows].all()
        assert len(set(found.rows.tolist())) == len(found)
        held += [np.isin(expected.rows, found.rows).mean()] if len(expected) else []
    assert not held or np.mean(held) >= 0.97  # observed at least 0.995


def test_fast_scan_codes_have_maskable_ones_beside_them(searcher: LocalSearcher) -> None:
    side = searcher.snapshot.sides["image"]
    level1 = searcher.snapshot.manifest.sides["image"].level1
    assert (side.maskable is not None) == (level1 in FAST_SCAN)
    if side.maskable is not None:
        assert side.maskable.capabilities.mask
        assert (side.maskable.level, side.maskable.size) == (1, ROWS)


def test_an_index_that_need_not_mask_still_answers_right(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=GALLERY, level1="rabitqfs", must=())
    searcher = LocalSearcher(store.open("default"))
    assert searcher.snapshot.sides["image"].maskable is None
    assert not (searcher.snapshot.path / "image" / "level1.maskable.faiss").exists()
    outputs, mask = exits_of(3), masked(0.95, 3)
    request = PlanRequest("image", "text", 10, "cascade", ((1, ROWS), (2, ROWS)))
    found = run_masked(searcher, searcher.plan(request, allowed=MANY), outputs, mask)
    assert found.rows.tolist() == truth(outputs, 10, mask).rows.tolist()
