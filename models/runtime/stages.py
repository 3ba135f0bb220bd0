"""One stage of one tower: an onnxruntime session held to what the manifest says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hivlp.models.artifact import EMBEDDING_NAME, Artifact, StageRecord, TowerRecord
from hivlp.models.errors import ArtifactCorrupt, ArtifactError
from hivlp.models.levels import EarlyOutput, FloatArray, check_levels
from hivlp.models.runtime.providers import Device, choose_providers, open_session

Tensors = Mapping[str, npt.NDArray[np.generic]]

_TOWER_INPUTS = {
    "text": frozenset({"input_ids", "attention_mask"}),
    "image": frozenset({"pixel_values"}),
}


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage answers, and the tensors that the stage after it can read."""

    output: EarlyOutput
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class Stage:
    """A loaded stage. Safe to run from several threads at once."""

    artifact: Artifact
    record: StageRecord
    session: Any  # an onnxruntime.InferenceSession, which has no types

    def run(self, tensors: Tensors) -> StageOutput:
        """Feed by name, and answer the level: (n, dim) float32, all finite.

        Raises ArtifactError naming the level where a graph gives NaN or infinity.
        """
        embedding, *states = self._fetch(tensors, (EMBEDDING_NAME, *self.record.states))
        vectors: FloatArray = np.ascontiguousarray(embedding, dtype=np.float32)
        self._check_finite(vectors)
        kept = {**tensors, **dict(zip(self.record.states, states, strict=True))}
        return StageOutput(EarlyOutput(self.record.level, vectors), kept)

    def run_states(self, tensors: Tensors) -> Tensors:
        """Only what the stage after it reads; the level's own vectors stay where they are."""
        states = self._fetch(tensors, self.record.states)
        return {**tensors, **dict(zip(self.record.states, states, strict=True))}

    def _fetch(self, tensors: Tensors, names: tuple[str, ...]) -> list[npt.NDArray[np.generic]]:
        feed = {name: tensors[name] for name in self.record.inputs}
        fetched: list[npt.NDArray[np.generic]] = self.session.run(list(names), feed)
        return fetched

    def _check_finite(self, vectors: FloatArray) -> None:
        finite = np.isfinite(vectors).all(axis=1)
        if not finite.all():
            raise ArtifactError(
                self.artifact.path,
                f"{self.record.file}: level {self.record.level} is not finite for "
                f"{np.count_nonzero(~finite)} of {len(vectors)} items",
            )


def load_stages(
    artifact: Artifact, tower: TowerRecord, *, threads: int, device: Device
) -> tuple[Stage, ...]:
    """Open every stage of a tower and check it against the manifest.

    Raises ArtifactError naming the file that can't be loaded or is not what the manifest says.
    """
    try:
        check_levels(tower.levels)
    except ValueError as error:
        raise ArtifactError(artifact.path, f"{tower.modality} tower: {error}") from error
    providers = choose_providers(device)
    reachable: frozenset[str] = _TOWER_INPUTS[tower.modality]
    stages = []
    for record in tower.stages:
        check_listed(artifact, record.file)
        session = open_session(artifact.path, record.file, threads=threads, providers=providers)
        _check_names(artifact, record, session, reachable)
        _check_embedding(artifact, record, session)
        stages.append(Stage(artifact, record, session))
        reachable |= set(record.states)
    return tuple(stages)


def check_listed(artifact: Artifact, file: str) -> None:
    """Refuse a file that the manifest uses but doesn't vouch for. Raises ArtifactCorrupt."""
    if file not in artifact.manifest.files:
        raise ArtifactCorrupt(artifact.path, f"{file}: used, but not listed under files")


def _check_names(
    artifact: Artifact, record: StageRecord, session: Any, reachable: frozenset[str]
) -> None:
    """The graph's names are the manifest's, and everything it reads exists by then."""
    expected = {"inputs": set(record.inputs), "outputs": {EMBEDDING_NAME, *record.states}}
    found = {
        "inputs": {value.name for value in session.get_inputs()},
        "outputs": {value.name for value in session.get_outputs()},
    }
    for kind, names in expected.items():
        if found[kind] != names:
            raise ArtifactError(
                artifact.path,
                f"{record.file}: {kind} are {sorted(found[kind])}, the manifest says "
                f"{sorted(names)}",
            )
    if missing := set(record.inputs) - reachable:
        raise ArtifactError(
            artifact.path, f"{record.file}: no earlier stage gives {sorted(missing)}"
        )


def _check_embedding(artifact: Artifact, record: StageRecord, session: Any) -> None:
    embedding = next(v for v in session.get_outputs() if v.name == EMBEDDING_NAME)
    shape = embedding.shape
    # A dimension that the graph leaves open is a string or None; the warm-up then measures it.
    sized = len(shape) == 2 and (not isinstance(shape[1], int) or shape[1] == record.dim)
    if embedding.type != "tensor(float)" or not sized:
        raise ArtifactError(
            artifact.path,
            f"{record.file}: embedding is {embedding.type} {shape}, the manifest says "
            f"tensor(float) of dim {record.dim}",
        )
