"""Reading pairs and texts: what is accepted, and that a bad line names its field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hivlp.models.training.pairs import PairsError, read_pairs, read_texts
from tests.unit.models_training.checkpoints import make_pairs


def _corpus(folder: Path, **changed: Any) -> Path:
    (folder / "a.png").write_bytes(b"any bytes")
    row = {"file_name": "a.png", "id": "1", "captions": ["a cat"], "concept": 3} | changed
    kept = {name: value for name, value in row.items() if value is not ...}
    (folder / "metadata.jsonl").write_text(json.dumps(kept) + "\n")
    return folder


def test_reads_pictures_with_captions_and_groups(tmp_path: Path) -> None:
    pairs = read_pairs(make_pairs(tmp_path), group="concept")
    assert len(pairs) == 12
    assert pairs[0].id == "red-0"
    assert pairs[0].captions == ("red", "a picture of red", "red square")
    assert pairs[0].group == pairs[1].group == "red"


def test_without_a_group_equal_captions_belong_together(tmp_path: Path) -> None:
    pairs = read_pairs(make_pairs(tmp_path))
    assert pairs[0].group == pairs[1].group != pairs[2].group


def test_one_caption_may_be_a_plain_text_and_is_cleaned(tmp_path: Path) -> None:
    folder = _corpus(tmp_path, captions=..., caption="  a \t cat ")
    assert read_pairs(folder)[0].captions == ("a cat",)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"file_name": ...}, "field 'file_name' must be the path"),
        ({"file_name": "b.png"}, "field 'file_name': no file 'b.png'"),
        ({"file_name": "../b.png"}, "leaves the folder"),
        ({"file_name": "b\0.png"}, "field 'file_name' must be the path"),
        ({"file_name": "b\ud800.png"}, "field 'file_name' must be the path"),
        ({"captions": ...}, "no captions: one of the fields captions, caption, text"),
        ({"captions": [3]}, "field 'captions' must be a text or a list"),
        ({"captions": []}, "at least one caption"),
        ({"captions": [" "]}, "field 'captions': the text has nothing"),
        ({"concept": ...}, "field 'concept', asked for as the group, is missing"),
        ({"concept": None}, "field 'concept', asked for as the group, is missing"),
    ],
)
def test_a_bad_row_names_its_line_and_field(
    tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(PairsError, match=told) as caught:
        read_pairs(_corpus(tmp_path, **changed), group="concept")
    assert "metadata.jsonl:1" in str(caught.value)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "metadata.jsonl").write_text("{}\nnot json\n".replace("{}", ""))
    with pytest.raises(PairsError, match=r"metadata\.jsonl:2: not JSON"):
        read_pairs(tmp_path)
    (tmp_path / "metadata.jsonl").write_bytes(b'\n{"file_name": "caf\xe9.png"}\n')
    with pytest.raises(PairsError, match=r"metadata\.jsonl:2: not JSON"):
        read_pairs(tmp_path)


def test_an_id_that_is_there_twice_is_named(tmp_path: Path) -> None:
    _corpus(tmp_path)
    line = (tmp_path / "metadata.jsonl").read_text()
    (tmp_path / "metadata.jsonl").write_text(line * 2)
    with pytest.raises(PairsError, match="id '1' is there twice"):
        read_pairs(tmp_path)


def test_sidecars_stand_in_for_metadata(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/cat.JPG").write_bytes(b"any")
    (tmp_path / "deep/cat.txt").write_text("a cat\n\na pet\n")
    (tmp_path / "uncaptioned.png").write_bytes(b"any")
    (pair,) = read_pairs(tmp_path)
    assert pair.id == "deep/cat.JPG"
    assert pair.captions == ("a cat", "a pet")
    with pytest.raises(PairsError, match=r"needs a metadata\.jsonl"):
        read_pairs(tmp_path, group="concept")


def test_no_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PairsError, match=r"no picture with a \.txt"):
        read_pairs(tmp_path)
    with pytest.raises(PairsError, match="no such folder"):
        read_pairs(tmp_path / "nowhere")


def test_texts_are_distinct_cleaned_and_sampled_with_a_seed(tmp_path: Path) -> None:
    lines = [f"text  {i}" for i in range(50)]
    (tmp_path / "a.txt").write_text("\n".join([*lines, "", "text 3", "nul\0"]))
    with gzip.open(tmp_path / "b.txt.gz", "wt") as packed:
        packed.write("text 4\nmore\n")
    files = [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
    texts = read_texts(files, most=100, seed=0)
    assert len(texts) == 51
    assert texts[-1] == "more"
    some = read_texts(files, most=10, seed=1)
    assert some == read_texts(files, most=10, seed=1)
    assert some != read_texts(files, most=10, seed=2)
    assert [t for t in texts if t in some] == some


@pytest.mark.parametrize("name", ["none.txt", "cut.gz", "latin.txt"])
def test_texts_that_cannot_be_read_name_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"some text\n" * 99)[:20])
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(PairsError, match=name):
        read_texts([tmp_path / name], most=10, seed=0)
