"""The vision tower: patches, exits, pooling, what changes its identity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hivlp.models.errors import TrainingError
from hivlp.models.network.blocks import NormPlacement
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.heads import ExitHead, HeadShape
from hivlp.models.network.stack import StackPooling
from hivlp.models.network.vision import VisionShape, VisionTower
from hivlp.models.training.graphs import write_graph
from hivlp.models.training.parity import check_parity
from hivlp.models.training.stages import plan_stages
from tests.unit.models_training.checkpoints import TinyVision

SHAPE = VisionShape(depth=3, width=16, heads=2, image_size=12, patch=4)
FORMS = [(n, p) for n in ("pre", "post") for p in ("first", "mean")]


def _tower(shape: VisionShape = SHAPE) -> VisionTower:
    torch.manual_seed(0)
    tower = VisionTower(shape).eval()
    with torch.no_grad():
        for weight in tower.parameters():
            weight.normal_(std=0.3)  # far enough from the start that norms and positions matter
    return tower


def _pictures(n: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {"pixel_values": torch.randn(n, 3, 12, 12, generator=generator)}


def test_a_picture_becomes_an_image_token_and_its_patches_row_by_row() -> None:
    tower, pictures = _tower(), _pictures(2)
    hidden = tower.begin(pictures)["hidden"]
    assert hidden.shape == (2, 1 + 9, 16)
    torch.testing.assert_close(hidden[1, 0], tower.image_token[0, 0] + tower.positions[0])
    # patch 5 is the third of the second row of three: a linear map of its flattened pixels
    flat = pictures["pixel_values"][1, :, 4:8, 8:12].flatten()
    linear = tower.patches.weight.flatten(1) @ flat + tower.patches.bias
    torch.testing.assert_close(hidden[1, 1 + 5], linear + tower.positions[1 + 5])


@pytest.mark.parametrize(("norm", "pooling"), FORMS)
def test_an_early_exit_is_what_the_whole_run_passes_by_and_is_normed(
    norm: NormPlacement, pooling: StackPooling
) -> None:
    tower, pictures = _tower(replace(SHAPE, norm=norm, pooling=pooling)), _pictures(2)
    found = tower.features(pictures, (1, 2, 3))
    hidden = tower.begin(pictures)["hidden"]
    for block, early in zip(tower.blocks, found, strict=True):
        hidden = block(hidden)
        normed = tower.norm(hidden) if norm == "pre" else hidden
        wanted = normed[:, 0] if pooling == "first" else normed[:, 1:].mean(1)
        torch.testing.assert_close(early, wanted)


@pytest.mark.parametrize(("norm", "pooling"), FORMS)
def test_a_batch_equals_its_pictures_one_by_one(norm: NormPlacement, pooling: StackPooling) -> None:
    tower = _tower(replace(SHAPE, norm=norm, pooling=pooling))
    pictures = _pictures(3)
    together = tower.features(pictures, (1, 3))
    for i in range(3):
        one = {"pixel_values": pictures["pixel_values"][i : i + 1]}
        for all_of_them, alone in zip(together, tower.features(one, (1, 3)), strict=True):
            torch.testing.assert_close(all_of_them[i], alone[0], atol=1e-5, rtol=1e-5)
        assert (together[0][i] - together[0][i - 1]).abs().max() > 1e-3


def test_the_sequence_is_the_normed_last_state() -> None:
    tower, pictures = _tower(), _pictures(2)
    state = tower.advance(tower.begin(pictures), pictures, 0, 3)
    sequence = tower.sequence(state, pictures)
    assert sequence.shape == (2, 10, 16)
    torch.testing.assert_close(sequence[:, 0], tower.pool(state, pictures, 3))


def test_a_tower_without_token_states_says_so(tmp_path: Path) -> None:
    (tmp_path / "seed.tiny").write_text("1")
    with pytest.raises(TrainingError, match="tiny-vision has no token states"):
        TinyVision(tmp_path / "seed.tiny").sequence({"maps": torch.zeros(1)}, {})


@torch.no_grad()
def test_attention_maps_are_there_for_every_layer_and_explain_the_states() -> None:
    tower, pictures = _tower(), _pictures(2)
    maps = tower.attention_maps(pictures)
    assert [each.shape for each in maps] == [(2, 2, 10, 10)] * 3
    first, hidden = tower.blocks[0], tower.begin(pictures)["hidden"]
    normed = first.attention_norm(hidden)  # type: ignore[union-attr, operator]
    values = first.attention.value(normed).unflatten(2, (2, 8)).transpose(1, 2)  # type: ignore[union-attr, operator]
    joined = first.attention.out((maps[0] @ values).transpose(1, 2).flatten(2))  # type: ignore[union-attr, operator]
    torch.testing.assert_close(joined, first.attention(normed))  # type: ignore[union-attr, operator]


def test_a_loss_at_an_exit_leaves_the_layers_above_without_a_gradient() -> None:
    tower = _tower()
    tower.features(_pictures(2), (2, 3))[0][:, 0].sum().backward()
    touched = [any(p.grad is not None for p in block.parameters()) for block in tower.blocks]
    assert touched == [True, True, False]


def test_other_weights_or_another_preparation_are_another_tower() -> None:
    tower, again = _tower(), _tower()
    assert tower.identity() == again.identity()
    assert _tower(replace(SHAPE, fit="pad")).identity() != tower.identity()
    with torch.no_grad():
        again.positions[0, 0] += 1
    assert again.identity() != tower.identity()


def test_weights_start_small_and_as_the_seed_says() -> None:
    torch.manual_seed(0)
    one = VisionTower(SHAPE)
    torch.manual_seed(0)
    assert VisionTower(SHAPE).identity() == one.identity()
    wanted = 0.02 * (768 / SHAPE.width) ** 0.5
    assert one.patches.weight.std().item() == pytest.approx(0.88 * wanted, rel=0.1)  # of a cut one
    assert one.positions.std().item() == pytest.approx(wanted, rel=0.2)
    assert all(weight.abs().max() <= 1 for weight in one.parameters())


def test_the_base_size_is_a_vit_of_12_layers_768_wide() -> None:
    with torch.device("meta"):
        tower = VisionTower(VisionShape())
    assert (tower.depth, tower.width(12), len(tower.positions)) == (12, 768, 197)
    assert sum(weight.numel() for weight in tower.parameters()) == 85_798_656


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_parity_of_the_exported_stages(tmp_path: Path, pooling: StackPooling) -> None:
    tower = _tower(replace(SHAPE, pooling=pooling))
    heads = [ExitHead(HeadShape(16, 16, dim, hidden=4)) for dim in (2, 4, 8)]
    exits = TowerExits(tower, (1, 2, 3), heads).eval()
    files = []
    for i, plan in enumerate(plan_stages(exits)):
        files.append(tmp_path / f"stage{i}.onnx")
        write_graph(plan.module, plan.arguments, plan.ports, files[-1])
    assert check_parity(exits, files) < 1e-4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"patch": 5}, "image_size: 12 is not a multiple of patch, 5"),
        ({"patch": 0}, "patch: 0 is less than 1"),
        ({"patch": 16}, "image_size: 12 is less than 16"),
        ({"depth": 0}, "depth: 0 is less than 1"),
        ({"inner": -1}, "inner: -1 is less than 0"),
        ({"heads": 3}, "width: 16 is not a multiple of heads, 3"),
        ({"pooling": "last"}, "pooling: 'last' is none of first, mean"),
        ({"fit": "squeeze"}, "fit: 'squeeze' is none of stretch, crop, pad"),
        ({"std": (0.5, 0.0, 0.5)}, "std: .* must be above 0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name(changes: dict[str, int], told: str) -> None:
    with pytest.raises(TrainingError, match=told):
        replace(SHAPE, **changes)
