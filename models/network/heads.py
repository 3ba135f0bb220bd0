"""The early output head: features of one exit to one embedding.

Two kinds. `ExitHead`, for exits fitted on a tower that is there already, is a straight line plus a
bend: a linear map that can be set in closed form, and an MLP that starts at zero and learns what
the line misses. Before both, features are centred, scaled and, where there are many, cut to their
main directions; these three are measured once and never trained. `MlpHead`, for towers that are
trained together with their exits, is the paper's: an MLP and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head: features in, directions kept, embedding out; the MLP's width and layers.

    `hidden` = 0 leaves the MLP out. `dropout` is a share, applied in training only.
    """

    features: int
    kept: int
    dim: int
    hidden: int = 768
    layers: int = 1
    dropout: float = 0.0

    def as_dict(self) -> dict[str, int | float]:
        """For a checkpoint."""
        return asdict(self)


class Head(nn.Module, ABC):
    """(n, features) to (n, dim), not yet normalised: see `embed`."""

    @property
    @abstractmethod
    def features(self) -> int:
        """How many numbers of an exit it reads."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """How many numbers its embedding has."""

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """(n, features) float32 in, (n, dim) float32 out, of any length."""

    def embed(self, features: Tensor) -> Tensor:
        """(n, features) in, (n, dim) out, L2-normalised."""
        return F.normalize(self(features), dim=1)

    def folded(self) -> Head:
        """The same function from fewer numbers, for inference; itself where there are none."""
        return self


class MlpHead(Head):
    """Linear, GELU, LayerNorm, linear; without `hidden`, one linear map.

    HiVLP says "a MLP projection named Early Output Layer" and no more; this form, with `hidden`
    twice the width, is that of LightningDOT, the model it is compared with.
    """

    def __init__(self, features: int, dim: int, hidden: int) -> None:
        super().__init__()
        self._features, self._dim = features, dim
        if hidden:
            steps = [nn.Linear(features, hidden), nn.GELU(), nn.LayerNorm(hidden, eps=1e-12)]
            self.steps = nn.Sequential(*steps, nn.Linear(hidden, dim))
        else:
            self.steps = nn.Sequential(nn.Linear(features, dim))

    @property
    def features(self) -> int:
        """How many numbers of an exit it reads."""
        return self._features

    @property
    def dim(self) -> int:
        """How many numbers its embedding has."""
        return self._dim

    def forward(self, features: Tensor) -> Tensor:
        """(n, features) float32 in, (n, dim) float32 out, of any length."""
        answer: Tensor = self.steps(features)
        return answer


class ExitHead(Head):
    """A fixed map that was measured, then a line plus a bend."""

    shift: Tensor
    basis: Tensor | None

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("shift", torch.zeros(shape.features))
        self.register_buffer("basis", torch.eye(shape.features, shape.kept))
        self.drop = nn.Dropout(shape.dropout)
        self.line = nn.Linear(shape.kept, shape.dim)
        self.bend = _mlp(shape) if shape.hidden else None

    @property
    def features(self) -> int:
        """How many numbers of an exit it reads."""
        return self.shape.features

    @property
    def dim(self) -> int:
        """How many numbers its embedding has."""
        return self.shape.dim

    def set_basis(self, basis: Tensor) -> None:
        """Copy in (features, kept) float32."""
        assert self.basis is not None, "a folded head has none"
        self.basis.copy_(basis)

    def forward(self, features: Tensor) -> Tensor:
        """(n, features) float32 in, (n, dim) float32 out, of any length."""
        return self.answer(self.reduce(features))

    def reduce(self, features: Tensor) -> Tensor:
        """The fixed part: centred, scaled and cut, (n, kept)."""
        centred = features - self.shift
        return centred if self.basis is None else centred @ self.basis

    def answer(self, reduced: Tensor) -> Tensor:
        """The trained part, on what `reduce` gave: (n, kept) in, (n, dim) out."""
        straight: Tensor = self.line(self.drop(reduced))
        return straight if self.bend is None else straight + self.bend(reduced)

    def folded(self) -> ExitHead:
        """The same function, the basis multiplied into the layers that read it.

        For inference: one query alone spends its time reading weights, and the basis is among the
        largest. This head itself where that would leave more numbers to read, not fewer.
        """
        after = self.shape.dim + self.shape.hidden
        wide, kept = self.shape.features, self.shape.kept
        if self.basis is None or wide * after > wide * kept + kept * after:
            return self
        new = ExitHead(replace(self.shape, kept=wide))
        state = dict(self.state_dict())
        basis = state.pop("basis").double()
        for name in ("line.weight", "bend.1.weight"):
            if name in state:
                state[name] = (state[name].double() @ basis.T).float()
        new.basis = None
        new.load_state_dict(state)
        return new.eval()


def _mlp(shape: HeadShape) -> nn.Sequential:
    steps: list[nn.Module] = []
    inner = shape.kept
    for _ in range(shape.layers):
        steps += [nn.Dropout(shape.dropout), nn.Linear(inner, shape.hidden), nn.GELU()]
        inner = shape.hidden
    last = nn.Linear(inner, shape.dim)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*steps, nn.Dropout(shape.dropout), last)
