"""The losses of both forms against loops in plain numpy, and where their gradients may go."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hivlp.models.errors import TrainingError
from hivlp.models.network.hivlp import Hivlp, paper_literal
from hivlp.models.training.hivlp_losses import Batch, Gather, LossSettings, hivlp_losses
from tests.unit.models_training.tiny_hivlp import TINY, make_batch, make_tiny

Rows = npt.NDArray[np.float64]
PAPER = paper_literal(TINY)
PER_EXIT = replace(PAPER, normalise=True, temperature=5.0, learn_temperature=True)
RETRIEVAL_ONLY = LossSettings(mlm=0, matching=0)
ITEMS = (0, 1, 0, 2)
"""The first and the third pair are two captions of one item."""
TOWER = ("input", "norm")
"""What every exit of a tower shares: what is below its layers, and the norm of whatever is read."""


@pytest.fixture
def batch() -> Batch:
    return replace(make_batch(), item=torch.tensor(ITEMS))


def _numbers(x: Tensor) -> Rows:
    found: Rows = x.detach().numpy()
    return found


def _answers(model: Hivlp, batch: Batch) -> tuple[list[Rows], list[Rows]]:
    """Every head's answer on every row, one row at a time: texts and images, one a level."""
    found = []
    for exits, inputs in ((model.dual.text, batch.texts), (model.dual.image, batch.pictures)):
        rows = []
        for i in range(4):
            features = exits.read({n: x[i : i + 1] for n, x in inputs.items()}).features
            rows.append([_numbers(h(f))[0] for h, f in zip(exits.exit_heads, features)])  # noqa: B905
        found.append([np.stack(level) for level in zip(*rows, strict=True)])
    return found[0], found[1]


def _unit(rows: Rows) -> Rows:
    return np.stack([row / math.sqrt(sum(x * x for x in row)) for row in rows])


def _search(queries: Rows, gallery: Rows, factor: float) -> float:
    """-log of the share that the right answers get, their mean; then the mean over queries."""
    total = 0.0
    for q, item in zip(queries, ITEMS, strict=True):
        powers = [math.exp(factor * sum(a * b for a, b in zip(q, g, strict=True))) for g in gallery]
        right = [p for p, other in zip(powers, ITEMS, strict=True) if other == item]
        total -= sum(math.log(p / sum(powers)) for p in right) / len(right)
    return total / len(queries)


def _likeness(early: Rows, target: Rows, gallery: Rows, weight: float) -> float:
    direction = difference = 0.0
    for q, p in zip(early, target, strict=True):
        direction += 1 - float(q @ p)
        difference += sum((float(q @ g) - float(p @ g)) ** 2 for g in gallery)
    return direction / len(early) + weight * difference / (len(early) * len(gallery))


@pytest.mark.parametrize("config", [PAPER, PER_EXIT])
def test_per_exit_matches_the_slow_reference(tmp_path: Path, batch: Batch, config: Any) -> None:
    model = make_tiny(tmp_path, config)
    with torch.no_grad():
        losses = hivlp_losses(model, batch, RETRIEVAL_ONLY)
    total, factor = 0.0, model.temperature.factor.item()
    for level, (texts, images) in enumerate(zip(*_answers(model, batch), strict=True), 1):
        if config.normalise:
            texts, images = _unit(texts), _unit(images)
        wanted = _search(texts, images, factor) + _search(images, texts, factor)
        assert losses[f"retrieval_{level}"].item() == pytest.approx(wanted)
        total += wanted
    assert losses.keys() == {"retrieval_1", "retrieval_2", "retrieval_3", "total"}
    assert losses["total"].item() == pytest.approx(total)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_nested_matches_the_slow_reference(tmp_path: Path, batch: Batch, reduction: Any) -> None:
    model = make_tiny(tmp_path)
    settings = LossSettings(
        retrieval=2, early=3, distillation=0.5, score_weight=7, mlm=0, matching=0,
        reduction=reduction,
    )  # fmt: skip
    with torch.no_grad():
        losses = hivlp_losses(model, batch, settings)
    texts, images = _answers(model, batch)
    share, factor = (1.0 if reduction == "sum" else 0.5), model.temperature.factor.item()
    total = 0.0
    for level, dim in enumerate(TINY.dims):
        full_t, full_v = _unit(texts[-1][:, :dim]), _unit(images[-1][:, :dim])
        wanted = {"retrieval": _search(full_t, full_v, factor) + _search(full_v, full_t, factor)}
        if level < 2:
            t, v, every = _unit(texts[level]), _unit(images[level]), np.vstack([full_v, full_t])
            wanted["early"] = _search(t, full_v, factor) + _search(v, full_t, factor)
            wanted["distillation"] = _likeness(t, full_t, every, 7) + _likeness(v, full_v, every, 7)
        for name, value in wanted.items():
            assert losses[f"{name}_{level + 1}"].item() == pytest.approx(share * value)
            total += share * value * {"retrieval": 2, "early": 3, "distillation": 0.5}[name]
    assert len(losses) == 3 + 2 + 2 + 1
    assert losses["total"].item() == pytest.approx(total)


