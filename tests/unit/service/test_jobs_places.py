"""What may be built from where: nothing that a caller names leads out of the allowed roots."""

from __future__ import annotations

from pathlib import Path

import pytest

from hivlp.models.errors import InputError
from hivlp.service.jobs.places import MAX_NAMES, placed
from hivlp.service.schemas import StartBuild


class World:
    """A home, an allowed root with corpora, and what lies outside."""

    def __init__(self, folder: Path) -> None:
        self.home, self.root, self.outside = (folder / n for n in ("home", "root", "outside"))
        for place in (self.root / "pictures", self.root / "odd[1]", self.outside):
            place.mkdir(parents=True)
        for file in ("a-0.csv", "a-1.csv", "odd[1]/b.csv"):
            (self.root / file).write_text("id,text\n1,one\n")
        (self.outside / "secret.csv").write_text("id,text\n1,secret\n")
        (self.root / "out").symlink_to(self.outside)
        (self.root / "in").symlink_to(self.root / "pictures")
        (self.root / "link.csv").symlink_to(self.outside / "secret.csv")
        (self.root / "loop").symlink_to(self.root / "loop")
        for model in (self.home / "artifacts" / "tiny", self.root / "model", self.outside):
            model.mkdir(parents=True, exist_ok=True)
            (model / "manifest.json").write_text("{}")

    def placed(self, corpus: str, *roots: str, artifact: str | None = "tiny") -> StartBuild:
        asked = StartBuild(corpus=corpus, artifact=artifact)
        return placed(asked, self.home, roots or (str(self.root),))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("ROOT", "ROOT"),
        ("ROOT/pictures", "ROOT/pictures"),
        ("ROOT/./pictures/../a-0.csv", "ROOT/a-0.csv"),
        ("ROOT/in", "ROOT/pictures"),
        ("file://ROOT/pictures", "ROOT/pictures"),
        ("ROOT/odd[1]", "ROOT/odd[1]"),
        ("ROOT/a-{0..1}.csv", "ROOT/a-{0..1}.csv"),
        ("ROOT/a-*.csv", "ROOT/a-*.csv"),
        ("ROOT/{a-0,a-1}.csv", "ROOT/{a-0,a-1}.csv"),
    ],
)
def test_what_lies_below_a_root_is_found_with_its_links_followed(
    world: World, given: str, found: str
) -> None:
    root = str(world.root)
    assert world.placed(given.replace("ROOT", root)).corpus == found.replace("ROOT", root)


@pytest.mark.parametrize(
    "given",
    [
        "/etc",
        "/etc/passwd",
        "/",
        "OUTSIDE",
        "OUTSIDE/secret.csv",
        "ROOT/../outside/secret.csv",
        "ROOT-beside",
        "ROOT/out",
        "ROOT/out/secret.csv",
        "ROOT/link.csv",
        "ROOT/o*/secret.csv",
        "ROOT/*.csv",
        "ROOT/l*.csv",
        "ROOT/{a-0,link}.csv",
        "ROOT/{.}{.}/outside/secret.csv",
        "ROOT/{a-0.csv,../outside/secret.csv}",
        "ROOT/../outside/*.csv",
        "ROOT/pictures/../../outside/*.csv",
        "/{etc,tmp}/*",
        "/*",
        "pictures",
        "./pictures",
        "../outside",
        "file:///etc",
        "file://OUTSIDE",
        "local:///etc/passwd",
        "s3://bucket/pictures",
        "http://169.254.169.254/latest/meta-data",
        "memory://x",
        "simplecache::file:///etc/passwd",
        "~/pictures",
    ],
)
def test_what_leads_out_of_the_roots_is_refused_whether_it_is_there_or_not(
    world: World, given: str
) -> None:
    given = given.replace("ROOT", str(world.root)).replace("OUTSIDE", str(world.outside))
    with pytest.raises(InputError) as caught:
        world.placed(given)
    assert (caught.value.code, caught.value.param) == ("outside_roots", "corpus")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ROOT/nothing", "no such file or folder"),
        ("ROOT/nothing-*.csv", "no file matches"),
        ("ROOT/{9..1}.csv", "no range"),
        ("ROOT/loop", "loop"),
        ("ROOT/" + "x" * 400, "too long"),
        ("ROOT/" + "{a}/" * 1_000, ": "),
    ],
)
def test_what_is_allowed_and_is_no_corpus_is_said_so(world: World, given: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        world.placed(given.replace("ROOT", str(world.root)))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "corpus")


def test_a_pattern_may_name_only_so_many_files(world: World) -> None:
    many = "{0..9}" * 5
    with pytest.raises(InputError, match=str(MAX_NAMES)) as caught:
        world.placed(f"{world.root}/{many}.csv")
    assert caught.value.code == "out_of_range"


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ("s3://bucket/data/pictures", True),
        ("s3://bucket/data/shard-{000..003}.tar", True),
        ("s3://bucket/other", False),
        ("s3://bucket/data-beside", False),
        ("s3://bucket/data/../other", False),
        ("s3://bucket/data/%2e%2e/other", False),
        ("s3://bucket/data/{.}{.}/other", False),
        ("s3://other/data", False),
        ("http://bucket/data/x", False),
        ("/etc/passwd", False),
    ],
)
def test_a_root_may_be_a_url(world: World, given: str, allowed: bool) -> None:
    if allowed:
        assert world.placed(given, "s3://bucket/data/".rstrip("/")).corpus == given
        return
    with pytest.raises(InputError) as caught:
        world.placed(given, "s3://bucket/data")
    assert caught.value.code == "outside_roots"


def test_the_folder_of_a_splits_pictures_is_held_to_the_same(world: World) -> None:
    asked = StartBuild(corpus=str(world.root), artifact="tiny", images="/etc")
    with pytest.raises(InputError) as caught:
        placed(asked, world.home, (str(world.root),))
    assert (caught.value.code, caught.value.param) == ("outside_roots", "images")


@pytest.mark.parametrize("given", ["tiny", "HOME/artifacts/tiny", "ROOT/model"])
def test_a_model_lies_among_the_artifacts_or_below_a_root(world: World, given: str) -> None:
    given = given.replace("HOME", str(world.home)).replace("ROOT", str(world.root))
    found = world.placed(str(world.root), artifact=given).artifact
    assert found is not None
    assert (Path(found) / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("OUTSIDE", "outside_roots"),
        ("../../outside", "outside_roots"),
        ("ROOT/out", "outside_roots"),
        ("/", "outside_roots"),
        (".", "invalid_value"),
        ("tiny/..", "invalid_value"),
        ("other", "invalid_value"),
        ("x" * 400, "invalid_value"),
    ],
)
def test_any_other_model_is_refused(world: World, given: str, code: str) -> None:
    given = given.replace("OUTSIDE", str(world.outside)).replace("ROOT", str(world.root))
    with pytest.raises(InputError) as caught:
        world.placed(str(world.root), artifact=given)
    assert (caught.value.code, caught.value.param) == (code, "artifact")


def test_an_index_without_a_version_needs_a_model(world: World) -> None:
    with pytest.raises(InputError, match="has no version yet") as caught:
        world.placed(str(world.root), artifact=None)
    assert (caught.value.code, caught.value.param) == ("missing_field", "artifact")
