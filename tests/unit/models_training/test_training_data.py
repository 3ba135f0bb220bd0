"""What a run reads: every form of corpus, drawn in an order that the seed alone decides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hivlp.models.artifact import ImagePreparation, TextPreparation
from hivlp.models.corpus import PictureOptions, Unusable
from hivlp.models.errors import HivlpError, TrainingError
from hivlp.models.training.data.choice import Choice
from hivlp.models.training.data.failures import FailureLog
from hivlp.models.training.data.listed import ListedBatches, Share
from hivlp.models.training.data.listing import Listing, make_listing
from hivlp.models.training.data.loader import BatchLoader
from hivlp.models.training.data.order import EpochOrder, batch_positions
from hivlp.models.training.data.prepare import Preparation, Preparer, read_vocabulary
from hivlp.models.training.data.settings import AugmentSettings, MaskSettings, TokenizerSettings
from hivlp.models.training.data.sources import DataSource, UsablePicture
from hivlp.models.training.data.wordpiece import learn_wordpiece
from tests.unit.models_training import pictured

ROWS = pictured.rows(12)
IMAGE = ImagePreparation(height=16, width=16, fit="stretch", mean=(0.5,) * 3, std=(0.5,) * 3)
TEXT = TextPreparation(tokenizer_file="tokenizer.json", max_tokens=16, pad_id=0)


def source(*paths: Path, **options: object) -> DataSource:
    return DataSource(tuple(map(str, paths)), PictureOptions(**options))  # type: ignore[arg-type]


def listed(target: Path, given: DataSource, max_failures: float = 0.0) -> Listing:
    return make_listing(target / "list.arrow", given, FailureLog(target), max_failures)


def failures(target: Path) -> list[str]:
    path = target / "failures.jsonl"
    return path.read_text().splitlines() if path.is_file() else []


def preparation(target: Path, *, mask: bool = True, seed: int = 0) -> Preparation:
    captions = (caption for _, _, captions in ROWS for caption in captions)
    settings = TokenizerSettings(vocabulary=200, min_count=1)
    learn_wordpiece(captions, settings, target / "tokenizer.json")
    masking = MaskSettings() if mask else None
    return Preparation(target, TEXT, IMAGE, AugmentSettings(), masking, seed)


def batches(
    target: Path, given: DataSource, share: Share, *, max_failures: float = 0.0, seed: int = 0
) -> ListedBatches:
    listed(target, given, max_failures)
    return ListedBatches(target / "list.arrow", given, preparation(target, seed=seed), share)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("form", sorted(pictured.FORMS))
def test_every_form_lists_the_same_pictures_with_the_same_bytes(tmp_path: Path, form: str) -> None:
    given = source(pictured.FORMS[form](tmp_path / "corpus", ROWS))
    found = listed(tmp_path, given)
    pictures = given.open()
    read = {
        pictures.picture(row.corpus, row.picture): row.captions
        for row in (found[i] for i in range(len(found)))
    }
    assert read == {data: tuple(captions) for _, data, captions in ROWS}
    assert sorted(found.captions()) == sorted(c for _, _, captions in ROWS for c in captions)


def test_karpathy_splits_are_read_one_after_another(tmp_path: Path) -> None:
    path = pictured.karpathy(tmp_path / "corpus", ROWS)
    assert len(listed(tmp_path / "a", source(path, splits=("train",)))) == 6
    assert len(listed(tmp_path / "b", source(path, splits=("train", "val")))) == 12
    with pytest.raises(HivlpError, match="no split 'tarin'"):
        source(path, splits=("tarin",)).open()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"splits": ("train",)}, "--split: "),
        ({"images": "coco"}, "--images: "),
        ({"splits": ("test",), "images": "coco"}, "--split and --images: "),
    ],
)
def test_splits_that_no_corpus_takes_are_refused(
    tmp_path: Path, options: dict[str, object], named: str
) -> None:
    path = pictured.csv_file(tmp_path / "corpus", ROWS)
    with pytest.raises(TrainingError, match=f"^{named}.*list.csv would be read whole"):
        source(path, **options).open()


def test_splits_belong_to_the_karpathy_files_of_several_corpora(tmp_path: Path) -> None:
    split = pictured.karpathy(tmp_path / "a", ROWS)
    table = pictured.csv_file(tmp_path / "b", ROWS)
    assert len(listed(tmp_path, source(split, table, splits=("train",)))) == 6 + 12


def test_a_url_of_a_split_is_one_whatever_its_query() -> None:
    asked = PictureOptions(splits=("train",))
    for url in ("memory://data/coco.json?sig=a", "https://x.test/a/COCO.JSON#b"):
        # a URL with a query is refused by the reader, by that reason and not for its split
        with pytest.raises(HivlpError) as caught:
            DataSource((url,), asked).open()
        assert "--split" not in str(caught.value)


def test_several_corpora_are_one_and_their_equal_ids_are_not_one_item(tmp_path: Path) -> None:
    first = pictured.parquet_file(tmp_path / "a", ROWS[:5])
    second = pictured.tars(tmp_path / "b", ROWS)
    found = listed(tmp_path, source(first, second))
    assert len(found) == 17
    assert len({found[i].item for i in range(17)}) == 17
    assert {found[i].corpus for i in range(17)} == {0, 1}


def test_pictures_of_one_group_are_one_item(tmp_path: Path) -> None:
    given = source(pictured.folder(tmp_path / "corpus", ROWS), group="pair")
    assert len({listed(tmp_path, given)[i].item for i in range(12)}) == 12
    table = tmp_path / "corpus" / "metadata.jsonl"
    lines = [json.loads(line) | {"pair": "one"} for line in table.read_text().splitlines()]
    table.write_text("\n".join(map(json.dumps, [*lines[:-1], lines[-1] | {"pair": "two"}])))
    again = listed(tmp_path / "again", given)
    assert len({again[i].item for i in range(12)}) == 2
    table.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(TrainingError, match=r"one item only, and no other for it to be told from"):
        listed(tmp_path / "alone", given)


def ids_file(path: Path, rows: Sequence[pictured.Row], *more: str) -> str:
    path.write_text("\n".join([*(name for name, _, _ in rows), "", *more]))
    return str(path)


def chosen(given: DataSource, only: str = "", leave_out: str = "") -> DataSource:
    return replace(given, choice=Choice.read(only, leave_out))


def test_files_of_ids_choose_items_in_every_form(tmp_path: Path) -> None:
    first, second = ids_file(tmp_path / "a", ROWS[:5]), ids_file(tmp_path / "b", ROWS[3:4])
    for form in ("csv", "jsonl", "parquet", "webdataset"):
        given = source(pictured.FORMS[form](tmp_path / form, ROWS))
        found = listed(tmp_path / form, chosen(given, first, second))
        assert sorted(found[i].id for i in range(len(found))) == sorted(
            name for name, _, _ in [*ROWS[:3], ROWS[4]]
        )
    parts = chosen(given, leave_out=first).open()
    read = [each.id for p in range(parts.parts) for each in parts.read_part(p)]
    assert sorted(map(str, read)) == sorted(name for name, _, _ in ROWS[5:])


def test_a_file_of_ids_that_cannot_be_is_told_of_by_its_field(tmp_path: Path) -> None:
    given = source(pictured.parquet_file(tmp_path / "corpus", ROWS))
    with pytest.raises(TrainingError, match=r"data\.only: .*none can't be read as a UTF-8 text"):
        chosen(given, str(tmp_path / "none"))
    with pytest.raises(TrainingError, match=r"data\.leave_out: .*empty holds no id"):
        chosen(given, leave_out=ids_file(tmp_path / "empty", []))
    strange = ids_file(tmp_path / "strange", ROWS[:4], "nobody")
    with pytest.raises(TrainingError, match=r"data\.only, .*: 1 ids are of no item .*'nobody'"):
        listed(tmp_path / "a", chosen(given, strange))
    some = ids_file(tmp_path / "some", ROWS[:4])
    with pytest.raises(TrainingError, match="no picture with a caption"):
        listed(tmp_path / "b", chosen(given, some, some))


def test_a_file_of_ids_that_changed_is_another_choice(tmp_path: Path) -> None:
    given = source(pictured.parquet_file(tmp_path / "corpus", ROWS))
    before = chosen(given, ids_file(tmp_path / "ids", ROWS[:4]))
    assert DataSource.from_dict(json.loads(json.dumps(before.as_dict()))) == before
    now = chosen(given, ids_file(tmp_path / "ids", ROWS[:5]))
    assert now != before
    with pytest.raises(TrainingError, match="isn't what it was when the run was begun"):
        before.open()


def a_caption_a_row(target: Path, *, own_ids: bool) -> Path:
    """A CSV as Flickr's captions have it: each picture in as many rows as it has captions."""
    path = pictured.csv_file(target, ROWS)
    pairs = [(name, caption) for name, _, captions in ROWS for caption in captions]
    lines = [
        f"{f'{number},' * own_ids}{name}.png,{caption}"
        for number, (name, caption) in enumerate(pairs)
    ]
    path.write_text("\n".join([f"{'id,' * own_ids}image,caption", *lines]) + "\n")
    return path


