"""The paper's formula, its example, and what becomes of it with real layers."""

from __future__ import annotations

import pytest

from hivlp.index.cli_bench import bench
from hivlp.index.cost_model import EXAMPLES, cascade_cost, layer_multiplications

DIMS, EXITS = (128, 300, 768), (4, 8, 12)


def test_the_paper_s_example_is_5_9986_and_not_7() -> None:
    found = cascade_cost((10**9, 10**5, 100), DIMS, EXITS, 1e3)
    assert (found.traditional, found.cascade) == (768_000_012_000, 128_030_080_800)
    assert found.ratio == pytest.approx(5.9986, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("Flickr30K test", 1.533),
        ("COCO 5K test", 3.774),
        ("Flickr30K, all", 5.478),
        ("COCO, all", 5.246),
    ],
)
def test_the_benchmark_sizes_give_what_the_formula_says(name: str, ratio: float) -> None:
    scored = next(example.scored for example in EXAMPLES if example.name == name)
    assert cascade_cost(scored, DIMS, EXITS, 1e3).ratio == pytest.approx(ratio, abs=5e-4)
    physical = cascade_cost(scored, DIMS, EXITS, layer_multiplications(768, 16)).ratio
    assert 1.0 < physical < 1.08


def test_one_level_costs_what_no_cascade_does() -> None:
    assert cascade_cost((500,), (768,), (12,), 1e3).ratio == 1.0


def test_a_search_hidden_behind_its_layers_costs_nothing() -> None:
    few = cascade_cost((10, 10, 10), DIMS, EXITS, 1e6)
    assert few.cascade == 12e6 + 10 * 768


def test_a_layer_of_a_small_bert_is_about_a_hundred_million() -> None:
    assert layer_multiplications(768, 16) == pytest.approx(1.14e8, rel=0.01)


def test_the_command_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["cost-model", "--rows", "1000000", "--keeps", "2000", "200"]) == 0
    out = capsys.readouterr().out
    assert "5.9986" in out
    assert "a real layer: 1.136e+08" in out
    assert "yours" in out


@pytest.mark.parametrize(
    "arguments", [[], ["everything"], ["cost-model", "--dims", "8"], ["cost-model", "--rows", "0"]]
)
def test_wrong_usage_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(arguments) == 2
    said = capsys.readouterr()
    assert "hivlp bench" in said.err + said.out
