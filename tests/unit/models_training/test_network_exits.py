"""Towers with heads: stages equal the whole, gradients stay below their exit, families known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hivlp.models.errors import TrainingError
from hivlp.models.network.bert import load_bert
from hivlp.models.network.dual_encoder import DualEncoder
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.families import load_tower
from hivlp.models.network.heads import ExitHead, HeadShape
from hivlp.models.network.tower import Tensors, Tower, TowerError, check_exits
from tests.unit.models_training.checkpoints import TinyVision, make_bert, tokens


def with_exits(tower: Tower, exits: tuple[int, ...], dims: tuple[int, ...]) -> TowerExits:
    heads = [
        ExitHead(HeadShape(tower.width(layer), tower.width(layer), dim, hidden=4))
        for layer, dim in zip(exits, dims, strict=True)
    ]
    return TowerExits(tower, exits, heads).eval()


@pytest.fixture
def text(tmp_path: Path) -> TowerExits:
    return with_exits(load_bert(make_bert(tmp_path / "bert")), (1, 2, 3), (2, 4, 8))


def test_every_level_has_its_dim_and_length_1(text: TowerExits) -> None:
    answers = text(tokens([[2, 4, 3], [2, 5, 6, 3]]))
    assert [a.shape for a in answers] == [(2, 2), (2, 4), (2, 8)]
    for answer in answers:
        torch.testing.assert_close(answer.norm(dim=1), torch.ones(2))
    assert [(s.level, s.exit_layer, s.dim) for s in text.levels] == [
        (1, 1, 2),
        (2, 2, 4),
        (3, 3, 8),
    ]


def test_stages_one_by_one_equal_the_whole(text: TowerExits) -> None:
    inputs = tokens([[2, 4, 3], [2, 5, 6, 3]])
    state: Tensors = {}
    for index, whole in enumerate(text(inputs)):
        answer, state = text.run_stage(index, state, inputs)
        torch.testing.assert_close(answer, whole)


def test_later_layers_run_only_when_asked_for(text: TowerExits) -> None:
    ran: list[int] = []
    tower = text.tower
    for i, block in enumerate(tower.blocks):  # type: ignore[arg-type]
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    next(text.answers(tokens([[2, 4, 3]])))
    assert ran == [0]


def test_a_loss_at_one_exit_leaves_the_layers_above_alone(text: TowerExits) -> None:
    text(tokens([[2, 4, 3], [2, 5, 3]]))[0][:, 0].sum().backward()
    blocks = list(text.tower.blocks)  # type: ignore[arg-type]
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in blocks[0].parameters())
    assert all(p.grad is None for block in blocks[1:] for p in block.parameters())
    assert text.exit_heads[0].line.weight.grad is not None
    assert all(p.grad is None for head in text.exit_heads[1:] for p in head.parameters())


@pytest.mark.parametrize("exits", [(), (0, 1), (2, 2), (1, 9), (3, 1)])
def test_exits_that_do_not_grow_within_the_tower_are_refused(
    text: TowerExits, exits: tuple[int, ...]
) -> None:
    with pytest.raises(TrainingError, match=r"must grow within 1\.\.3"):
        check_exits(text.tower, exits)


def test_towers_of_different_dims_do_not_join(tmp_path: Path, text: TowerExits) -> None:
    (tmp_path / "seed.tiny").write_text("1")
    image = with_exits(TinyVision(tmp_path / "seed.tiny"), (1, 2, 3), (2, 4, 6))
    with pytest.raises(TrainingError, match=r"text \[2, 4, 8\], image \[2, 4, 6\]"):
        DualEncoder(text, image, "nested")


def test_a_family_is_told_by_what_is_at_the_path(tmp_path: Path) -> None:
    tower = load_tower(make_bert(tmp_path / "bert"), "text")
    assert tower.family == "bert"
    assert not tower.training
    assert not any(p.requires_grad for p in tower.parameters())


def test_an_unknown_family_is_told_which_are_known(tmp_path: Path) -> None:
    with pytest.raises(TowerError, match="Known are bert: a Hugging Face folder"):
        load_tower(tmp_path, "text")
    with pytest.raises(TowerError, match=r"efficientnet-lite: a \.pth state dict"):
        load_tower(make_bert(tmp_path / "bert"), "image")
    with pytest.raises(TowerError, match="no such file or folder"):
        load_tower(tmp_path / "nowhere", "text")


def test_a_head_starts_as_its_straight_line() -> None:
    head = ExitHead(HeadShape(6, 4, 3, hidden=8, layers=2)).eval()
    features = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head(features), head.line(features[:, :4]))
