"""Early exits fitted afterwards on a run that was trained with one level, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hivlp.models.levels import FloatArray
from hivlp.models.runtime.images import ImageLimits, decode_image
from hivlp.models.runtime.loading import Encoders, load_encoders
from hivlp.models.training.towers import open_tower
from hivlp.service.main import main
from tests.unit.models_training import pictured

pytestmark = pytest.mark.timeout(400)

ROWS = pictured.rows()
QUICK = ["--set", "train.steps=40", "--set", "train.batch=12"]
ONE_LEVEL = ["--set", "model.dims=[32]"]
FIT = ["--dims", "8,16,32", "--set", "distil.text_epochs=1", "--set", "distil.image_epochs=1"]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, a run of one level, exits fitted on it, and that exported."""
    root = tmp_path_factory.mktemp("afterwards")
    pictures = str(pictured.folder(root / "pictures", ROWS))
    run, fit = str(root / "run"), str(root / "fit")
    train = ["train", "hivlp-tiny", "--corpus", pictures, "--out", run]
    assert main([*train, *QUICK, *ONE_LEVEL]) == 0
    cache = ["--cache", str(root / "cache")]
    assert (
        main(["fit-exits", "--towers", run, "--pairs", pictures, "--out", fit, *FIT, *cache]) == 0
    )
    assert main(["export", fit, "--out", str(root / "artifact")]) == 0
    return root


def test_the_finest_level_ranks_as_the_run_does(fitted: Path) -> None:
    told = json.loads((fitted / "fit" / "fit.json").read_text(encoding="utf-8"))
    assert told["settings"]["space"] == "checkpoint"
    assert told["measured"]["overlap@10_text_to_image"] == 1.0
    assert told["measured"]["overlap@10_image_to_text"] == 1.0


def test_the_artifact_has_the_cosines_of_the_run_itself(fitted: Path) -> None:
    assert main(["export", str(fitted / "run"), "--out", str(fitted / "alone")]) == 0
    alone, cascade = load_encoders(fitted / "alone"), load_encoders(fitted / "artifact")
    assert [level.dim for level in cascade.text.levels] == [8, 16, 32]
    np.testing.assert_allclose(cosines(cascade), cosines(alone), atol=1e-5)


def cosines(encoders: Encoders) -> FloatArray:
    """Of some texts with some pictures, at the finest level."""
    texts = [captions[0] for _, _, captions in ROWS[:8]]
    pictures = [decode_image(data, ImageLimits()) for _, data, _ in ROWS[:8]]
    assert encoders.image is not None
    said = encoders.text.encode_gallery(encoders.text.prepare(texts))[-1].vectors
    seen = encoders.image.encode_gallery(encoders.image.prepare(pictures))[-1].vectors
    scores: FloatArray = said @ seen.T
    return scores


def test_an_early_exit_tells_two_texts_apart(fitted: Path) -> None:
    encoder = load_encoders(fitted / "artifact").text
    early = next(iter(encoder.encode(encoder.prepare([ROWS[0][2][0], ROWS[1][2][0]])))).vectors
    assert np.abs(early[0] - early[1]).max() > 1e-3


def test_a_run_without_normalised_vectors_is_refused(
    fitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = str(fitted / "plain")
    literal = ["--set", "form=per_exit", "--set", "model.normalise=false", "--set", "train.steps=1"]
    pictures = str(fitted / "pictures")
    assert main(["train", "hivlp-tiny", "--corpus", pictures, "--out", plain, *literal]) == 0
    fit = ["fit-exits", "--towers", plain, "--pairs", pictures, "--out", str(fitted / "no")]
    assert main([*fit, "--dims", "8,16,32"]) == 1
    assert "model.normalise is false; exits are fitted to cosines alone" in capsys.readouterr().err


def test_both_towers_of_a_run_share_a_space_and_no_two_runs_do(fitted: Path) -> None:
    text, image = (open_tower(fitted / "run", m) for m in ("text", "image"))
    assert text.joint_space == image.joint_space is not None
    assert text.width(text.depth) == image.width(image.depth) == 32
