"""A graph that was chosen by an estimate and then measured to gain nothing isn't served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hivlp.index.backends.choose import open_graph, open_level, write_graph
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.build.beams import measure_beams
from hivlp.index.build.directions import Direction
from hivlp.index.build.served import useless_graph, without_graph
from hivlp.index.build.widths import exact_best
from hivlp.index.snapshot.manifest import OptionRecord, WidthRecord
from hivlp.models.levels import FloatArray, nested_prefix, normalise
from tests.fakes import DIMS, specs, unit_vectors


def record(
    ef: int, *, plan: str = "cascade", query: str = "text", recall: float = 1.0, k: int = 10
):  # type: ignore[no-untyped-def]
    return WidthRecord(
        searched="image", query=query, plan=plan, k=k, keeps=(10,), efs=(32, ef), family="graph",  # type: ignore[arg-type]
        target=0.99, recall_chosen_on=recall, recall_held_out=recall, queries=9,
    )  # fmt: skip


def measured(gallery: FloatArray, folder: Path) -> list[WidthRecord]:
    """Beams of both plans, over a gallery with two graphs."""
    finest = normalise(gallery[:40] + 0.1 * unit_vectors(40, DIMS[-1], 1))
    rows = {
        s.level: LevelRows(gallery, s.dim, inverse_norms(gallery, s.dim) if s.level < 3 else None)
        for s in specs()
    }
    queries = {s.level: nested_prefix(finest, s.dim) for s in specs()}
    direction = Direction("image", "text", queries, rows, np.arange(40) % 2 == 1)
    graphs = {}
    for level in (1, 3):
        write_graph(folder / f"{level}.hnsw", rows[level])
        codes = open_level(level, rows[level], None, "numpy")
        graphs[level] = open_graph(folder / f"{level}.hnsw", rows[level], codes)
    return measure_beams(direction, graphs, exact_best(direction, 3, 11), (10,), 0.99)


@pytest.mark.parametrize("different", [5, 1_500])
def test_a_graph_of_mostly_equal_rows_gains_nothing(different: int, tmp_path: Path) -> None:
    spectrum = np.geomspace(4, 0.2, DIMS[-1], dtype=np.float32)
    base = normalise(unit_vectors(different, DIMS[-1]) * spectrum)
    gallery = base[np.random.default_rng(0).integers(0, different, 4_000)]
    reason = useless_graph(measured(gallery, tmp_path), "image", 4_000)
    if different == 5:
        assert reason is not None
        assert "4000 of 4000 rows" in reason
    else:
        assert reason is None


def test_one_exhaustive_plan_is_enough_and_other_sides_and_widths_say_nothing() -> None:
    useful = [record(64), record(500, k=100), record(64, plan="funnel")]
    assert useless_graph(useful, "image", 500) is None
    reason = useless_graph([*useful, record(500, query="image", plan="funnel")], "image", 500)
    assert reason is not None
    assert "for image queries by the funnel plan" in reason
    assert useless_graph([record(500)], "text", 500) is None


def test_a_graph_that_no_beam_helps_is_useless_where_the_scan_finds_enough() -> None:
    lost = record(64, recall=0.8)
    assert useless_graph([lost], "image", 500) is None
    scan = record(0).model_copy(update={"family": "scan", "efs": ()})
    reason = useless_graph([scan, lost], "image", 500)
    assert reason is not None
    assert "no beam finds more than 0.800" in reason
    assert useless_graph([scan, record(64, recall=0.98)], "image", 500) is None


def test_the_scan_over_the_same_codes_takes_the_graph_s_place() -> None:
    def option(family: str, level1: str, *, chosen: bool = False) -> OptionRecord:
        return OptionRecord(  # type: ignore[call-arg]
            family=family, level1=level1, rows=9, memory_bytes=9, chosen=chosen, reason="measured",
        )  # fmt: skip

    options = (option("scan", "flat"), option("scan", "sq8"), option("graph", "sq8", chosen=True))
    after = without_graph(options, "it gains nothing")
    assert [(o.family, o.level1) for o in after if o.chosen] == [("scan", "sq8")]
    assert [o.reason for o in after] == ["measured", "the graph gained nothing", "it gains nothing"]
