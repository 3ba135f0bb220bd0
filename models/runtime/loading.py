"""An artifact's folder to encoders that are checked, warm and ready to serve."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from hivlp.models.artifact import Artifact
from hivlp.models.encoder import Encoder, RgbImage
from hivlp.models.errors import ArtifactError
from hivlp.models.runtime.onnx_encoder import open_image_encoder, open_text_encoder
from hivlp.models.runtime.onnx_reranker import OnnxReranker
from hivlp.models.runtime.providers import Device, check_distributions


@dataclass(frozen=True, slots=True)
class Encoders:
    """The towers of one artifact; None where it has no such tower."""

    artifact: Artifact
    text: Encoder[str] | None
    image: Encoder[RgbImage] | None


def load_encoders(
    path: Path,
    *,
    threads: int = 1,
    ahead: Executor | None = None,
    device: Device = "cpu",
) -> Encoders:
    """Verify the artifact in `path`, open its towers and run each once.

    `threads` are those of one stage's run; `ahead` computes the next stage while a level is
    searched. Raises ArtifactError or ArtifactCorrupt naming the file or the level, MissingExtra,
    and ConflictingDistributions.
    """
    check_distributions()
    artifact = Artifact.open(path)
    _check_towers(artifact)
    text = image = None
    if artifact.manifest.tower("text") is not None:
        text = open_text_encoder(artifact, threads=threads, ahead=ahead, device=device)
        text.warm_up()
    if artifact.manifest.tower("image") is not None:
        image = open_image_encoder(artifact, threads=threads, ahead=ahead, device=device)
        image.warm_up()
    return Encoders(artifact, text, image)


def load_reranker(
    source: Path | Artifact, *, threads: int = 1, device: Device = "auto"
) -> OnnxReranker | None:
    """Open an artifact's re-ranker and run it once; None where it has none.

    `source` is verified, unless it is an artifact that is open already. "auto" runs on the GPU
    where there is one. Raises ArtifactError or ArtifactCorrupt naming the file, MissingExtra, and
    ConflictingDistributions.
    """
    check_distributions()
    artifact = source if isinstance(source, Artifact) else Artifact.open(source)
    if artifact.manifest.reranker is None:
        return None
    reranker = OnnxReranker(artifact, threads=threads, device=device)
    reranker.warm_up()
    return reranker


def _check_towers(artifact: Artifact) -> None:
    """One tower per modality, and the same levels and dims in each; layers may differ."""
    towers = artifact.manifest.towers
    if len({tower.modality for tower in towers}) != len(towers):
        raise ArtifactError(artifact.path, "two towers of one modality")
    shapes = {tower.modality: [(spec.level, spec.dim) for spec in tower.levels] for tower in towers}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        found = ", ".join(f"{modality} {shape}" for modality, shape in shapes.items())
        raise ArtifactError(artifact.path, f"the towers' (level, dim) differ: {found}")
