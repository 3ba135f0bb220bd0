"""The in-batch retrieval loss against golden numbers, a slow reference and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hivlp.models.objectives.retrieval import retrieval_loss

GOLDEN = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0], [1.0, 0.0, 2.0]], dtype=torch.float64)
TEXT_TO_IMAGE, IMAGE_TO_TEXT = 0.328352649, 0.351324545


def _slow(scores: Tensor, same: Tensor, more: Tensor | None = None) -> float:
    """One direction, written out: rows search."""
    total = 0.0
    for i, row in enumerate(scores.tolist()):
        others = [] if more is None else more[i].tolist()
        below = sum(math.exp(s) for s in row) + sum(math.exp(s) for s in others)
        right = [j for j, one in enumerate(same[i].tolist()) if one]
        total -= sum(math.log(math.exp(row[j]) / below) for j in right) / len(right)
    return total / len(scores)


def test_golden_numbers() -> None:
    assert retrieval_loss(GOLDEN).item() == pytest.approx(0.679677194, abs=1e-9)
    assert retrieval_loss(GOLDEN, reduction="mean").item() == pytest.approx(0.339838597, abs=1e-9)


def test_golden_numbers_by_direction() -> None:
    eye = torch.eye(3)
    assert _slow(GOLDEN, eye) == pytest.approx(TEXT_TO_IMAGE, abs=1e-9)
    assert _slow(GOLDEN.T, eye) == pytest.approx(IMAGE_TO_TEXT, abs=1e-9)


def test_equal_scores_cost_ln_n_in_each_direction() -> None:
    assert retrieval_loss(torch.zeros(3, 3)).item() == pytest.approx(2 * 1.098612289)


def test_swapping_rows_and_columns_changes_nothing() -> None:
    assert retrieval_loss(GOLDEN.T).item() == pytest.approx(retrieval_loss(GOLDEN).item())


def test_a_constant_on_a_row_leaves_text_to_image_alone() -> None:
    moved = GOLDEN.clone()
    moved[0] += 5.0
    eye = torch.eye(3)
    assert _slow(moved, eye) == pytest.approx(TEXT_TO_IMAGE)
    change = retrieval_loss(moved) - retrieval_loss(GOLDEN)
    assert change.item() == pytest.approx(_slow(moved.T, eye) - IMAGE_TO_TEXT)


def test_gradient_is_softmax_minus_identity_over_n() -> None:
    scores = GOLDEN.clone().requires_grad_(True)
    retrieval_loss(scores).backward()
    eye = torch.eye(3, dtype=torch.float64)
    rows, columns = GOLDEN.softmax(1) - eye, GOLDEN.softmax(0) - eye
    torch.testing.assert_close(scores.grad, (rows + columns) / 3)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of 5 pairs of which two show one thing, further texts, and which are barred."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    more = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    owner = torch.tensor([0, 0, 1, 2, 3])
    same = (owner[:, None] == owner[None, :]).double()
    barred = torch.zeros(5, 3, dtype=torch.bool)
    barred[1, 2] = barred[4, 0] = True
    return scores, same, more, barred


def test_matches_the_slow_reference_with_shared_targets(
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    scores, same, _, _ = batch
    expected = _slow(scores, same) + _slow(scores.T, same.T)
    assert retrieval_loss(scores, targets=same).item() == pytest.approx(expected)


def test_more_texts_are_negatives_of_pictures_only(
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    scores, same, more, _ = batch
    expected = _slow(scores, same) + _slow(scores.T, same.T, more)
    assert retrieval_loss(scores, targets=same, more_texts=more).item() == pytest.approx(expected)


def test_a_barred_text_counts_for_nothing(batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    scores, same, more, barred = batch
    found = retrieval_loss(scores, targets=same, more_texts=more, barred=barred)
    left = more.masked_fill(barred, -math.inf)
    expected = _slow(scores, same) + _slow(scores.T, same.T, left)
    assert found.item() == pytest.approx(expected)


def test_gradients_match_finite_differences(batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    scores, same, more, barred = batch

    def loss(scores: Tensor, more: Tensor) -> Tensor:
        return retrieval_loss(scores, targets=same, more_texts=more, barred=barred)

    given = (scores.requires_grad_(True), more.requires_grad_(True))
    assert torch.autograd.gradcheck(loss, given)
