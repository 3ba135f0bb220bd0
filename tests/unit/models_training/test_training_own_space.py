"""A checkpoint's own space: the turn, what is held out, and how alike two ways of ranking are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivlp.models.training.closed_form import best_views
from hivlp.models.training.fitting import Corpus, turned_heads
from hivlp.models.training.measures import unit
from hivlp.models.training.own_space import MOST, hold_out, overlap
from hivlp.models.training.pairs import PairsError, read_pictures
from hivlp.models.training.reading import own_dims


def _vectors(seed: int, count: int, width: int = 6) -> np.ndarray:
    """Unit vectors about a common mean, some directions wider than others."""
    rng = np.random.default_rng(seed)
    spread = np.geomspace(1, 0.05, width)[rng.permutation(width)]
    return unit((rng.normal(size=(count, width)) * spread + 0.5).astype(np.float32))


def _corpus(captions: int, pictures: int, unlabelled: int) -> Corpus:
    sets = [[_vectors(i, count)] * 2 for i, count in enumerate((captions, pictures, unlabelled))]
    return Corpus(*sets, np.arange(captions), np.arange(pictures))


def test_a_turn_keeps_every_cosine_and_its_prefixes_keep_the_most() -> None:
    texts, pictures = _vectors(0, 50), _vectors(1, 400)
    turn = best_views([pictures, texts])
    np.testing.assert_allclose(turn @ turn.T, np.eye(6), atol=1e-6)
    np.testing.assert_allclose(
        (texts @ turn.T) @ (pictures @ turn.T).T, texts @ pictures.T, atol=1e-6
    )

    def kept(basis: np.ndarray, dim: int) -> float:
        """Both weigh the same, however many there are of each."""
        return float(
            sum((rows @ basis[:dim].T).__pow__(2).sum(1).mean() for rows in (texts, pictures))
        )

    rng = np.random.default_rng(2)
    for dim in range(1, 6):
        others = [np.linalg.qr(rng.normal(size=(6, 6)))[0] for _ in range(50)]
        assert all(kept(turn, dim) >= kept(other, dim) - 1e-6 for other in others)


def test_both_towers_are_turned_alike_and_learn_nothing_from_labels() -> None:
    corpus = _corpus(0, 40, 30)
    text, image = turned_heads(corpus)
    assert text.state_dict().keys() == image.state_dict().keys()
    for name, value in text.state_dict().items():
        np.testing.assert_array_equal(value, image.state_dict()[name])
    assert text.bend is None


@given(st.integers(2, 40), st.integers(10, 60), st.integers(0, 2**31))
def test_a_turned_ranking_overlaps_whole_and_a_random_one_does_not(
    queries: int, gallery: int, seed: int
) -> None:
    own = _vectors(seed, queries), _vectors(seed + 1, gallery)
    turn = best_views([own[1]])
    assert overlap(own, (own[0] @ turn.T, own[1] @ turn.T)) == 1.0
    assert overlap(own, (own[0], -own[1])) <= 20 / max(20, gallery)


def test_equal_scores_are_found_whichever_comes_first() -> None:
    query = np.ones((1, 1), np.float32)
    gallery = np.ones((30, 1), np.float32)
    assert overlap((query, gallery), (query, -gallery)) == 1.0
    near = np.linspace(1, 0, 30, dtype=np.float32)[:, None]
    assert overlap((query, near), (query, -near)) == 0.0
    assert overlap((query, near), (query, np.roll(near, 5, axis=0))) == 0.5


@pytest.mark.parametrize("counts", [(0, 20, 30), (30, 21, 0), (2, 2, 2), (0, 20_000, 1)])
def test_a_tenth_of_each_is_held_out_and_never_fitted_on(counts: tuple[int, int, int]) -> None:
    captions, pictures, unlabelled = counts
    corpus = _corpus(*counts)
    parts = hold_out(corpus, 0)
    fitted, held = parts.fitted, parts.held
    for whole, kept, out in (
        (captions, fitted.caption_group, held.caption_group),
        (pictures, fitted.picture_group, held.picture_group),
    ):
        assert set(kept) | set(out) == set(range(whole))
        assert len(kept) + len(out) == whole
        assert len(out) == (min(MOST, max(1, whole // 10)) if whole > 1 else 0)
    assert len(fitted.unlabelled[0]) + len(held.unlabelled[0]) == unlabelled
    again = hold_out(corpus, 0).held
    np.testing.assert_array_equal(again.picture_group, held.picture_group)
    assert set(hold_out(corpus, 1).held.picture_group) != set(held.picture_group) or pictures < 20


@pytest.mark.parametrize(
    ("width", "dims"),
    [
        (512, (128, 300, 512)),
        (768, (128, 300, 768)),
        (1152, (128, 300, 1152)),
        (256, (64, 128, 256)),
        (300, (75, 150, 300)),
        (8, (2, 4, 8)),
        (2, (1, 2)),
    ],
)
def test_dims_of_a_space_of_any_width(width: int, dims: tuple[int, ...]) -> None:
    assert own_dims(width) == dims


def test_loose_pictures_are_things_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.PNG", "deep/a.jpg", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    found = read_pictures([tmp_path, tmp_path / "deep"])
    assert [pair.picture.name for pair in found] == ["b.PNG", "a.jpg", "a.jpg"]
    assert len({pair.group for pair in found}) == 2
    assert not any(pair.captions for pair in found)
    with pytest.raises(PairsError, match="no such folder"):
        read_pictures([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(PairsError, match=r"empty: no picture \(\.png"):
        read_pictures([tmp_path / "empty"])
