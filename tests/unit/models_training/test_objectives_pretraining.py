"""MLM and matching: golden numbers, slow references, finite differences, whom a text may meet."""

from __future__ import annotations

import math

import pytest
import torch

from hivlp.models.objectives.matching import hard_negatives, matching_loss
from hivlp.models.objectives.mlm import mlm_loss
from hivlp.models.objectives.retrieval import one_way_loss, retrieval_loss


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_golden_numbers_of_mlm() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    assert mlm_loss(logits, torch.tensor([0, 2])).item() == pytest.approx(0.251264460, abs=1e-9)


def test_mlm_matches_the_slow_reference_and_finite_differences() -> None:
    logits, labels = _random(4, 5), [3, 0, 0, 4]
    total = 0.0
    for row, label in zip(logits.tolist(), labels, strict=True):
        total -= math.log(math.exp(row[label]) / sum(math.exp(x) for x in row))
    told = torch.tensor(labels)
    assert mlm_loss(logits, told).item() == pytest.approx(total / 4)
    assert torch.autograd.gradcheck(lambda x: mlm_loss(x, told), logits.requires_grad_(True))


def test_mlm_of_nothing_hidden_is_zero_with_a_gradient_of_zero() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    loss = mlm_loss(logits, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0.0


def test_golden_numbers_of_matching() -> None:
    shares = torch.tensor([0.8, 0.3], dtype=torch.float64)
    found = matching_loss(shares.logit(), torch.tensor([1, 0]))
    assert found.item() == pytest.approx(0.289909247, abs=1e-9)
    one = torch.ones(1, dtype=torch.float64)
    assert one.sigmoid().item() == pytest.approx(0.731058579, abs=1e-9)
    assert matching_loss(one, torch.ones(1)).item() == pytest.approx(0.313261688, abs=1e-9)


def test_matching_matches_the_slow_reference_and_finite_differences() -> None:
    logits, labels = _random(5), [1, 0, 0, 1, 0]
    total = 0.0
    for logit, label in zip(logits.tolist(), labels, strict=True):
        share = 1 / (1 + math.exp(-logit))
        total -= label * math.log(share) + (1 - label) * math.log(1 - share)
    told = torch.tensor(labels)
    assert matching_loss(logits, told).item() == pytest.approx(total / 5)
    assert torch.autograd.gradcheck(lambda x: matching_loss(x, told), logits.requires_grad_(True))


def test_negatives_are_drawn_as_the_softmax_of_the_others_says() -> None:
    scores = torch.tensor([[9.0, 1.0, 0.0, 2.0]]).expand(4000, -1)
    same = torch.tensor([[True, False, False, False]]).expand(4000, -1)
    rows, drawn = hard_negatives(scores, same, torch.Generator().manual_seed(0))
    assert rows.tolist() == list(range(4000))
    shares = torch.bincount(drawn, minlength=4) / 4000
    wanted = [math.exp(s) / (math.e + 1 + math.exp(2)) for s in (1.0, 0.0, 2.0)]
    assert shares.tolist() == pytest.approx([0.0, *wanted], abs=0.03)


def test_an_item_is_never_its_own_negative_however_high_it_scores() -> None:
    item = torch.tensor([0, 0, 1, 2, 2, 2])
    same = item[:, None] == item[None, :]
    scores = torch.where(same, 1e4, 0.0)
    for seed in range(50):
        rows, drawn = hard_negatives(scores, same, torch.Generator().manual_seed(seed))
        assert (item[rows] != item[drawn]).all()


def test_rows_without_another_item_are_left_out() -> None:
    same = torch.tensor([[True, True], [False, True]])
    rows, drawn = hard_negatives(torch.zeros(2, 2), same)
    assert (rows.tolist(), drawn.tolist()) == ([1], [0])
    rows, drawn = hard_negatives(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool))
    assert (len(rows), len(drawn)) == (0, 0)


GOLDEN = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0], [1.0, 0.0, 2.0]], dtype=torch.float64)


def test_golden_numbers_of_each_direction_and_of_each_row_and_column() -> None:
    assert one_way_loss(GOLDEN).item() == pytest.approx(0.328352649, abs=1e-9)
    assert one_way_loss(GOLDEN.T).item() == pytest.approx(0.351324545, abs=1e-9)
    eye = torch.eye(3)
    rows = [one_way_loss(GOLDEN[i : i + 1], targets=eye[i : i + 1]).item() for i in range(3)]
    columns = [one_way_loss(GOLDEN.T[i : i + 1], targets=eye[i : i + 1]).item() for i in range(3)]
    assert rows == pytest.approx([0.407606, 0.169846, 0.407606], abs=1e-6)
    assert columns == pytest.approx([0.407606, 0.094923, 0.551445], abs=1e-6)


def test_the_gradient_of_one_direction_is_softmax_minus_identity_over_n() -> None:
    scores = GOLDEN.clone().requires_grad_(True)
    one_way_loss(scores).backward()
    wanted = (GOLDEN.softmax(1) - torch.eye(3, dtype=torch.float64)) / 3
    torch.testing.assert_close(scores.grad, wanted)


def test_a_constant_on_a_row_changes_the_columns_loss_only() -> None:
    moved = GOLDEN + torch.tensor([[5.0], [0.0], [0.0]], dtype=torch.float64)
    torch.testing.assert_close(one_way_loss(moved), one_way_loss(GOLDEN))
    assert one_way_loss(moved.T).item() > one_way_loss(GOLDEN.T).item() + 0.1


def test_both_directions_of_a_square_are_the_retrieval_loss() -> None:
    scores = _random(4, 4)
    both = one_way_loss(scores) + one_way_loss(scores.T)
    torch.testing.assert_close(both, retrieval_loss(scores))


def test_one_way_over_the_columns_of_several_processes_matches_the_slow_reference() -> None:
    scores, targets = _random(2, 6), torch.tensor([[0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 0, 0]])
    total = 0.0
    for row, right in zip(scores.tolist(), targets.tolist(), strict=True):
        below = sum(math.exp(x) for x in row)
        logs = [math.log(math.exp(x) / below) for x, r in zip(row, right, strict=True) if r]
        total -= sum(logs) / len(logs)
    found = one_way_loss(scores, targets=targets)
    assert found.item() == pytest.approx(total / 2)
    given = scores.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda s: one_way_loss(s, targets=targets), given)
