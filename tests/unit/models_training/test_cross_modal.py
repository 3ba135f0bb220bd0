"""The cross-modal encoder: pairs, masks, widths, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hivlp.models.errors import TrainingError
from hivlp.models.network.blocks import Attention, key_mask
from hivlp.models.network.cross_modal import CrossModalEncoder, CrossModalShape
from hivlp.models.network.few_queries import FewQueries

TINY = CrossModalShape(depth=2, width=16, heads=4, inner=32, text=12, image=20)
TOKENS, PATCHES = 7, 5


def make(shape: CrossModalShape = TINY, seed: int = 0) -> CrossModalEncoder:
    torch.manual_seed(seed)
    return CrossModalEncoder(shape).eval()


def pairs(n: int, shape: CrossModalShape = TINY, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Texts of different lengths, their mask, and pictures."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(n, TOKENS, shape.text, generator=generator)
    image = torch.randn(n, PATCHES, shape.image, generator=generator)
    lengths = torch.tensor([TOKENS - i % (TOKENS - 1) for i in range(n)])
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    return text, mask, image


def test_default_sizes_are_those_of_the_paper() -> None:
    shape = CrossModalShape()
    assert (shape.depth, shape.width, shape.heads) == (6, 768, 12)
    assert shape.block.inner == 3072


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_batch_equals_its_pairs_one_by_one_without_their_padding(norm: str) -> None:
    model = make(replace(TINY, norm=norm))
    text, mask, image = pairs(5)
    together = model(text, mask, image)
    for row in range(5):
        length = int(mask[row].sum())
        alone = model(
            text[row : row + 1, :length], mask[row : row + 1, :length], image[row : row + 1]
        )
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-5, atol=1e-6)


def test_image_padding_changes_nothing() -> None:
    model = make()
    text, mask, image = pairs(3)
    expected = model(text, mask, image)
    wide = torch.cat([image, torch.full((3, 2, TINY.image), 9.0)], 1)
    image_mask = torch.cat([torch.ones(3, PATCHES), torch.zeros(3, 2)], 1)
    torch.testing.assert_close(model(text, mask, wide, image_mask), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(text, mask, wide), expected, atol=1e-4)


def test_every_part_of_a_pair_counts_and_padding_does_not() -> None:
    model = make()
    text, mask, image = pairs(2)
    mask[0, -1] = 0
    before = model(text, mask, image).detach()
    padding, word, patch = text.clone(), text.clone(), image.clone()
    padding[0, -1] += 5.0
    word[0, 1] += 5.0
    patch[0, -1] += 5.0
    torch.testing.assert_close(model(padding, mask, image), before)
    for changed in (model(word, mask, image).detach(), model(text, mask, patch).detach()):
        assert abs(float(changed[0] - before[0])) > 1e-3
        torch.testing.assert_close(changed[1], before[1])


def test_probability_is_the_sigmoid_of_the_logit() -> None:
    model = make()
    given = pairs(4)
    expected = 1.0 / (1.0 + torch.exp(-model(*given)))
    torch.testing.assert_close(model.probability(*given), expected)
    assert model(*given).shape == (4,)


def test_maps_are_two_a_layer_and_do_not_change_the_answer() -> None:
    model = make()
    given = pairs(3)
    maps: list[Tensor] = []
    torch.testing.assert_close(model(*given, maps=maps), model(*given), rtol=1e-5, atol=1e-6)
    shapes = [(3, 4, TOKENS, TOKENS), (3, 4, TOKENS, PATCHES)] * TINY.depth
    assert [tuple(each.shape) for each in maps] == shapes


def test_gradients_reach_both_towers_and_every_weight() -> None:
    model = make().train()
    text, mask, image = pairs(4)
    text.requires_grad_()
    image.requires_grad_()
    model(text, mask, image).sum().backward()
    assert text.grad is not None
    assert image.grad is not None
    assert image.grad.abs().sum() > 0
    assert (text.grad[mask == 0] == 0).all()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_gradient_of_the_logit_equals_finite_differences() -> None:
    model = make().double()
    text, mask, image = (x.double() if x.is_floating_point() else x for x in pairs(2))
    assert torch.autograd.gradcheck(
        lambda t, i: model(t, mask, i),
        (text.requires_grad_(), image.requires_grad_()),
        eps=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("tokens", [1, TOKENS, 40])
def test_few_queries_give_what_attention_gives(tokens: int) -> None:
    torch.manual_seed(2)
    attention = Attention(16, 4, memory=20)
    with torch.no_grad():
        for weight in attention.parameters():  # biases start at zero, and would not be heard
            weight.normal_()
    hidden, memory = torch.randn(3, tokens, 16), torch.randn(3, PATCHES, 20)
    kept = torch.ones(3, PATCHES)
    kept[1, 2:] = 0
    few = FewQueries(attention)
    for mask in (None, key_mask(kept)):
        wanted = attention(hidden, memory, mask)
        torch.testing.assert_close(few(hidden, memory, mask), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(few(hidden, memory), wanted, atol=1e-3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("depth", 0), ("text", 0), ("image", 0), ("heads", 3), ("dropout", 1.0), ("norm", "none")],
)
def test_a_size_that_cannot_be_is_named(field: str, value: object) -> None:
    given = {**TINY.as_dict(), field: value}
    with pytest.raises(TrainingError, match="width" if field == "heads" else field):
        CrossModalShape(**given)  # type: ignore[arg-type]
