"""EfficientNet-Lite: shapes of the family, strict loading, pieces equal the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hivlp.models.network.efficientnet import (
    VARIANTS,
    EfficientNetLite,
    SameConv,
    _our_names,
    is_efficientnet_lite,
    load_efficientnet_lite,
    scaled_stages,
)
from hivlp.models.network.tower import TowerError, freeze


def port_weights(seed: int = 0) -> dict[str, Tensor]:
    """Random Lite0 weights under the names of the PyTorch port, classifier included."""
    torch.manual_seed(seed)
    tower = EfficientNetLite(VARIANTS["lite0"], path=Path())
    state = tower.state_dict()
    weights = {theirs: state[ours] for theirs, ours in _our_names(tower).items()}
    return weights | {"_fc.weight": torch.zeros(1000, 1280), "_fc.bias": torch.zeros(1000)}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return port_weights()


def test_channels_of_the_published_variants() -> None:
    channels = {name: [s.channels for s in scaled_stages(v)] for name, v in VARIANTS.items()}
    assert channels["lite0"] == [16, 24, 40, 80, 112, 192, 320]
    assert channels["lite4"] == [24, 32, 56, 112, 160, 272, 448]
    assert [s.repeats for s in scaled_stages(VARIANTS["lite4"])] == [1, 4, 4, 6, 6, 8, 1]


@pytest.mark.parametrize(("side", "stride", "wanted"), [(7, 2, 4), (8, 2, 4), (9, 1, 9)])
@pytest.mark.parametrize("kernel", [3, 5])
def test_same_padding_gives_the_side_over_the_stride(
    side: int, stride: int, wanted: int, kernel: int
) -> None:
    conv = SameConv(2, 4, kernel, stride).eval()
    assert conv(torch.zeros(1, 2, side, side)).shape == (1, 4, wanted, wanted)


def test_the_odd_pixel_of_padding_goes_right_and_below() -> None:
    assert SameConv(1, 1, 3, 2)._padding(8) == (0, 1)
    assert SameConv(1, 1, 3, 2)._padding(7) == (1, 1)


def test_loads_and_its_pieces_equal_the_whole(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, tmp_path / "lite0.pth")
    assert is_efficientnet_lite(tmp_path / "lite0.pth")
    tower = freeze(load_efficientnet_lite(tmp_path / "lite0.pth"))
    assert tower.exits(3) == (6, 7, 8)
    pixels = {"pixel_values": torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))}
    with torch.no_grad():
        pieces = tower.features(pixels, (3, 8))
        whole = tower.features(pixels, (8,))
    assert [p.shape for p in pieces] == [(1, tower.width(3)), (1, tower.width(8))]
    torch.testing.assert_close(pieces[1], whole[0])


def test_loading_is_strict_and_names_the_weight(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = tmp_path / "lite0.pth"
    torch.save({k: v for k, v in weights.items() if k != "_blocks.3._bn0.bias"}, path)
    with pytest.raises(TowerError, match="missing weights: layers"):
        load_efficientnet_lite(path)
    torch.save(weights | {"_blocks.3.extra": torch.zeros(1)}, path)
    with pytest.raises(TowerError, match=r"unexpected weights: _blocks\.3\.extra"):
        load_efficientnet_lite(path)
    torch.save(weights | {"_bn0.bias": torch.zeros(5)}, path)
    with pytest.raises(TowerError, match=r"mis-shaped weights: stem\.norm\.bias"):
        load_efficientnet_lite(path)


def test_another_number_of_blocks_is_no_variant(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = tmp_path / "odd.pth"
    torch.save({k: v for k, v in weights.items() if not k.startswith("_blocks.15.")}, path)
    with pytest.raises(TowerError, match="15 blocks"):
        load_efficientnet_lite(path)


def test_a_pickle_that_is_more_than_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.pth"
    torch.save({"_conv_stem.weight": torch.zeros(1), "epoch": 3}, path)
    with pytest.raises(TowerError, match="something else than a flat state dict"):
        load_efficientnet_lite(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(TowerError, match="can be read safely"):
        load_efficientnet_lite(path)
