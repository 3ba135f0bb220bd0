"""Synthetic galleries and queries for benchmarks: clustered, CLIP-like spectrum, made in chunks.

768-d rows from 2,000 clusters of 20 sub-clusters whose coordinates' variances fall as 1/i, so that
leading prefixes hold most of the energy, as in a trained nested gallery. A query lies at cosine 0.8
to its target row. Its early answers are the query's own prefixes plus independent noise of a stated
share of the norm: 0.12 and 0.08 is the kind setting, 0.25 and 0.20 the unkind one. With a gap, all
queries are shifted along one direction, as captions lie apart from pictures. Everything is a
function of the seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DIM, DIMS = 768, (128, 300, 768)
CLUSTERS, SUBCLUSTERS = 2000, 20
CHUNK = 50_000
KIND, UNKIND = (0.12, 0.08), (0.25, 0.20)
SETTINGS = {"kind": (KIND, 0.0), "unkind": (UNKIND, 0.0), "gap": (KIND, 0.5)}
"""Noise and gap of the three settings that benchmarks report."""


def _spread(rng: np.random.Generator, n: int, dim: int) -> np.ndarray:
    """(n, dim) float32 draws of unit expected norm, variances falling as 1/i."""
    scale = 1 / np.sqrt(np.arange(1, dim + 1))
    scale /= np.linalg.norm(scale)
    return rng.standard_normal((n, dim), dtype=np.float32) * scale.astype(np.float32)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def stream_rows(n: int, seed: int = 0) -> Iterator[np.ndarray]:
    """The n rows in blocks (m, 768) float32, normalised; a larger n begins alike."""
    rng = np.random.default_rng(seed)
    centres = _spread(rng, CLUSTERS, DIM)
    subs = 0.7 * _spread(rng, CLUSTERS * SUBCLUSTERS, DIM)
    for start in range(0, n, CHUNK):
        m = min(CHUNK, n - start)
        which = rng.integers(0, CLUSTERS * SUBCLUSTERS, m)
        yield _unit(centres[which // SUBCLUSTERS] + subs[which] + 0.6 * _spread(rng, m, DIM))


def make_rows(path: Path, n: int, seed: int = 0) -> np.ndarray:
    """(n, 768) float32 rows, normalised, memory-mapped from `path`; made if not there yet."""
    if path.exists():
        rows = np.load(path, mmap_mode="r")
        if rows.shape == (n, DIM):
            return rows
    part = path.with_suffix(".part")
    out = np.lib.format.open_memmap(part, "w+", np.float32, (n, DIM))
    start = 0
    for block in stream_rows(n, seed):
        out[start : start + len(block)] = block
        start += len(block)
    out.flush()
    part.replace(path)
    return np.load(path, mmap_mode="r")


@dataclass(frozen=True)
class Queries:
    """`levels[l]` is (n, DIMS[l]) float32, normalised: the early answers, the last one exact."""

    levels: tuple[np.ndarray, ...]
    targets: np.ndarray


def make_queries(
    rows: np.ndarray,
    n: int,
    *,
    noise: tuple[float, ...] = KIND,
    gap: float = 0.0,
    seed: int = 1,
    cosine: float = 0.8,
) -> Queries:
    """Queries near random rows. `gap` is the length of the common shift before normalising."""
    rng = np.random.default_rng(seed)
    targets = rng.choice(len(rows), n, replace=False)
    x = np.asarray(rows[np.sort(targets)])
    targets = np.sort(targets)
    other = _spread(rng, n, DIM)
    other -= (other * x).sum(1, keepdims=True) * x
    finest = cosine * x + np.sqrt(1 - cosine**2) * _unit(other)
    if gap:
        finest = finest + gap * _unit(_spread(rng, 1, DIM))
    finest = _unit(finest).astype(np.float32)
    levels = []
    for dim, share in zip(DIMS, noise, strict=False):
        prefix = _unit(finest[:, :dim])
        shake = _unit(rng.standard_normal((n, dim)).astype(np.float32))
        levels.append(_unit(prefix + share * shake).astype(np.float32))
    return Queries((*levels, finest), targets)
