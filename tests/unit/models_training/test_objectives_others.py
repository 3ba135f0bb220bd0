"""The other losses against slow references, and what they leave without a gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hivlp.models.objectives.hierarchical import hierarchical_loss, nested_levels
from hivlp.models.objectives.retrieval import retrieval_loss
from hivlp.models.objectives.same_thing import same_thing_loss
from hivlp.models.objectives.score_distillation import score_distillation_loss
from hivlp.models.objectives.temperature import Temperature


def _unit(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=1)


def test_three_equal_levels_cost_three_times_one() -> None:
    texts, images = _unit(4, 8, seed=1), _unit(4, 8, seed=2)

    def loss(level: int, texts: Tensor, images: Tensor) -> Tensor:
        return retrieval_loss(texts @ images.T)

    three = hierarchical_loss(loss, [texts] * 3, [images] * 3)
    torch.testing.assert_close(three, 3 * loss(0, texts, images))


def test_every_level_gets_a_gradient_of_its_own() -> None:
    texts = [_unit(4, d, seed=d).requires_grad_(True) for d in (2, 4, 8)]
    images = [_unit(4, d, seed=d + 50) for d in (2, 4, 8)]
    hierarchical_loss(lambda _, t, v: retrieval_loss(t @ v.T), texts, images).backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in texts)


def test_levels_of_a_nested_vector_are_normalised_prefixes() -> None:
    vectors = torch.tensor([[3.0, 4.0, 12.0]])
    two, three = nested_levels(vectors, (2, 3))
    torch.testing.assert_close(two, torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(three, vectors / 13)


def _slow_distillation(early: Tensor, target: Tensor, gallery: Tensor, weight: float) -> float:
    direction = difference = 0.0
    for q, t in zip(early.tolist(), target.tolist(), strict=True):
        direction += 1 - sum(a * b for a, b in zip(q, t, strict=True))
        for row in gallery.tolist():
            mine = sum(a * b for a, b in zip(q, row, strict=True))
            theirs = sum(a * b for a, b in zip(t, row, strict=True))
            difference += (mine - theirs) ** 2
    return direction / len(early) + weight * difference / (len(early) * len(gallery))


def test_score_distillation_matches_the_slow_reference() -> None:
    early, target, gallery = _unit(3, 6, seed=1), _unit(3, 6, seed=2), _unit(5, 6, seed=3)
    found = score_distillation_loss(early, target, gallery, weight=7.0)
    assert found.item() == pytest.approx(_slow_distillation(early, target, gallery, 7.0))


def test_score_distillation_gradient_matches_finite_differences() -> None:
    early = _unit(3, 6, seed=1).requires_grad_(True)
    target, gallery = _unit(3, 6, seed=2), _unit(5, 6, seed=3)
    assert torch.autograd.gradcheck(lambda q: score_distillation_loss(q, target, gallery), early)


def test_neither_target_nor_gallery_learns_from_an_early_exit() -> None:
    early, target, gallery = (_unit(3, 6, seed=i).requires_grad_(True) for i in (1, 2, 3))
    score_distillation_loss(early, target, gallery).backward()
    assert early.grad is not None
    assert target.grad is None
    assert gallery.grad is None


def _slow_same_thing(scores: Tensor, same: Tensor) -> float:
    rows = []
    for i in range(len(scores)):
        fellows = [j for j in range(len(scores)) if j != i and same[i, j]]
        below = sum(math.exp(scores[i, j]) for j in range(len(scores)) if j != i)
        if fellows:
            logs = [math.log(math.exp(scores[i, j]) / below) for j in fellows]
            rows.append(-sum(logs) / len(fellows))
    return sum(rows) / len(rows)


def test_same_thing_matches_the_slow_reference_and_finite_differences() -> None:
    scores = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    owner = torch.tensor([0, 0, 0, 1, 2])
    same = (owner[:, None] == owner[None, :]).double()
    found = same_thing_loss(scores, same)
    assert found.item() == pytest.approx(_slow_same_thing(scores, same))
    assert found.isfinite()
    given = scores.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda s: same_thing_loss(s, same), given)


def test_same_thing_without_fellows_is_zero() -> None:
    assert same_thing_loss(torch.zeros(3, 3), torch.eye(3)).item() == 0.0


def test_temperature_learns_and_stops_at_its_limit() -> None:
    temperature = Temperature(20.0, limit=25.0)
    temperature(torch.tensor(0.5)).backward()
    assert temperature.log_scale.grad is not None
    assert temperature.log_scale.grad.item() == pytest.approx(10.0)
    temperature.log_scale.data.fill_(10.0)
    temperature.hold()
    assert temperature.factor.item() == pytest.approx(25.0)


@pytest.mark.parametrize("scale", [100.0, 150.0])
def test_a_temperature_at_its_limit_still_learns(scale: float) -> None:
    temperature = Temperature(scale)
    temperature.hold()
    optimiser = torch.optim.SGD(temperature.parameters(), lr=0.01)
    temperature(torch.tensor(1.0)).backward()
    optimiser.step()
    temperature.hold()
    assert temperature.factor.item() < 50
