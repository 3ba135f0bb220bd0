"""A split of a Karpathy JSON, evaluated by one command: indexed, measured, compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.main import main
from tests.tiny_artifact import COLOURS, make_tiny_artifact, png, solid

Capture = pytest.CaptureFixture[str]
SHADES = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 pictures, each with one to five captions, the last three of another split."""
    root = tmp_path_factory.mktemp("karpathy")
    make_tiny_artifact(root / "tiny")
    (root / "pictures" / "val2014").mkdir(parents=True)
    images: list[dict[str, Any]] = []
    for shade in range(SHADES):
        for name, colour in COLOURS.items():
            number = len(images)
            pixels = tuple(max(0, part - 40 * shade) for part in colour)
            (root / "pictures" / "val2014" / f"{number}.png").write_bytes(png(solid(pixels)))
            said = [f"a {name} square", name, f"photo {name}", f"the {name}", f"is {name}"]
            images.append(
                {
                    "filepath": "val2014",
                    "filename": f"{number}.png",
                    "imgid": number,
                    "cocoid": 1000 + number,
                    "split": "test" if number < 27 else "restval",
                    "sentids": [5 * number + i for i in range(1 + number % 5)],
                    "sentences": [{"raw": text} for text in said[: 1 + number % 5]],
                }
            )
    (root / "Dataset COCO.json").write_text(json.dumps({"dataset": "coco", "images": images}))
    return root


