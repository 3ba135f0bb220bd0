"""The model that a build or an evaluation runs: its towers, and the hashes that must agree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hivlp.index.errors import BuildError
from hivlp.models.encoder import Encoder, EncoderBatch, RgbImage
from hivlp.models.errors import SpaceMismatch
from hivlp.models.levels import FloatArray, GalleryKind, LevelSpec
from hivlp.models.reranker import Reranker
from hivlp.models.runtime.loading import load_encoders, load_reranker


@dataclass(frozen=True, slots=True)
class Model:
    """Towers of one artifact: `name` and `path` are recorded in what is built with them.

    `reranker` is loaded only where it is asked for.
    """

    name: str
    path: Path
    text: Encoder[str] | None
    image: Encoder[RgbImage] | None
    reranker: Reranker | None = None

    @staticmethod
    def load(path: Path, *, threads: int = 1, rerank: bool = False) -> Model:
        """Open an artifact; `rerank`: its re-ranker too, which it must have.

        Raises ArtifactError, MissingExtra, BuildError where there is no re-ranker.
        """
        loaded = load_encoders(path, threads=threads)
        name = loaded.artifact.manifest.name
        reranker = load_reranker(loaded.artifact, threads=threads) if rerank else None
        if rerank and reranker is None:
            raise BuildError(f"the model {name!r} has no re-ranker")
        return Model(name, path.resolve(), loaded.text, loaded.image, reranker)

    @property
    def towers(self) -> tuple[Encoder[str] | Encoder[RgbImage], ...]:
        """The towers there are, pictures first. Raises BuildError where there is none."""
        found = tuple(tower for tower in (self.image, self.text) if tower is not None)
        if not found:
            raise BuildError(f"the model {self.name!r} has no tower")
        return found

    @property
    def encodes(self) -> bool:
        """Whether it has towers at all: imported vectors are queries by themselves."""
        return self.text is not None or self.image is not None

    @property
    def levels(self) -> tuple[LevelSpec, ...]:
        """Levels of the gallery; the exit layers are those of the first tower."""
        return self.towers[0].levels

    @property
    def gallery(self) -> GalleryKind:
        """How gallery vectors are cut into levels."""
        return self.towers[0].gallery

    @property
    def gallery_space(self) -> str:
        """The space that gallery vectors lie in. Raises SpaceMismatch where towers differ."""
        spaces = [tower.gallery_space for tower in self.towers]
        if len(set(spaces)) > 1:
            raise SpaceMismatch(expected=spaces[0], received=spaces[1])
        return spaces[0]

    @property
    def query_encoder(self) -> str:
        """Hash of exits and precision."""
        return self.towers[0].query_encoder

    @property
    def gallery_dims(self) -> tuple[int, ...]:
        """Numbers per gallery vector: one when nested, one a level when per_exit."""
        dims = tuple(spec.dim for spec in self.levels)
        return dims[-1:] if self.gallery == "nested" else dims

    def check_fits(self, gallery_space: str) -> None:
        """Raises SpaceMismatch unless the model aims at `gallery_space`."""
        if self.gallery_space != gallery_space:
            raise SpaceMismatch(expected=gallery_space, received=self.gallery_space)


def query_outputs(
    encoder: Encoder[str] | Encoder[RgbImage], batch: EncoderBatch
) -> dict[int, FloatArray]:
    """Every early output of a batch: level -> (n, dim) float32."""
    return {output.level: output.vectors for output in encoder.encode(batch)}
