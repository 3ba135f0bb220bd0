"""The block against torch's own layer and against attention written out; masks, memories, maps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hivlp.models.errors import TrainingError
from hivlp.models.network.blocks import (
    ACTIVATIONS,
    Activation,
    Attention,
    Block,
    BlockShape,
    NormPlacement,
    attention_mask,
    key_mask,
)
from hivlp.models.network.weights import initialise, weights_hash

SHAPE = BlockShape(width=12, heads=3, inner=20)
NORMS: tuple[NormPlacement, ...] = ("pre", "post")


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _block(shape: BlockShape) -> Block:
    """A block whose every weight matters, norms and biases too."""
    torch.manual_seed(1)
    block = Block(shape).double().eval()
    with torch.no_grad():
        for weight in block.parameters():
            weight.normal_(std=0.4)
    return block


@pytest.fixture
def padded() -> Tensor:
    """Two items of 5 tokens, the second with two of padding."""
    return torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def _torchs_own(block: Block, shape: BlockShape) -> nn.TransformerEncoderLayer:
    theirs = nn.TransformerEncoderLayer(
        shape.width, shape.heads, shape.inner, 0.0, "gelu", shape.eps,
        batch_first=True, norm_first=shape.norm == "pre", dtype=torch.float64,
    )  # fmt: skip
    ours = block.attention
    stacked = [torch.cat([getattr(p, n) for p in (ours.query, ours.key, ours.value)])
               for n in ("weight", "bias")]  # fmt: skip
    with torch.no_grad():
        assert theirs.self_attn.in_proj_weight is not None
        theirs.self_attn.in_proj_weight.copy_(stacked[0])
        theirs.self_attn.in_proj_bias.copy_(stacked[1])
    theirs.self_attn.out_proj.load_state_dict(ours.out.state_dict())
    theirs.linear1.load_state_dict(block.feed.inner.state_dict())
    theirs.linear2.load_state_dict(block.feed.outer.state_dict())
    theirs.norm1.load_state_dict(block.attention_norm.state_dict())
    theirs.norm2.load_state_dict(block.feed_norm.state_dict())
    return theirs.eval()


@pytest.mark.parametrize("norm", NORMS)
def test_parity_with_torchs_own_layer(norm: NormPlacement, padded: Tensor) -> None:
    shape = replace(SHAPE, norm=norm)
    block, hidden = _block(shape), _random(2, 5, 12)
    wanted = _torchs_own(block, shape)(hidden, src_key_padding_mask=padded == 0)
    found = block(hidden, attention_mask(hidden, padded))
    kept = padded.bool()
    torch.testing.assert_close(found[kept], wanted[kept])


def _slow_attention(attention: Attention, x: Tensor, memory: Tensor, kept: Tensor) -> Tensor:
    """One item: (t, d) to (m, d), written out; kept (t, m) says who may see whom."""
    q, k, v = attention.query(x), attention.key(memory), attention.value(memory)
    size = x.shape[1] // attention.heads
    joined = torch.zeros_like(x)
    for head in range(attention.heads):
        part = slice(head * size, (head + 1) * size)
        for i in range(len(x)):
            seen = [j for j in range(len(memory)) if kept[i, j]]
            powers = [math.exp(float(q[i, part] @ k[j, part]) / math.sqrt(size)) for j in seen]
            for j, power in zip(seen, powers, strict=True):
                joined[i, part] += power / sum(powers) * v[j, part]
    found: Tensor = attention.out(joined)
    return found


@torch.no_grad()
def test_attention_matches_the_slow_reference_with_a_memory_of_another_width() -> None:
    torch.manual_seed(0)
    attention = Attention(6, 2, memory=10).double().eval()
    x, memory = _random(2, 3, 6), _random(2, 4, 10, seed=1)
    kept = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0]])
    found = attention(x, memory, key_mask(kept))
    for i in range(2):
        slow = _slow_attention(attention, x[i], memory[i], kept[i].expand(3, -1))
        torch.testing.assert_close(found[i], slow)


@torch.no_grad()
def test_causal_attention_matches_the_slow_reference() -> None:
    torch.manual_seed(0)
    attention = Attention(6, 2).double().eval()
    x = _random(1, 4, 6)
    found = attention(x, mask=attention_mask(x, causal=True))
    slow = _slow_attention(attention, x[0], x[0], torch.ones(4, 4).tril())
    torch.testing.assert_close(found[0], slow)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("memory", [0, 7])
def test_the_explicit_way_that_shows_maps_equals_the_fast_one_in_value_and_gradient(
    norm: NormPlacement, causal: bool, memory: int, padded: Tensor
) -> None:
    block = _block(replace(SHAPE, norm=norm, memory=memory))
    hidden, other = _random(2, 5, 12), _random(2, 4, 7, seed=2) if memory else None
    seen = key_mask(torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])) if memory else None
    mask = attention_mask(hidden, padded, causal=causal)

    def run(maps: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        given = hidden.clone().requires_grad_(True)
        found = block(given, mask, memory=other, memory_mask=seen, maps=maps)
        found.square().sum().backward()
        assert given.grad is not None
        return found, given.grad

    maps: list[Tensor] = []
    for slow, fast in zip(run(maps), run(None), strict=True):
        torch.testing.assert_close(slow, fast)
    assert [m.shape for m in maps] == [(2, 3, 5, 5), (2, 3, 5, 4)][: 2 if memory else 1]
    for found in maps:
        torch.testing.assert_close(found.sum(3), torch.ones_like(found.sum(3)))
    assert maps[0][1, :, :, 3:].abs().max() == 0  # padding is looked at by nobody
    assert not causal or maps[0].triu(1).abs().max() == 0


@pytest.mark.parametrize("norm", NORMS)
def test_padding_changes_no_token_and_a_batch_equals_its_rows(
    norm: NormPlacement, padded: Tensor
) -> None:
    block, hidden = _block(replace(SHAPE, norm=norm)), _random(2, 5, 12)
    together = block(hidden, attention_mask(hidden, padded))
    torch.testing.assert_close(together[0], block(hidden[:1])[0])
    torch.testing.assert_close(together[1, :3], block(hidden[1:, :3])[0])


def test_no_mask_is_made_where_everything_may_be_seen() -> None:
    assert attention_mask(_random(1, 2, 3)) is None


def test_dropout_changes_training_only() -> None:
    block, hidden = _block(replace(SHAPE, dropout=0.5)), _random(2, 5, 12)
    torch.testing.assert_close(block(hidden), block(hidden))
    block.train()
    for maps in (None, []):
        assert (block(hidden, maps=maps) - block(hidden, maps=maps)).abs().max() > 0.1


def test_gradients_match_finite_differences(padded: Tensor) -> None:
    block = _block(replace(SHAPE, memory=4))
    hidden, memory = _random(2, 5, 12), _random(2, 3, 4, seed=1)
    mask = attention_mask(hidden, padded)
    given = (hidden.requires_grad_(True), memory.requires_grad_(True))
    assert torch.autograd.gradcheck(lambda h, m: block(h, mask, memory=m).sum((0, 1)), given)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("gelu", 0.841345), ("gelu_new", 0.841192), ("quick_gelu", 0.845796), ("relu", 1.0)],
)
def test_activations_at_one(name: Activation, wanted: float) -> None:
    one = torch.tensor(1.0, dtype=torch.float64)
    assert ACTIVATIONS[name](one).item() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"width": 10}, "width: 10 is not a multiple of heads, 3"),
        ({"heads": 0}, "heads: 0 is less than 1"),
        ({"inner": 0}, "inner: 0 is less than 1"),
        ({"memory": -1}, "memory: -1 is less than 0"),
        ({"dropout": 1.0}, r"dropout: 1\.0 is not within"),
        ({"eps": 0.0}, r"eps: 0\.0 is not within"),
        ({"norm": "middle"}, "norm: 'middle' is none of pre, post"),
        ({"activation": "swish"}, "activation: 'swish' is none of gelu"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name(changes: dict[str, int], told: str) -> None:
    with pytest.raises(TrainingError, match=told):
        replace(SHAPE, **changes)


def test_weights_start_small_and_their_hash_tells_them_apart() -> None:
    torch.manual_seed(0)
    block = Block(SHAPE)
    before = weights_hash(block)
    for width, std in ((768, 0.02), (192, 0.04)):
        initialise(block, width)
        assert block.feed.inner.weight.abs().max() <= 2 * std
        assert block.feed.inner.weight.std().item() == pytest.approx(0.88 * std, rel=0.1)
    assert block.feed.inner.bias.abs().max() == 0
    assert weights_hash(block) != before
    assert weights_hash(block.bfloat16()) == weights_hash(block)