@pytest.fixture
def arguments(made: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("HIVLP_HOME", str(made / "home"))
    file, pictures = str(made / "Dataset COCO.json"), str(made / "pictures")
    given = ["evaluate", "--karpathy", file, "--images", pictures, "--model", str(made / "tiny")]
    return [*given, "--resamples", "50"]


def test_one_command_indexes_a_split_and_measures_it(
    arguments: list[str], made: Path, tmp_path: Path, capsys: Capture
) -> None:
    json_file, ranks = tmp_path / "report.json", tmp_path / "ranks.parquet"
    assert main([*arguments, "--json", str(json_file), "--ranks", str(ranks)]) == 0
    out = capsys.readouterr().out
    assert "index dataset-coco-test" in out
    assert "27 pictures indexed" in out
    report = json.loads(json_file.read_text())
    captions = sum(1 + number % 5 for number in range(27))
    shape = {(d["query"], d["searched"]): (d["queries"], d["rows"]) for d in report["directions"]}
    assert shape == {("text", "image"): (captions, 27), ("image", "text"): (27, captions)}
    six = [
        figure["value"]
        for direction in report["directions"]
        for figure in direction["systems"]["level 3"]["recalls"].values()
    ]
    ar = report["summary"]["level 3"]["ar"]
    assert ar["value"] == pytest.approx(100 * sum(six) / 6, abs=0.01)
    assert ar["low"] <= ar["value"] <= ar["high"]
    assert 30 < ar["value"] < 100  # three shades of a colour can't be told apart by their captions
    table = pq.read_table(ranks)
    assert set(table.column("item").to_pylist()) == {str(1000 + n) for n in range(27)}


def test_again_nothing_is_encoded_for_the_index_and_the_figures_are_the_same(
    arguments: list[str], made: Path, tmp_path: Path, capsys: Capture
) -> None:
    ranks = tmp_path / "ranks.parquet"
    assert main([*arguments, "--ranks", str(ranks)]) == 0
    capsys.readouterr()
    assert main([*arguments, "--against", str(ranks)]) == 0
    out = capsys.readouterr().out
    assert out.count("+0.00 (+0.00 to +0.00)") > 20
    failures = made / "home" / "cache" / "builds" / "dataset-coco-test.failures.jsonl"
    assert failures.read_text() == ""
    assert len(SnapshotStore(made / "home").versions("dataset-coco-test")) >= 2


def test_a_comparison_with_other_queries_fails_but_the_figures_are_there(
    arguments: list[str], tmp_path: Path, capsys: Capture
) -> None:
    other = tmp_path / "other.jsonl"
    line = {"query": "x#0", "item": "x", "from": "text", "to": "image", "system": "funnel"}
    other.write_text(json.dumps({**line, "rank": 1}))
    page, ranks = tmp_path / "page.html", tmp_path / "ranks.jsonl"
    given = [*arguments, "--against", str(other)]
    assert main([*given, "--ranks", str(ranks), "--report", str(page)]) == 1
    found = capsys.readouterr()
    assert f"against: {other} has no query, direction and system in common" in found.err
    assert "text to image: " in found.out
    assert "<h2>Less" not in page.read_text()
    assert ranks.stat().st_size > 0
    assert main([*given, "--ranks", str(other)]) == 2
    assert "would write over" in capsys.readouterr().err
    assert main([*given, "--ranks", "ranks.csv"]) == 1
    found = capsys.readouterr()
    assert "ends in neither" in found.err
    assert found.out == ""


def test_folds_are_of_the_files_own_order(arguments: list[str], capsys: Capture) -> None:
    assert main([*arguments, "--folds", "2", "--fold-size", "10", "--at", "1,5"]) == 0
    out = capsys.readouterr().out
    assert "mean of 2 folds of 10 items" in out
    assert "image to text: 20 queries" in out


def test_the_queries_of_one_split_search_the_whole_set(
    arguments: list[str], capsys: Capture
) -> None:
    only = '{"field": "split", "eq": "restval"}'
    given = [*arguments, "--split", "all", "--queries", only, "--at", "5,10,20"]
    assert main(given) == 0
    out = capsys.readouterr().out
    assert "image to text: 3 queries" in out
    assert "R@20" in out
    assert "30 items" in out


def test_a_picture_that_is_missing_stops_it_and_is_named(
    arguments: list[str], made: Path, tmp_path: Path, capsys: Capture
) -> None:
    images = json.loads((made / "Dataset COCO.json").read_text())["images"]
    images[3]["filename"] = "gone.png"
    (tmp_path / "d.json").write_text(json.dumps({"images": images}))
    place = arguments.index("--karpathy") + 1
    given = [*arguments[:place], str(tmp_path / "d.json"), *arguments[place + 1 :]]
    assert main(given) == 1
    assert "1 of 27 items failed, over the allowed share of 0" in capsys.readouterr().err
    assert main([*given, "--max-failures", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "left out 1, listed in" in out
    assert "figures of a benchmark need all" in out


def test_a_report_page_shows_pictures_and_widths(
    arguments: list[str], tmp_path: Path, capsys: Capture
) -> None:
    assert main([*arguments, "--report", str(tmp_path / "out"), "--at", "1,5"]) == 0
    file = tmp_path / "out" / "index.html"
    assert f"report page: {file}" in capsys.readouterr().out
    document = file.read_text()
    assert "The cascade by K1, what level 1 keeps: " in document
    assert "The cascade by K2, what level 2 keeps: " in document
    assert document.count("data:image/jpeg;base64,") > 20
    assert "found first" in document
    assert main([*arguments, "--report", "/dev/null/x"]) == 1


def test_with_a_reranker_its_figures_stand_beside(
    arguments: list[str], made: Path, tmp_path: Path, capsys: Capture
) -> None:
    artifact = make_tiny_artifact(tmp_path / "pairs", reranker="same")
    model = arguments.index("--model") + 1
    given = [*arguments[:model], str(artifact), *arguments[model + 1 :]]
    file = tmp_path / "report.json"
    assert main([*given, "--rerank", "5", "--json", str(file), "--index", "pairs"]) == 0
    assert "re-ranked: the first 5 rows of a cascade" in capsys.readouterr().out
    report = json.loads(file.read_text())
    systems = report["directions"][0]["systems"]
    assert list(systems)[3:5] == ["cascade", "cascade, re-ranked"]
    recalls = [systems[name]["recalls"]["5"]["value"] for name in list(systems)[3:5]]
    assert recalls[0] == recalls[1]
    assert SnapshotStore(made / "home").manifest("pairs").states is not None
    assert main([*arguments, "--rerank"]) == 1
    assert "has no re-ranker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        (["--split", "dev"], 2, "invalid choice: 'dev'"),
        (["--version", "20200101T000000-000000"], 2, "has no --version"),
        (["--split", "val"], 1, "holds nothing that can be encoded"),
        (["--index", "Not A Name"], 1, "no index name"),
        (["--max-failures", "2"], 2, "not a number from 0 to 1"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], wrong: list[str], code: int, words: str, capsys: Capture
) -> None:
    assert main([*arguments, *wrong]) == code
    assert words in capsys.readouterr().err


def test_what_is_no_split_json_is_refused(made: Path, capsys: Capture) -> None:
    pictures = str(made / "pictures")
    given = ["evaluate", "--karpathy", pictures, "--home", str(made / "home")]
    assert main(given) == 2
    assert "name it with --artifact" in capsys.readouterr().err
    assert main([*given, "--model", str(made / "tiny"), "--split", "all"]) == 1
    assert "folder corpus, not a Karpathy split JSON" in capsys.readouterr().err
    assert main(["evaluate", "--images", pictures]) == 2
    assert "--images belongs to --karpathy" in capsys.readouterr().err
