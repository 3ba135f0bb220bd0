"""webdataset tars: grouped, read in one pass, referred to by place; malformed ones are named."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hivlp.index import pictures
from hivlp.index.build.corpus import CorpusOptions, open_corpus
from hivlp.index.build.items import BadItem, Item
from hivlp.index.build.readers import webdataset
from hivlp.index.build.readers.base import PLAIN
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import read_picture, split_ref

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
IMG2DATASET = {
    "caption": "a red heart",
    "url": "https://example.org/a.jpg",
    "key": "000000012",
    "status": "success",
    "error_message": None,
    "width": 64,
    "sha256": "abc",
}


def tar(path: Path, *members: tuple[str, Any], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as stream:
        for name, content in members:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            stream.addfile(info, io.BytesIO(data))
    return path


def read(path: Path | str, options: CorpusOptions = PLAIN) -> tuple[list[Item], list[BadItem]]:
    found = list(open_corpus(path, options))
    items = [item for item in found if isinstance(item, Item)]
    return items, [bad for bad in found if isinstance(bad, BadItem)]


@pytest.mark.parametrize("form", FORMATS)
def test_samples_are_grouped_and_their_pictures_are_read_again_by_place(
    tmp_path: Path, form: str
) -> None:
    path = tar(
        tmp_path / "a.tar",
        ("000.jpg", b"JPEG0"),
        ("000.txt", b"a heart\n\na heart\ntwo hearts\n"),
        ("000.json", {"hue": "red", "n": 3}),
        ("000.cls", b"7\n"),
        ("000.pyd", b"never opened"),
        ("deep/er.PNG", b"PNG1" * 300),
        ("deep/er.seg.png", b"another picture of another kind"),
        ("002.txt", b"only text"),
        ("x" * 90 + "/" + "y" * 60 + ".webp", b"WEBP"),
        form=FORMATS[form],
    )
    items, bad = read(path)
    assert bad == []
    assert [(item.id, item.captions, item.metadata) for item in items] == [
        ("000", ("a heart", "two hearts"), {"hue": "red", "n": 3, "cls": "7"}),
        ("deep/er", (), {}),
        ("002", ("only text",), {}),
        ("x" * 90 + "/" + "y" * 60, (), {}),
    ]
    assert [item.image_data for item in items] == [b"JPEG0", b"PNG1" * 300, None, b"WEBP"]
    for item in items:
        if item.image is not None:
            assert read_picture(tmp_path, item.image) == item.image_data
    assert items[0].place == "a.tar: 000"


def test_what_img2dataset_writes_is_read_as_it_means_it(tmp_path: Path) -> None:
    failed = {**IMG2DATASET, "key": "000000013", "status": "failed_to_download",
              "error_message": "404"}  # fmt: skip
    path = tar(
        tmp_path / "00000.tar",
        ("000000012.jpg", b"JPEG"),
        ("000000012.json", IMG2DATASET),
        ("000000012.txt", b"a red heart"),
        ("000000013.json", failed),
    )
    (tmp_path / "00000.parquet").write_bytes(b"a table beside the tar, not opened")
    (tmp_path / "00000_stats.json").write_text("{}")
    items, bad = read(tmp_path, CorpusOptions(aliases="img2dataset"))
    (item,) = items
    assert (item.id, item.captions) == ("000000012", ("a red heart",))
    assert item.metadata["url"] == "https://example.org/a.jpg"
    assert item.metadata["width"] == 64
    assert [(b.id, b.reason) for b in bad] == [
        ("000000013", "not downloaded: failed_to_download 404")
    ]
    assert len(read(path)[0]) == 2  # without the aliases, a caption is enough


@pytest.mark.parametrize("row", [{"id": "mine"}, {"key": "mine"}, {"id": "", "key": "mine"}])
def test_metadata_may_name_the_item(tmp_path: Path, row: dict[str, str]) -> None:
    items, _ = read(tar(tmp_path / "a.tar", ("0.jpg", b"J"), ("0.json", row)))
    assert [item.id for item in items] == ["mine"]


def test_shards_of_a_folder_or_a_pattern_are_read_one_after_the_other(tmp_path: Path) -> None:
    for n in range(12):
        tar(tmp_path / f"s-{n:03d}.tar", (f"{n}.jpg", b"%d" % n), (f"{n}.txt", b"x"))
    every = [str(n) for n in range(12)]
    for given in (tmp_path, f"{tmp_path}/s-*.tar", f"{tmp_path}/s-{{000..011}}.tar"):
        items, _ = read(given)
        assert [item.id for item in items] == every
        assert [read_picture(tmp_path, str(i.image)) for i in items] == [i.encode() for i in every]
    picked = open_corpus(f"{tmp_path}/s-{{003,001}}.tar")
    assert [found.id for found in picked] == ["3", "1"]
    assert picked.root == tmp_path


def test_one_id_in_two_shards_is_refused_with_both_places(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tar(tmp_path / f"{name}.tar", ("0.jpg", b"J"))
    with pytest.raises(CorpusError, match=r"'0' is there twice: a\.tar: 0 and b\.tar: 0"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("0.json", b"{broken")], "not JSON"),
        ([("0.json", b"[1]")], "JSON object"),
        ([("0.json", b"\xff")], "utf-8"),
        ([("0.txt", b"\xff")], "utf-8"),
        ([("0.cls", b"\xff")], "utf-8"),
        ([("0.jpg", b"J"), ("0.png", b"P")], "second picture"),
        ([("0.jpg", b"J"), ("0.json", {"id": "a\nb"})], "control characters"),
        ([("/etc/0.jpg", b"J")], "leads out"),
        ([("../0.jpg", b"J")], "leads out"),
        ([("a/../../0.jpg", b"J")], "leads out"),
    ],
)
def test_a_sample_that_is_wrong_is_named_and_the_next_is_read(
    tmp_path: Path, members: list[tuple[str, Any]], reason: str
) -> None:
    path = tar(tmp_path / "a.tar", *members, ("1.jpg", b"J"))
    items, bad = read(path)
    assert [item.id for item in items] == ["1"]
    assert [reason in entry.reason for entry in bad] == [True]
    assert bad[0].place.startswith("a.tar: ")


def test_links_and_devices_are_no_members(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as stream:
        for name, kind in (
            ("0.jpg", tarfile.SYMTYPE), ("1.jpg", tarfile.LNKTYPE), ("2.jpg", tarfile.FIFOTYPE),
            ("3.jpg", tarfile.CHRTYPE), ("folder", tarfile.DIRTYPE),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            stream.addfile(info)
    items, bad = read(path)
    assert items == []
    assert [entry.reason for entry in bad] == ["not a regular file"] * 4


def test_a_name_that_is_not_utf8_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as stream:
        for name in ("caf\udce9.jpg", "ok.jpg"):
            info = tarfile.TarInfo(name)
            info.size = 1
            stream.addfile(info, io.BytesIO(b"J"))
    items, bad = read(path)
    assert [item.id for item in items] == ["ok"]
    assert [entry.reason for entry in bad] == ["its name is not UTF-8"]


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def test_a_member_that_claims_ten_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(header("0.jpg", 10 * 2**30) + b"J" * 512)
    with pytest.raises(CorpusError, match=r"a\.tar: not readable as a tar at member 1"):
        read(path)
    with path.open("r+b") as stream:  # and where there are so many bytes, as a hole
        stream.truncate(10 * 2**30 + 512)
        stream.seek(0, io.SEEK_END)
        stream.write(header("1.jpg", 1) + b"J".ljust(512, b"\0") + bytes(1024))
    items, bad = read(path)
    assert [item.id for item in items] == ["1"]
    assert "the limit is 67108864" in bad[0].reason
    assert read_picture(tmp_path, str(items[0].image)) == b"J"


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE])
def test_a_header_that_claims_ten_gigabytes_is_not_read_into_memory(
    tmp_path: Path, kind: bytes
) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(header("0.jpg", 10 * 2**30, kind) + b"J" * 512)
    with pytest.raises(CorpusError, match="a header of 10737418240 bytes"):
        read(path)


def test_many_headers_of_headers_are_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    one = header("x", 10, tarfile.GNUTYPE_LONGNAME) + b"name".ljust(512, b"\0")
    path.write_bytes(one * 3_000)
    with pytest.raises(CorpusError, match=r"a\.tar: not readable as a tar"):
        read(path)


@pytest.mark.parametrize("keep", [100, 512, 700, 1_536, 1_539, 2_048, 3_072])
def test_a_truncated_tar_is_an_error_that_names_the_member(tmp_path: Path, keep: int) -> None:
    whole = tar(tmp_path / "a.tar", ("0.jpg", b"J" * 600), ("1.jpg", b"K" * 600),
                form=tarfile.GNU_FORMAT)  # fmt: skip
    data = whole.read_bytes()
    whole.write_bytes(data[:keep])
    with pytest.raises(CorpusError, match=r"a\.tar: not readable as a tar at member \d"):
        read(whole)
    whole.write_bytes(data[:1_536] + b"garbage".ljust(512) + data[1_536:])
    with pytest.raises(CorpusError, match="neither a member nor the mark of the end"):
        read(whole)


def test_what_is_no_tar_is_refused(tmp_path: Path) -> None:
    for name, content in (("a.tar", b"not a tar" * 200), ("b.tar", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorpusError, match="not readable as a tar"):
            read(tmp_path / name)


def test_vectors_in_a_tar_are_refused_with_a_hint(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", ("0.json", {"embedding": [1.0], "caption": "x"}))
    with pytest.raises(CorpusError, match="import-vectors"):
        read(path)


def test_large_members_are_bad_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webdataset, "MAX_PICTURE_BYTES", 8)
    monkeypatch.setattr(webdataset, "MAX_TEXT_BYTES", 4)
    path = tar(tmp_path / "a.tar", ("0.jpg", b"J" * 9), ("1.txt", b"x" * 5), ("2.jpg", b"J" * 8))
    items, bad = read(path)
    assert [item.id for item in items] == ["2"]
    assert [entry.reason for entry in bad] == [
        ".jpg: 9 bytes, the limit is 8",
        ".txt: 5 bytes, the limit is 4",
    ]


@pytest.mark.parametrize(
    "ref",
    [
        "a.tar#offset=0,size=1",
        "a.tar#offset=511,size=1",
        "a.tar#offset=513,size=1",
        "a.tar#offset=512,size=5",
        "a.tar#offset=1024,size=1",
        "a.tar#offset=512,size=99999999",
        "a.tar#offset=99999999999,size=4",
        "a.tar#offset=512,size=999999999",
        "gone.tar#offset=512,size=4",
    ],
)
def test_only_what_a_header_stands_before_is_read_of_a_tar(tmp_path: Path, ref: str) -> None:
    tar(tmp_path / "a.tar", ("0.jpg", b"JPEG"), form=tarfile.USTAR_FORMAT)
    assert read_picture(tmp_path, "a.tar#offset=512,size=4") == b"JPEG"
    with pytest.raises(CorpusError, match="unreadable"):
        read_picture(tmp_path, ref)


def test_a_tar_outside_the_corpus_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar(tmp_path / "a.tar", ("0.jpg", b"JPEG"), form=tarfile.USTAR_FORMAT)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "link.tar").symlink_to(tmp_path / "a.tar")
    for ref in ("../a.tar#offset=512,size=4", "link.tar#offset=512,size=4"):
        with pytest.raises(CorpusError, match="leaves the corpus"):
            read_picture(tmp_path / "corpus", ref)
    monkeypatch.setattr(pictures, "MAX_PICTURE_BYTES", 3)
    with pytest.raises(CorpusError, match="4 bytes, the limit is 3"):
        read_picture(tmp_path, "a.tar#offset=512,size=4")
    assert split_ref("a.jpg") == ("a.jpg", None)
