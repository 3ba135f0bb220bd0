"""The hub's library where nothing can be reached: what its cache holds is what there is."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from hivlp.models.training.hub import HubError, HuggingFaceHub, Named, fetch
from hivlp.models.training.importing import MARK
from hivlp.models.training.run_import import run_import
from tests.unit.models_training.checkpoints import make_bert

constants = pytest.importorskip("huggingface_hub.constants", reason="the extra [hub]")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library's cache with one checkpoint, someone/bert, as the library lays it out."""
    kept = tmp_path / "cache/models--someone--bert"
    make_bert(kept / "snapshots" / COMMIT)
    for name in ("main", "v1"):
        (kept / "refs").mkdir(exist_ok=True)
        (kept / "refs" / name).write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(kept.parent))
    return kept.parent


@pytest.fixture(params=["offline mode", "nobody answers"])
def unreachable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the library is told to stay offline, or there is nothing where the hub should be."""
    if request.param == "offline mode":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize("name", ["someone/bert", "someone/bert@v1", f"someone/bert@{COMMIT}"])
def test_a_checkpoint_in_the_cache_is_imported_without_a_hub(
    tmp_path: Path, cache: Path, name: str
) -> None:
    imported = run_import(name, None, tmp_path)
    assert imported.path == tmp_path / "checkpoints/bert"
    assert imported.towers["text"].pooling == "mean"
    told = json.loads((imported.path / MARK).read_text())
    assert told["revision"] == (name.partition("@")[2] or "main")
    assert cache.is_dir()


@pytest.mark.usefixtures("unreachable")
def test_what_is_not_in_the_cache_is_an_error_of_one_line(cache: Path) -> None:
    for named in (Named("someone/else"), Named("someone/bert", "v2")):
        with pytest.raises(HubError, match=r"no such folder here, and not fetched: \S") as told:
            fetch(named, HuggingFaceHub())
        assert "\n" not in str(told.value)
    shutil.rmtree(cache)
    with pytest.raises(HubError, match=r"^someone/bert: no such folder here"):
        fetch(Named("someone/bert"), HuggingFaceHub())


def test_an_answer_that_refuses_is_not_passed_over_for_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    class Answer:
        status_code, headers, request = 403, dict[str, str](), None

    def refused(*_: object, **__: object) -> None:
        raise huggingface_hub.errors.HfHubHTTPError("403: this is gated", response=Answer())  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refused)
    with pytest.raises(HubError, match="403: this is gated"):
        fetch(Named("someone/bert"), HuggingFaceHub())
    assert (cache / "models--someone--bert").is_dir()