@pytest.mark.parametrize("own_ids", [True, False])
def test_rows_of_one_picture_are_one_item(tmp_path: Path, own_ids: bool) -> None:
    given = source(a_caption_a_row(tmp_path / "corpus", own_ids=own_ids))
    found = listed(tmp_path, given)
    rows = [found[i] for i in range(len(found))]
    assert len(rows) == 24
    items = {row.picture: row.item for row in rows}
    assert len(items) == len(set(items.values())) == 12
    assert all(row.item == items[row.picture] for row in rows)
    read = [each for each in given.open().read_part(0) if not isinstance(each, Unusable)]
    assert [each.id for each in read] == [row.id for row in rows]


def test_an_id_that_is_no_shared_picture_is_refused_twice_as_ever(tmp_path: Path) -> None:
    path = a_caption_a_row(tmp_path / "corpus", own_ids=False)
    path.write_text(f"id,image,caption\n,{ROWS[0][0]}.png,a\n{ROWS[0][0]}.png,{ROWS[1][0]}.png,b\n")
    with pytest.raises(HivlpError, match="is there twice: line 2 and line 3"):
        listed(tmp_path, source(path))


def test_a_missing_group_is_a_bad_entry(tmp_path: Path) -> None:
    given = source(pictured.jsonl_file(tmp_path / "corpus", ROWS), group="pair")
    with pytest.raises(TrainingError, match=r"12 of 12 pictures can't be used, .*failures\.jsonl"):
        listed(tmp_path, given, 0.5)
    reasons = [json.loads(line)["reason"] for line in failures(tmp_path)]
    assert set(reasons) == {"field 'pair', asked for as the group, is missing"}


