"""The commands as a user types them: what is printed, what is written, which exit code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import faiss
import pyarrow.parquet as pq
import pytest

from hivlp.index.cli_snapshots import age
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.main import main
from tests.tiny_artifact import COLOURS, make_tiny_artifact, png, solid

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a model, a corpus, and one built version."""
    root = tmp_path_factory.mktemp("cli")
    make_tiny_artifact(root / "home" / "artifacts" / "tiny")
    pictures = root / "pictures"
    pictures.mkdir()
    lines = []
    for name in COLOURS:
        for shade in range(2):
            file = f"{name}{shade}.png"
            pixels = tuple(max(0, part - 9 * shade) for part in COLOURS[name])
            (pictures / file).write_bytes(png(solid(pixels)))
            row = {"file_name": file, "id": f"{name}-{shade}", "text": f"a {name}", "hue": name}
            lines.append(json.dumps(row) + "\n")
    (pictures / "metadata.jsonl").write_text("".join(lines))
    arguments = ["build", str(pictures), "--home", str(root / "home"), "--metadata-group", "hue"]
    assert main([*arguments, "--artifact", str(root / "home" / "artifacts" / "tiny")]) == 0
    return root


@pytest.fixture
def home(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIVLP_HOME", str(made / "home"))
    return made / "home"


def test_search_prints_a_table_with_times(home: Path, capsys: Capture) -> None:
    assert main(["search", "red", "--k", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "score", "id", "name"]
    assert {lines[1].split()[2], lines[2].split()[2]} == {"red-0", "red-1"}
    assert "3 of 20 items" in lines[-1]
    assert "ms" in lines[-1]
    assert "cascade: scan level 1" in lines[-1]


def test_search_by_picture_and_over_captions(home: Path, made: Path, capsys: Capture) -> None:
    picture = str(made / "pictures" / "blue0.png")
    assert main(["search", "--image", picture, "--k", "2", "--plan", "exact"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[2] == "blue-0"
    assert "exact: scan level 3" in out
    assert main(["search", "--image", picture, "--modality", "text", "--k", "1"]) == 0
    assert "a blue" in capsys.readouterr().out


def test_more_results_than_items_prints_all_items(home: Path, capsys: Capture) -> None:
    assert main(["search", "red", "--k", "1000", "--plan", "funnel"]) == 0
    assert "20 of 20 items" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["search"],
        ["search", "red", "--image", "x.png"],
        ["search", "red", "--k", "0"],
        ["search", "red", "--k", "many"],
        ["search", "red", "--plan", "best"],
        ["search", "red", "--modality", "sound"],
        ["snapshots"],
        ["snapshots", "remove"],
        ["snapshots", "activate"],
        ["snapshots", "export"],
        ["snapshots", "gc", "--keep", "0"],
        ["snapshots", "gc", "--older-than", "soon"],
        ["snapshots", "gc", "--older-than", "7"],
        ["snapshots", "pull"],
        ["snapshots", "push"],
        ["build"],
        ["build", "x", "--max-failures", "2"],
        ["evaluate", "--sample", "0"],
        ["evaluate", "--sample", "some"],
        ["evaluate", "--at", "1,5,2000"],
        ["evaluate", "--at", "one"],
        ["evaluate", "--directions", "text-sound"],
        ["evaluate", "--resamples", "-1"],
        ["evaluate", "--cascade", "100,none"],
        ["evaluate", "--folds", "5"],
        ["evaluate", "--queries", "split=test"],
        ["evaluate", "--rerank", "5", "--directions", "text-text,image-image"],
        ["build", "x", "--family", "tree"],
        ["build", "x", "--max-memory", "much"],
        ["build", "x", "--must", "fly"],
        ["build", "x", "--build-threads", "0"],
        ["build", "x", "--max-query-ms", "0"],
        ["calibrate", "--target", "2"],
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    home: Path, capsys: Capture, arguments: list[str]
) -> None:
    assert main(arguments) == 2
    assert "hivlp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["search", " "], "nothing to search for"),
        (["search", "red", "--index", "nothing"], "no active version"),
        (["search", "red", "--index", "Bad Name"], "no index name"),
        (["search", "--image", "nowhere.png"], "nowhere.png"),
        (["search", "red", "--artifact", "nowhere"], "nowhere"),
        (["snapshots", "verify", "--index", "nothing"], "no active version"),
        (["snapshots", "rollback"], "no earlier version"),
        (["snapshots", "activate", "20200101T000000-000000"], "no such version"),
        (["snapshots", "list", "--index", "nothing"], "no such index"),
        (["snapshots", "gc", "--index", "nothing"], "no such index"),
        (["snapshots", "gc", "--index", "../up"], "no index name"),
        (["snapshots", "pull", "nowhere"], "indexes there: none"),
        (["snapshots", "pull", "nowhere", "--version", "x"], "is no version"),
        (["snapshots", "pull", "nonsense://x"], "nonsense"),
        (["snapshots", "push", "nowhere", "--index", "nothing"], "no active version"),
        (["build", "nowhere"], "nowhere"),
        (["evaluate", "--index", "nothing"], "no active version"),
        (["evaluate", "--group", "nothing"], "nothing"),
        (["evaluate", "--folds", "5", "--fold-size", "1000"], "the index has 20"),
        (["evaluate", "--against", "nowhere.parquet"], "nowhere.parquet"),
        (["evaluate", "--against", "nothing"], "no active version"),
        (["evaluate", "--ranks", "ranks.csv"], "neither .parquet nor .jsonl"),
        (["evaluate", "--queries", '{"field": "price", "eq": 1}'], "price"),
    ],
)
def test_a_failure_exits_with_1_and_one_line(
    home: Path, capsys: Capture, arguments: list[str], words: str
) -> None:
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert words in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "command", ["build", "calibrate", "evaluate", "search", "snapshots", "bench"]
)
def test_help_has_an_example(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"example: hivlp {command}" in out


def test_a_build_needs_a_model_only_the_first_time(
    home: Path, made: Path, tmp_path: Path, capsys: Capture
) -> None:
    pictures = str(made / "pictures")
    assert main(["build", pictures, "--home", str(tmp_path)]) == 1
    assert "name the model with --artifact" in capsys.readouterr().err
    assert main(["build", pictures, "--no-activate"]) == 0
    out = capsys.readouterr().out
    assert "20 items, 20 image rows, 20 text rows" in out
    assert "encoded 0 pictures" in out


def test_snapshots_are_listed_verified_activated_and_rolled_back(
    made: Path, tmp_path: Path, capsys: Capture
) -> None:
    home = ["--home", str(tmp_path)]
    artifact = str(made / "home" / "artifacts" / "tiny")
    assert main(["snapshots", "list", *home]) == 0
    assert "no indexes" in capsys.readouterr().out
    for _ in range(2):
        assert main(["build", str(made / "pictures"), "--artifact", artifact, *home]) == 0
    capsys.readouterr()
    assert main(["snapshots", "list", *home]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = (line.replace("*", " ").split()[1] for line in lines)
    assert [line[0] for line in lines] == [" ", "*"]
    assert main(["snapshots", "rollback", *home]) == 0
    assert first in capsys.readouterr().out
    assert main(["snapshots", "activate", second, *home]) == 0
    assert main(["snapshots", "verify", *home]) == 0
    assert "files are as published" in capsys.readouterr().out
    rows = tmp_path / "indexes" / "default" / second / "text" / "rows.npy"
    rows.write_bytes(rows.read_bytes()[:-1] + b"\x01")
    assert main(["snapshots", "verify", *home]) == 1
    assert "text/rows.npy" in capsys.readouterr().err
    assert main(["search", "red", *home]) == 1
    assert "text/rows.npy" in capsys.readouterr().err
    assert main(["snapshots", "verify", "--version", first, *home]) == 0


def spoil(file: Path) -> bytes:
    """Change a byte; returns what was there before."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return data


def test_a_quarantined_version_is_marked_refused_and_lifted_by_verifying(
    made: Path, tmp_path: Path, capsys: Capture
) -> None:
    home = ["--home", str(tmp_path / "home")]
    shutil.copytree(made / "home", tmp_path / "home")
    artifact = str(made / "home" / "artifacts" / "tiny")
    assert main(["build", str(made / "pictures"), "--artifact", artifact, *home]) == 0
    capsys.readouterr()
    store = SnapshotStore(tmp_path / "home")
    version = store.current("default")
    rows = store.path("default", version) / "text" / "rows.npy"
    data = spoil(rows)
    snapshot, passed = store.open_last_good("default")
    assert [entry.version for entry in passed] == [version]
    snapshot.close()
    assert main(["snapshots", "list", *home]) == 0
    assert "QUARANTINED: text/rows.npy: its sha256" in capsys.readouterr().out
    rows.write_bytes(data)
    assert main(["snapshots", "activate", version, *home]) == 1
    assert "hivlp snapshots verify --index default" in capsys.readouterr().err
    assert main(["snapshots", "verify", "--version", version, *home]) == 0
    assert "its quarantine is lifted" in capsys.readouterr().out
    assert main(["snapshots", "activate", version, *home]) == 0
    assert main(["snapshots", "verify", *home]) == 0
    assert "lifted" not in capsys.readouterr().out


def test_gc_says_what_goes_what_stays_and_why(made: Path, tmp_path: Path, capsys: Capture) -> None:
    home = ["--home", str(tmp_path)]
    artifact = str(made / "home" / "artifacts" / "tiny")
    for _ in range(3):
        assert main(["build", str(made / "pictures"), "--artifact", artifact, *home]) == 0
    store = SnapshotStore(tmp_path)
    first, second, third = store.versions("default")
    capsys.readouterr()
    assert main(["snapshots", "gc", "--index", "all", "--keep", "1", *home]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"default {first}: kept, published \d+ seconds ago, less than 7 days", said)
    collect = ["snapshots", "gc", "--keep", "2", "--older-than", "0", *home]
    assert main([*collect, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"default {first}: would remove, 0." in out
    assert f"default {second}: kept, among the 2 activated last" in out
    assert f"default {third}: kept, active" in out
    assert "would free 0." in out
    assert main(collect) == 0
    assert f"default {first}: removed" in capsys.readouterr().out
    assert store.versions("default") == [second, third]
    shutil.copytree(store.root / "default", store.root / "broken")
    (store.root / "broken" / "CURRENT").write_text("{")
    capsys.readouterr()
    assert main(["snapshots", "gc", "--index", "all", *home]) == 1
    told = capsys.readouterr()
    assert "default: freed 0.0 MiB" in told.out
    assert "'broken'" in told.err
    assert "unreadable pointer" in told.err


def test_a_version_is_pushed_pulled_and_searched(
    made: Path, tmp_path: Path, capsys: Capture
) -> None:
    bucket, home = str(tmp_path / "bucket"), ["--home", str(tmp_path / "home")]
    version = SnapshotStore(made / "home").current("default")
    assert main(["snapshots", "push", bucket, "--home", str(made / "home")]) == 0
    assert f"default {version}: sent 0." in capsys.readouterr().out
    assert main(["snapshots", "pull", bucket, "--no-activate", *home]) == 0
    assert "not active" in capsys.readouterr().out
    assert main(["snapshots", "pull", bucket, *home]) == 0
    assert "already here, active" in capsys.readouterr().out
    artifact = str(made / "home" / "artifacts" / "tiny")
    assert main(["search", "red", "--k", "1", "--artifact", artifact, *home]) == 0
    assert "red-" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("90s", 90), ("5m", 300), ("2h", 7_200), (" 7 d ", 604_800)]
)
def test_spans_of_time(text: str, seconds: int) -> None:
    assert age(text).total_seconds() == seconds


def test_a_build_explains_what_it_chose_from(home: Path, made: Path, capsys: Capture) -> None:
    build = ["build", str(made / "pictures"), "--no-activate"]
    assert main([*build, "--explain", "--max-memory", "2GiB"]) == 0
    out = capsys.readouterr().out
    assert "* scan   flat" in out
    assert "a flat scan is exact" in out
    assert main([*build, "--explain", "--family", "graph", "--rows", "fp16"]) == 0
    assert "* graph  sq8" in capsys.readouterr().out
    asked = ["--level1", "rabitqfs", "--must", "mask,rebuild", "--build-threads", "2"]
    assert main([*build, "--explain", *asked]) == 0
    out = capsys.readouterr().out
    assert "must: mask, rebuild" in out
    assert "* scan   rabitqfs+sq8" in out
    assert main([*build, "--family", "graph", "--must", "rebuild"]) == 1
    assert "takes no graphs" in capsys.readouterr().err


def test_calibrating_and_checking_the_promise_from_the_command_line(
    home: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["calibrate", "--no-activate"]) == 0
    out = capsys.readouterr().out
    assert "calibrated from" in out
    assert "text to image" in out
    assert main(["snapshots", "verify", "--recall"]) == 0
    out = capsys.readouterr().out
    assert "text to image, cascade: ANN recall@10" in out
    for line in out.splitlines()[1:]:
        assert "ANN recall" in line or "not measured: every one of" in line
    (tmp_path / "few.txt").write_text("red\n")
    assert main(["calibrate", "--queries", str(tmp_path / "few.txt")]) == 1
    assert "at least 20" in capsys.readouterr().err


def test_export_writes_plain_faiss_files(home: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "out"
    assert main(["snapshots", "export", "--to", str(target)]) == 0
    assert str(target / "image-level1.faiss") in capsys.readouterr().out
    assert faiss.read_index(str(target / "text-level3.faiss")).ntotal == 20
    assert len(json.loads((target / "image-ids.json").read_text())) == 20


def test_evaluate_prints_tables_and_writes_json(
    home: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "report.json"
    assert main(["evaluate", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "any item of the same 'hue' is right" in out
    for words in ("text to image", "image to text", "image to image", "text to text"):
        assert words in out
    report = json.loads(file.read_text())
    found = {(d["query"], d["searched"]): d for d in report["directions"]}
    systems = found["text", "image"]["systems"]
    assert systems["level 3"]["recalls"]["5"]["value"] == 1.0
    assert systems["cascade"]["ann10"]["value"] >= 0.95
    assert report["summary"]["cascade"]["ar"]["value"] > 90


def test_evaluate_writes_ranks_and_compares_with_them(
    home: Path, tmp_path: Path, capsys: Capture
) -> None:
    ranks = tmp_path / "of" / "ranks.parquet"
    assert main(["evaluate", "--ranks", str(ranks), "--at", "1,2"]) == 0
    assert pq.read_table(ranks).num_rows == 5 * 4 * 20
    short = ["evaluate", "--cascade", "2", "--at", "1,2", "--sample", "all"]
    capsys.readouterr()
    assert main([*short, "--against", str(ranks)]) == 1  # ANN recall@10 needs ten of them
    assert "fewer than the 10" in capsys.readouterr().err
    assert main(["evaluate", "--cascade", "12", "--at", "1,2", "--against", str(ranks)]) == 0
    out = capsys.readouterr().out
    assert "less " + str(ranks) in out
    assert "R@1 +0.00 (+0.00 to +0.00)" in out
    assert "overlap@10 100.0 (100.0-100.0)" in out
    assert main(["evaluate", "--against", "default", "--directions", "text-image"]) == 0
    out = capsys.readouterr().out
    assert "text to image   cascade" in out
    assert "image to image" not in out


def test_evaluate_compares_two_models_on_one_index(
    home: Path, tmp_path: Path, capsys: Capture
) -> None:
    (artifact,) = (home / "artifacts").iterdir()
    report = tmp_path / "report.json"
    given = ["evaluate", "--directions", "text-image", "--json", str(report)]
    assert main([*given, "--against", str(artifact)]) == 0
    found = json.loads(report.read_text())
    assert found["against"] == str(artifact)
    apart = {own["system"]: own for own in found["differences"]}
    assert apart["cascade"]["overlap10"]["value"] == 100
    assert apart["cascade"]["ours"] == apart["cascade"]["theirs"]
    assert apart["level 3"]["overlap10"] is None
    capsys.readouterr()
    other = make_tiny_artifact(tmp_path / "other", seed=1)
    assert main([*given, "--against", str(other)]) == 1
    assert "gallery_space" in capsys.readouterr().err


def test_searching_imports_no_torch(home: Path) -> None:
    program = (
        "import sys; from hivlp.service.main import main; code = main(['search', 'red']);"
        "bad = {'torch', 'transformers', 'fastapi'} & set(sys.modules); sys.exit(code or len(bad))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