def _slow_words(model: Hivlp, batch: Batch) -> float:
    """Row by row, without padding: -log of the share of each hidden word, the mean."""
    costs = []
    assert batch.mlm_ids is not None
    assert batch.mlm_labels is not None
    assert model.mlm is not None
    for i in range(4):
        length = int(batch.attention_mask[i].sum())
        one = {
            "input_ids": batch.mlm_ids[i : i + 1, :length],
            "attention_mask": batch.attention_mask[i : i + 1, :length],
        }
        text, exits = model.dual.text.read(one), model.dual.text
        image = model.dual.image.read({"pixel_values": batch.pixel_values[i : i + 1]})
        states = exits.tower.sequence(text.state, one)[0]
        seen = image.features[-1].expand(length, -1)
        logits = _numbers(model.mlm(states, seen, model.word_embeddings))
        for place, label in enumerate(batch.mlm_labels[i, :length].tolist()):
            if label != -100:
                below = sum(math.exp(x) for x in logits[place])
                costs.append(-math.log(math.exp(logits[place][label]) / below))
    assert len(costs) == 8
    return sum(costs) / len(costs)


def test_hidden_words_match_the_slow_reference(tmp_path: Path, batch: Batch) -> None:
    model = make_tiny(tmp_path)
    with torch.no_grad():
        losses = hivlp_losses(model, batch, LossSettings(matching=0))
        assert losses["mlm"].item() == pytest.approx(_slow_words(model, batch))


@pytest.mark.parametrize(
    ("fusion", "changes"), [("add", True), ("multiply", True), ("none", False)]
)
def test_hidden_words_depend_on_the_picture_unless_fusion_is_none(
    tmp_path: Path, batch: Batch, fusion: Any, changes: bool
) -> None:
    model = make_tiny(tmp_path, replace(TINY, fusion=fusion))
    other = replace(batch, pixel_values=batch.pixel_values + 1)
    with torch.no_grad():
        one, two = (hivlp_losses(model, b, LossSettings())["mlm"].item() for b in (batch, other))
    assert (abs(one - two) > 1e-4) == changes