def test_a_listing_of_the_same_source_is_taken_as_it_is(tmp_path: Path) -> None:
    path = pictured.folder(tmp_path / "corpus", ROWS)
    listed(tmp_path, source(path))
    before = (tmp_path / "list.arrow").stat().st_ino
    assert len(listed(tmp_path, source(path))) == 12
    assert (tmp_path / "list.arrow").stat().st_ino == before
    listed(tmp_path, source(path, group="pair"))
    assert (tmp_path / "list.arrow").stat().st_ino != before


def test_what_has_no_caption_is_passed_over_and_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pictured.sidecars(tmp_path / "corpus", ROWS)
    (path / f"{ROWS[0][0]}.txt").unlink()
    assert len(listed(tmp_path, source(path))) == 11
    assert "1 items have no picture or no caption" in capsys.readouterr().err
    assert not (tmp_path / "failures.jsonl").exists()


def test_a_corpus_without_a_caption_is_an_error(tmp_path: Path) -> None:
    path = pictured.sidecars(tmp_path / "corpus", [(n, d, []) for n, d, _ in ROWS])
    with pytest.raises(TrainingError, match="no picture with a caption"):
        listed(tmp_path, source(path))


def test_an_unknown_reader_lists_what_is_installed() -> None:
    with pytest.raises(TrainingError, match=r"data\.reader: no reader 'flies'.*: files"):
        DataSource(("x",), reader="flies").open()


