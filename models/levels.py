"""Levels: the early outputs of an encoder, and how the levels of a nested gallery are cut.

A level is numbered from 1 (coarsest) to L (finest). In a *nested* gallery one full-depth vector
serves all levels: level l is its first `dim` numbers, L2-normalised again. In a *per_exit* gallery
(the HiVLP paper's form) every level has vectors of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

Modality = Literal["image", "text"]
GalleryKind = Literal["nested", "per_exit"]
FloatArray = npt.NDArray[np.float32]

NORM_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class LevelSpec:
    """One early output: its number, the layer it is read after, and its dimension."""

    level: int
    exit_layer: int
    dim: int


@dataclass(frozen=True, slots=True)
class EarlyOutput:
    """Embeddings of one level: `vectors` is (n, dim) float32, L2-normalised, C-contiguous."""

    level: int
    vectors: FloatArray


def check_levels(levels: Sequence[LevelSpec]) -> tuple[LevelSpec, ...]:
    """Return `levels` as a tuple, or raise ValueError naming what is wrong with them.

    Levels count 1..L, and exits and dims grow from one to the next: a nested gallery needs growing
    prefixes, and an encoder can't answer later levels from earlier layers.
    """
    if not levels:
        raise ValueError("levels: at least one is needed")
    if [spec.level for spec in levels] != list(range(1, len(levels) + 1)):
        raise ValueError(f"levels: numbered 1..{len(levels)}, got {[s.level for s in levels]}")
    for name in ("exit_layer", "dim"):
        values = [getattr(spec, name) for spec in levels]
        if values[0] < 1 or any(b <= a for a, b in pairwise(values)):
            raise ValueError(f"levels: {name} must grow from level to level, got {values}")
    return tuple(levels)


def normalise(vectors: FloatArray) -> FloatArray:
    """L2-normalise rows: (n, d) float32 in, a new (n, d) float32 array out; zero rows stay zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.maximum(norms, NORM_EPSILON), dtype=np.float32)


def nested_prefix(vectors: FloatArray, dim: int) -> FloatArray:
    """The `dim`-dimensional level of nested vectors: (n, D) float32 in, (n, dim) normalised out."""
    if dim > vectors.shape[1]:
        raise ValueError(f"dim {dim} is larger than the vectors' {vectors.shape[1]}")
    return normalise(vectors[:, :dim])