class _Spy(nn.Module):
    """A cross-modal encoder that remembers which pairs it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, text: Tensor, text_mask: Tensor, image: Tensor) -> Tensor:
        self.text, self.mask, self.image = text.detach(), text_mask, image.detach()
        return self.weight * (text[:, 0] * image[:, 0]).sum(1)


def _which(rows: Tensor, among: Tensor) -> list[int]:
    return [next(i for i, one in enumerate(among) if torch.equal(one, row)) for row in rows]


def test_matching_shows_each_pair_and_two_wrong_ones_never_of_one_item(
    tmp_path: Path, batch: Batch
) -> None:
    model, spy = make_tiny(tmp_path), _Spy()
    model.cross = spy  # type: ignore[assignment]
    text, image = model.dual.text.read(batch.texts), model.dual.image.read(batch.pictures)
    texts = model.dual.text.tower.sequence(text.state, batch.texts).detach()
    images = model.dual.image.tower.sequence(image.state, batch.pictures).detach()
    for _ in range(20):
        loss = hivlp_losses(model, batch, LossSettings())["matching"]
        t, v = _which(spy.text, texts), _which(spy.image, images)
        assert torch.equal(spy.mask, batch.attention_mask[t])
        assert t[:4] == v[:4] == [0, 1, 2, 3]
        assert t[4:8] == [0, 1, 2, 3]
        assert v[8:] == [0, 1, 2, 3]
        assert all(ITEMS[i] != ITEMS[j] for i, j in zip(t[4:], v[4:], strict=True))
        total = 0.0
        for place, (i, j) in enumerate(zip(t, v, strict=True)):
            share = 1 / (1 + math.exp(-float(texts[i, 0] @ images[j, 0])))
            total -= math.log(share if place < 4 else 1 - share)
        assert loss.item() == pytest.approx(total / 12)


def test_matching_of_a_single_item_has_no_wrong_pairs(tmp_path: Path, batch: Batch) -> None:
    model = make_tiny(tmp_path)
    one = replace(batch, item=torch.zeros(4, dtype=torch.int64))
    assert hivlp_losses(model, one, LossSettings())["matching"].isfinite()


def _moved(module: nn.Module) -> bool:
    return any(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())


def _parts(model: Hivlp) -> Iterator[tuple[str, nn.Module]]:
    """Everything of both towers that a loss may or may not reach, by name."""
    for exits in (model.dual.text, model.dual.image):
        name, tower = exits.tower.modality, exits.tower
        yield f"{name} input", tower.words if name == "text" else tower.patches  # type: ignore[misc]
        yield f"{name} norm", tower.norm  # type: ignore[misc]
        yield from ((f"{name} layer {i + 1}", b) for i, b in enumerate(exits.tower.blocks))  # type: ignore[arg-type]
        yield from ((f"{name} head {i + 1}", h) for i, h in enumerate(exits.exit_heads))
    yield "temperature", model.temperature


def _reached(model: Hivlp, loss: Tensor) -> set[str]:
    model.zero_grad()
    loss.backward(retain_graph=True)
    return {name for name, part in _parts(model) if _moved(part)}


def _both(*names: str) -> set[str]:
    return {f"{modality} {name}" for modality in ("text", "image") for name in names}


def test_per_exit_sends_no_gradient_above_an_exit_and_some_to_everything_below(
    tmp_path: Path, batch: Batch
) -> None:
    model = make_tiny(tmp_path, PER_EXIT)
    losses = hivlp_losses(model, batch, RETRIEVAL_ONLY)
    for level in (1, 2, 3):
        below = _both(f"head {level}", *TOWER, *(f"layer {i}" for i in range(1, level + 1)))
        assert _reached(model, losses[f"retrieval_{level}"]) == below | {"temperature"}


@pytest.mark.parametrize("flows", [True, False])
def test_what_is_detached_in_the_nested_form(tmp_path: Path, batch: Batch, flows: bool) -> None:
    """Neither gallery nor targets nor the temperature learn from an early query."""
    model = make_tiny(tmp_path)
    losses = hivlp_losses(model, batch, replace(RETRIEVAL_ONLY, early_gradient=flows))
    for level in (1, 2, 3):
        full = _both("head 3", *TOWER, "layer 1", "layer 2", "layer 3") | {"temperature"}
        assert _reached(model, losses[f"retrieval_{level}"]) == full
    for level in (1, 2):
        layers = [f"layer {i}" for i in range(1, level + 1)]
        below = _both(*TOWER, *layers) if flows else set()
        for name in ("early", "distillation"):
            assert _reached(model, losses[f"{name}_{level}"]) == below | _both(f"head {level}")


def test_hidden_words_and_matching_reach_every_layer_of_both_towers(
    tmp_path: Path, batch: Batch
) -> None:
    model = make_tiny(tmp_path)
    losses = hivlp_losses(model, batch, LossSettings())
    layers = _both(*TOWER, "layer 1", "layer 2", "layer 3")
    for name, part in (("mlm", model.mlm), ("matching", model.cross)):
        assert _reached(model, losses[name]) == layers
        assert part is not None
        assert _moved(part)


@pytest.mark.parametrize("config", [TINY, PAPER])
def test_every_weight_learns_from_the_total(tmp_path: Path, batch: Batch, config: Any) -> None:
    model = make_tiny(tmp_path, config)
    hivlp_losses(model, batch, LossSettings())["total"].backward()
    still = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert still == []


def _total_of(model: Hivlp, batch: Batch, answers: list[Tensor], settings: LossSettings) -> Tensor:
    """The total where the six heads, those of texts first, answer these."""
    heads = [*model.dual.text.exit_heads, *model.dual.image.exit_heads]
    hooks = [
        head.register_forward_hook(lambda *_, answer=answer: answer)
        for head, answer in zip(heads, answers, strict=True)
    ]
    total = hivlp_losses(model, batch, settings)["total"]
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("config", [TINY, PAPER])
def test_gradients_match_finite_differences_but_for_what_is_detached(
    tmp_path: Path, batch: Batch, config: Any
) -> None:
    model = make_tiny(tmp_path, config)
    generator = torch.Generator().manual_seed(1)
    answers = [
        torch.randn(4, dim, generator=generator, dtype=torch.float64).requires_grad_(True)
        for dim in TINY.dims * 2
    ]
    # a detached answer has no gradient but does change the loss: the full ones are held still
    still = {i: answers[i].detach().clone() for i in (2, 5)} if config is TINY else {}

    def early(*given: Tensor) -> Tensor:
        mixed = [still.get(i, x) for i, x in enumerate(given)]
        return _total_of(model, batch, mixed, RETRIEVAL_ONLY) + 0 * sum(x.sum() for x in given)

    def full(*given: Tensor) -> Tensor:
        settings = replace(RETRIEVAL_ONLY, early=0, distillation=0)
        return _total_of(model, batch, list(given), settings) + 0 * sum(x.sum() for x in given)

    assert torch.autograd.gradcheck(early, tuple(answers))
    assert torch.autograd.gradcheck(full, tuple(answers))


@pytest.mark.parametrize(("reduction", "once"), [("sum", 0.679677194), ("mean", 0.339838597)])
def test_golden_scores_at_three_exits_cost_three_times_the_golden_loss(
    tmp_path: Path, reduction: Any, once: float
) -> None:
    golden = torch.tensor([[2.0, 0, 1], [0, 3, 1], [1, 0, 2]], dtype=torch.float64)
    sides = (torch.eye(3, dtype=torch.float64), golden.T)  # rows texts: eye @ golden is golden
    answers = [F.pad(side, (0, dim - 3)) for side in sides for dim in PAPER.dims]
    model, settings = make_tiny(tmp_path, PAPER), replace(RETRIEVAL_ONLY, reduction=reduction)
    total = _total_of(model, make_batch((5, 3, 7)), answers, settings)
    assert total.item() == pytest.approx(3 * once, abs=3e-9)


class _Others:
    """Stands for the other process: what it gathered, call by call, is put beside our rows."""

    def __init__(self, theirs: list[Tensor], *, first: bool) -> None:
        self._theirs, self._first = iter(theirs), first

    def __call__(self, rows: Tensor) -> Tensor:
        theirs = next(self._theirs)
        return torch.cat([rows, theirs] if self._first else [theirs, rows])


def _recorded(model: Hivlp, batch: Batch) -> list[Tensor]:
    seen: list[Tensor] = []

    def gather(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows

    hivlp_losses(model, batch, RETRIEVAL_ONLY, gather)
    return seen


def _half(batch: Batch, part: slice) -> Batch:
    return Batch(
        batch.pixel_values[part], batch.input_ids[part], batch.attention_mask[part],
        batch.item[part],
    )  # fmt: skip


@pytest.mark.parametrize("config", [TINY, PER_EXIT])
def test_the_mean_over_two_processes_is_the_joint_batch_in_value_and_gradient(
    tmp_path: Path, batch: Batch, config: Any
) -> None:
    model = make_tiny(tmp_path, config)
    halves = [_half(batch, slice(0, 2)), _half(batch, slice(2, 4))]
    gathered = [_recorded(model, half) for half in halves]
    gathers: list[Gather] = [_Others(gathered[1], first=True), _Others(gathered[0], first=False)]
    settings = RETRIEVAL_ONLY
    if config is TINY:  # its two parts of early queries are tested by the loop above
        settings = replace(settings, distillation=0)
    apart = [
        hivlp_losses(model, half, settings, gather)["total"]
        for half, gather in zip(halves, gathers, strict=True)
    ]
    together = hivlp_losses(model, batch, settings)["total"]
    mean = torch.stack(apart).mean()
    torch.testing.assert_close(mean, together)
    weights = [p for p in model.dual.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(together, weights, allow_unused=True)
    found = torch.autograd.grad(mean, weights, allow_unused=True)
    for one, two in zip(found, wanted, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two)


def test_scores_stay_in_full_precision_under_autocast(tmp_path: Path, batch: Batch) -> None:
    model = make_tiny(tmp_path).float()
    single = replace(batch, pixel_values=batch.pixel_values.float())
    with torch.autocast("cpu", torch.bfloat16):
        losses = hivlp_losses(model, single, LossSettings())
    assert all(loss.dtype == torch.float32 for loss in losses.values())
    wanted = hivlp_losses(model, single, RETRIEVAL_ONLY)
    for name, loss in wanted.items():
        if name != "total":
            assert losses[name].item() == pytest.approx(loss.item(), rel=0.2)


def test_a_batch_goes_to_another_device_whole() -> None:
    moved = make_batch().to("meta")
    assert all(getattr(moved, name).is_meta for name in Batch.__dataclass_fields__)
    bare = replace(make_batch(), mlm_ids=None, mlm_labels=None).to("meta")
    assert bare.mlm_ids is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mlm": -1.0}, r"mlm: -1\.0 is not 0 or more"),
        ({"early": math.nan}, "early: nan is not 0 or more"),
        ({"score_weight": math.inf}, "score_weight: inf is not 0 or more"),
        ({"reduction": "max"}, "reduction: 'max' is none of sum, mean"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(changes: Any, told: str) -> None:
    with pytest.raises(TrainingError, match=told):
        LossSettings(**changes)


def test_a_batch_without_hidden_words_or_nothing_to_train_is_told(
    tmp_path: Path, batch: Batch
) -> None:
    model = make_tiny(tmp_path)
    with pytest.raises(TrainingError, match="mlm_ids, mlm_labels"):
        hivlp_losses(model, replace(batch, mlm_ids=None), LossSettings())
    nothing = LossSettings(retrieval=0, mlm=0, matching=0, early=0, distillation=0)
    with pytest.raises(TrainingError, match="nothing left to train"):
        hivlp_losses(model, batch, nothing)