def test_every_pass_draws_every_picture_once_in_another_order() -> None:
    order = EpochOrder(7, seed=1)
    line = [order.at(position) for position in range(21)]
    passes = [[number for epoch, number in line if epoch == e] for e in range(3)]
    assert all(sorted(each) == list(range(7)) for each in passes)
    assert passes[0] != passes[1] != passes[2]
    assert [EpochOrder(7, seed=1).at(p) for p in (20, 3)] == [line[20], line[3]]
    assert [EpochOrder(7, seed=2).at(p) for p in range(7)] != line[:7]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_a_step_as_one_would_have_it(processes: int) -> None:
    whole = list(batch_positions(3, 0, 1, 8))
    parts = [batch_positions(3, p, processes, 8 // processes) for p in range(processes)]
    assert [position for part in parts for position in part] == whole


def test_a_batch_is_the_same_whoever_makes_it_and_whenever(tmp_path: Path) -> None:
    given = source(pictured.folder(tmp_path / "corpus", ROWS))
    one = batches(tmp_path, given, Share(0, 1, 5))
    another = batches(tmp_path, given, Share(0, 1, 5))
    assert same(one[7]["tensors"], another[7]["tensors"])
    assert not same(one[7]["tensors"], one[8]["tensors"])
    other_seed = batches(tmp_path, given, Share(0, 1, 5), seed=1)
    assert not same(one[7]["tensors"], other_seed[7]["tensors"])


def test_two_processes_hold_what_one_holds(tmp_path: Path) -> None:
    given = source(pictured.folder(tmp_path / "corpus", ROWS))
    whole = batches(tmp_path, given, Share(0, 1, 6))[1]["tensors"]
    parts = [batches(tmp_path, given, Share(p, 2, 3))[1]["tensors"] for p in range(2)]
    for name in ("pixel_values", "item"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_a_batch_holds_what_the_losses_read(tmp_path: Path) -> None:
    given = source(pictured.folder(tmp_path / "corpus", ROWS))
    tensors = batches(tmp_path, given, Share(0, 1, 5))[0]["tensors"]
    assert tensors["pixel_values"].shape == (5, 3, 16, 16)
    assert tensors["pixel_values"].dtype == torch.float32
    width = tensors["input_ids"].shape[1]
    for name in ("input_ids", "attention_mask", "mlm_ids", "mlm_labels"):
        assert (tensors[name].shape, tensors[name].dtype) == ((5, width), torch.int64)
    assert tensors["item"].shape == (5,)
    assert (tensors["mlm_labels"] != -100).any(1).all()


def test_a_batch_that_does_not_fit_into_memory_is_told_of_by_its_fields(tmp_path: Path) -> None:
    spec = replace(preparation(tmp_path), augment=AugmentSettings(crop_least=1))
    made = Preparer(spec)
    row = made.prepare(UsablePicture("a", 0, "a.png", ("a",), 0), ROWS[0][1], 0)
    # 2**46 bytes, of which no machine has as many addresses to give
    vast = Preparer(replace(spec, image=IMAGE.model_copy(update={"height": 2**22, "width": 2**21})))
    with pytest.raises(TrainingError, match=r"train\.batch: 1 pictures with model\.vision"):
        vast.batch([row])


def test_every_caption_of_a_picture_is_drawn(tmp_path: Path) -> None:
    given = source(pictured.folder(tmp_path / "corpus", ROWS[:2]))
    found = batches(tmp_path, given, Share(0, 1, 1))
    drawn = {tuple(found[i]["tensors"]["input_ids"][0].tolist()) for i in range(32)}
    assert len(drawn) == 4


def spoil(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")


def test_a_broken_picture_is_replaced_and_listed_once(tmp_path: Path) -> None:
    path = pictured.folder(tmp_path / "corpus", ROWS)
    spoil(path, [ROWS[4][0]])
    given = source(path)
    found = batches(tmp_path, given, Share(0, 1, 12))
    log = FailureLog(tmp_path)
    loader = BatchLoader(
        found, range(4), log, workers=0, pinned=False, expected=12, max_failures=0.1
    )
    read = list(loader)
    assert [len(tensors["item"]) for tensors in read] == [12] * 4
    assert all(len(tensors["item"].unique()) == 11 for tensors in read)
    (line,) = [json.loads(line) for line in failures(tmp_path)]
    assert line["place"] == f"{ROWS[4][0]}.png"
    assert "broken or cut short" in line["reason"]
    assert FailureLog(tmp_path).add(Unusable(f"{ROWS[4][0]}.png", None, "again")) is False


def test_too_many_broken_pictures_end_the_run(tmp_path: Path) -> None:
    path = pictured.folder(tmp_path / "corpus", ROWS)
    spoil(path, [name for name, _, _ in ROWS[:3]])
    found = batches(tmp_path, source(path), Share(0, 1, 12))
    loader = BatchLoader(
        found,
        range(4),
        FailureLog(tmp_path),
        workers=0,
        pinned=False,
        expected=12,
        max_failures=0.1,
    )
    with pytest.raises(TrainingError, match=r"3 of 12 pictures can't be used, over the share"):
        list(loader)


def test_a_mended_corpus_is_no_longer_held_against_a_run(tmp_path: Path) -> None:
    path = pictured.folder(tmp_path / "corpus", ROWS)
    spoil(path, [name for name, _, _ in ROWS[:3]])
    found = batches(tmp_path, source(path), Share(0, 1, 12))
    options = {"workers": 0, "pinned": False, "expected": 12, "max_failures": 0.1}
    with pytest.raises(TrainingError, match="3 of 12 pictures"):
        list(BatchLoader(found, range(4), FailureLog(tmp_path), **options))  # type: ignore[arg-type]
    for name, data, _ in ROWS[:2]:
        (path / f"{name}.png").write_bytes(data)
    again = batches(tmp_path, source(path), Share(0, 1, 12))
    read = list(BatchLoader(again, range(4), FailureLog(tmp_path), **options))  # type: ignore[arg-type]
    assert len(read) == 4
    assert len(failures(tmp_path)) == 3


def test_listing_anew_begins_its_failures_anew(tmp_path: Path) -> None:
    path = pictured.jsonl_file(tmp_path / "corpus", ROWS)
    whole = path.read_text()
    path.write_text("\n".join(["no object", *whole.splitlines()[1:]]))
    with pytest.raises(TrainingError, match="1 of 12 pictures can't be used"):
        listed(tmp_path, source(path))
    path.write_text(whole)
    assert len(listed(tmp_path, source(path))) == 12
    assert not (tmp_path / "failures.jsonl").exists()


def test_a_broken_picture_counts_with_every_row_that_needs_it(tmp_path: Path) -> None:
    path = a_caption_a_row(tmp_path / "corpus", own_ids=False)
    spoil(path.parent, [ROWS[0][0], ROWS[1][0]])
    found = batches(tmp_path, source(path), Share(0, 1, 12))
    loader = BatchLoader(
        found,
        range(4),
        FailureLog(tmp_path),
        workers=0,
        pinned=False,
        expected=24,
        max_failures=0.16,
    )
    with pytest.raises(TrainingError, match="4 of 24 pictures can't be used"):
        list(loader)
    assert len(failures(tmp_path)) == 2


def test_broken_neighbours_are_replaced_by_pictures_from_anywhere(tmp_path: Path) -> None:
    rows = pictured.rows(40)
    path = pictured.folder(tmp_path / "corpus", rows)
    spoil(path, [name for name, _, _ in rows[5:15]])
    found = batches(tmp_path, source(path), Share(0, 1, 40), seed=3)
    first = found[0]
    assert first["error"] is None
    assert len(first["broken"]) == 10
    times = torch.unique(first["tensors"]["item"], return_counts=True)[1].tolist()
    # ten stand in for ten; the next by number would be one and the same, eleven times
    assert sum(times) == 40
    assert max(times) <= 4


def test_many_broken_neighbours_end_no_run_that_allows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivlp.models.training.data.listed.REPLACEMENTS", 8)
    rows = pictured.rows(45)
    path = pictured.folder(tmp_path / "corpus", rows)
    spoil(path, [name for name, _, _ in rows[:20]])
    found = batches(tmp_path, source(path), Share(0, 1, 45))
    assert [found[step]["error"] for step in range(2)] == [None, None]


def test_a_corpus_of_broken_pictures_is_an_error_not_a_loop(tmp_path: Path) -> None:
    path = pictured.folder(tmp_path / "corpus", ROWS)
    spoil(path, [name for name, _, _ in ROWS])
    found = batches(tmp_path, source(path), Share(0, 1, 4))
    loaded = found[0]
    assert str(loaded["error"]).startswith("12 pictures drawn for one place are all broken: ")
    assert len(loaded["broken"]) == 12


def test_a_failure_log_survives_a_line_cut_short(tmp_path: Path) -> None:
    FailureLog(tmp_path).add(Unusable("a", None, "why"))
    with (tmp_path / "failures.jsonl").open("a") as stream:
        stream.write('{"place": "b", "rea')
    again = FailureLog(tmp_path)
    assert again.add(Unusable("b", None, "why")) is True
    assert again.add(Unusable("a", None, "why")) is False


def test_workers_deliver_what_the_process_itself_would(tmp_path: Path) -> None:
    given = source(pictured.folder(tmp_path / "corpus", ROWS))
    found = batches(tmp_path, given, Share(0, 1, 4))
    options = {"pinned": False, "expected": 12, "max_failures": 0.0}
    alone = list(BatchLoader(found, range(5, 8), FailureLog(tmp_path), workers=0, **options))  # type: ignore[arg-type]
    fresh = batches(tmp_path, given, Share(0, 1, 4))
    helped = list(BatchLoader(fresh, range(5, 8), FailureLog(tmp_path), workers=2, **options))  # type: ignore[arg-type]
    assert len(alone) == len(helped) == 3
    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))


def test_a_learned_vocabulary_knows_its_words_and_marks(tmp_path: Path) -> None:
    spec = preparation(tmp_path)
    found = read_vocabulary(spec.tokenizer / "tokenizer.json")
    assert set(found.special) == {0, 1, 2, 3, 4}
    assert found.mask == 4
    assert not np.isin(found.plain, found.special).any()


def test_masking_needs_a_tokenizer_with_a_mask(tmp_path: Path) -> None:
    from tests.unit.models_training.checkpoints import make_bert

    path = make_bert(tmp_path / "bert") / "tokenizer.json"
    with pytest.raises(TrainingError, match=r"no token \[MASK\] or <mask>.*model\.mlm = false"):
        read_vocabulary(path)


def test_a_vocabulary_of_the_same_captions_is_the_same(tmp_path: Path) -> None:
    captions = [f"{a}{b} {b}-{a}! Überall {a}" for a in "abcdefgh" for b in "stuvwxyz"]
    settings = TokenizerSettings(vocabulary=120)
    found = set()
    for number in range(4):  # the library's own would differ in nearly every call
        learn_wordpiece(captions, settings, tmp_path / f"{number}.json")
        found.add((tmp_path / f"{number}.json").read_bytes())
    assert len(found) == 1


def test_a_vocabulary_is_learned_from_no_more_captions_than_asked_for(tmp_path: Path) -> None:
    endless = (f"word{number}" for number in iter(int, 1))
    learn_wordpiece(endless, TokenizerSettings(captions=50, min_count=1), tmp_path / "t.json")
    assert (tmp_path / "t.json").is_file()
    with pytest.raises(TrainingError, match="nothing that a vocabulary"):
        learn_wordpiece([], TokenizerSettings(), tmp_path / "none.json")
