"""The client against a real model and a real index: items that come and go, and docs/api.md."""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hivlp.service.app import create_app
from hivlp.service.client import ClientError, InvalidRequest, NotFound
from hivlp.service.settings import ChangeSettings, Settings
from tests.integration.served_home import colour_png, make_corpus, make_home
from tests.unit.service.clients_both import BOTH, opening
from tests.unit.service.serving_app import serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
HERE = "http://localhost:8080"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("client")
    home = make_home(folder / "home", make_corpus(folder / "corpus"))
    settings = Settings(home=home, changes=ChangeSettings(poll_s=0.02, publish_s=0.05))
    with serving(create_app(settings)) as raw:
        yield str(raw.base_url)


@pytest.fixture(params=BOTH)
def client(request: pytest.FixtureRequest, url: str) -> Iterator[Any]:
    with opening(request.param)(url) as client:
        yield client


def test_an_item_is_put_found_read_and_deleted(client: Any) -> None:
    picture, day = colour_png("red"), datetime.date(2026, 3, 1)
    metadata = {"name": "New", "price": np.float32(9.5), "since": day, "sizes": ("s", "m")}
    put = client.put_item(
        "sale/../1%", texts=("zebra", "stripes"), image=picture, metadata=metadata
    )
    assert (put.id, put.created, put.searchable) == ("sale/../1%", True, True)
    found = client.search_text("zebra", modality="text", k=1)
    assert (found.hits[0].id, found.hits[0].text) == ("sale/../1%", "zebra")
    kept = client.get_item("sale/../1%").metadata
    assert (kept["price"], kept["sizes"], kept["since"]) == (9.5, ["s", "m"], "2026-03-01")
    assert client.item_image("sale/../1%").data == picture
    assert client.put_item("sale/../1%", texts="zebra").created is False
    assert client.delete_item("sale/../1%").deleted is True
    with pytest.raises(NotFound) as caught:
        client.delete_item("sale/../1%")
    assert caught.value.tries == 1


def test_an_item_may_bring_its_own_vector(client: Any) -> None:
    vector = client.embed_text("blue").levels[-1].vector
    client.put_item("own", vector=np.asarray(vector), modality="image", image=colour_png("green"))
    assert client.search_vector(vector, k=1).hits[0].id == "own"
    client.delete_item("own")


def test_an_item_of_nothing_and_a_column_of_another_kind_are_refused(client: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.put_item("nothing")
    assert (caught.value.code, caught.value.status) == ("nothing_to_search", 422)
    with pytest.raises(ClientError) as wrong:
        client.put_item("odd", texts="odd", metadata={"name": 5})
    assert (wrong.value.code, wrong.value.param) == ("invalid_metadata", "metadata.name")
    with pytest.raises(InvalidRequest) as unsent:
        client.put_item("odd", texts="odd", metadata={"price": float("nan")})
    assert (unsent.value.param, unsent.value.status) == ("metadata", None)


def examples() -> list[str]:
    section = PAGE.read_text(encoding="utf-8").partition("\n## The Python client\n")[2]
    section = section.partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


# What each example prints, line by line.
PRINTED = (
    [r"1 \w+/\d+ 0\.\d+ \{.*\}", r"2 .*", r"3 .*", r"image/\w+"],
    [r"found \['\w+/\d+'\]", r"found \[.*\]", "error no_such_item id"],
    [r"\[10, 10\]"],
)


@pytest.mark.parametrize("place", range(len(PRINTED)))
def test_an_example_of_the_documentation_runs(
    place: int,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(examples()) == len(PRINTED)
    code = examples()[place]
    assert HERE in code
    stream = io.BytesIO()
    Image.new("RGB", (60, 40), (255, 0, 0)).save(stream, "JPEG")
    (tmp_path / "photo.jpg").write_bytes(stream.getvalue())
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace(HERE, url), f"{PAGE.name}, example {place}", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PRINTED[place])
    for line, pattern in zip(lines, PRINTED[place], strict=True):
        assert re.fullmatch(pattern, line)
