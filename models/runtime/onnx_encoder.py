"""An encoder that answers early: one onnxruntime session per stage, coarse levels first.

While the consumer searches with level l, level l+1 is computed in `ahead`, one stage at most. Where
`ahead` has no thread free the consumer computes the stage itself, so a full pool never blocks it,
not even when the consumer runs in that very pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

import numpy as np

from hivlp.models.artifact import Artifact, TowerRecord
from hivlp.models.encoder import EncoderBatch, RgbImage
from hivlp.models.errors import ArtifactError
from hivlp.models.levels import EarlyOutput, GalleryKind, LevelSpec, Modality
from hivlp.models.runtime.preprocess import preprocess
from hivlp.models.runtime.providers import Device
from hivlp.models.runtime.stages import Stage, StageOutput, Tensors, check_listed, load_stages
from hivlp.models.runtime.texts import Tokenizer

Item = TypeVar("Item")

_NORM_TOLERANCE = 1e-3


class OnnxEncoder(Generic[Item]):
    """One tower of an artifact; implements `hivlp.models.encoder.Encoder`.

    Made by `open_text_encoder` and `open_image_encoder`. Safe to call from several threads at once.
    """

    def __init__(
        self,
        artifact: Artifact,
        tower: TowerRecord,
        *,
        prepare: Callable[[Sequence[Item]], EncoderBatch],
        sample: Item,
        threads: int = 1,
        ahead: Executor | None = None,
        device: Device = "cpu",
    ) -> None:
        self._artifact = artifact
        self._tower = tower
        self._prepare = prepare
        self._sample = sample
        self._ahead = ahead
        self._stages = load_stages(artifact, tower, threads=threads, device=device)

    @property
    def modality(self) -> Modality:
        """What this tower encodes."""
        return self._tower.modality

    @property
    def levels(self) -> tuple[LevelSpec, ...]:
        """The early outputs, coarse first."""
        return self._tower.levels

    @property
    def gallery(self) -> GalleryKind:
        """How `encode_gallery` vectors are cut into levels."""
        return self._artifact.manifest.gallery

    @property
    def gallery_space(self) -> str:
        """Hash of the space that the outputs aim at."""
        return self._artifact.manifest.gallery_space

    @property
    def query_encoder(self) -> str:
        """Hash of exits and precision."""
        return self._artifact.manifest.query_encoder

    def prepare(self, items: Sequence[Item]) -> EncoderBatch:
        """Tokenise texts, or resize and scale pictures. Raises InputError naming the item."""
        return self._prepare(items)

    def encode(self, batch: EncoderBatch) -> Iterator[EarlyOutput]:
        """Yield one EarlyOutput per level, coarse first, as queries.

        Each stage runs when its level is asked for, or one ahead of that; closing the iterator
        drops what runs ahead. Raises ArtifactError where a level is not finite.
        """
        if batch.size == 0:
            return self._nothing()
        if self._ahead is None:
            return self._in_sequence(batch.inputs)
        return self._running_ahead(batch.inputs, self._ahead)

    def encode_gallery(self, batch: EncoderBatch) -> tuple[EarlyOutput, ...]:
        """Vectors for a gallery: the finest level alone when nested, every level when per_exit.

        The caller chooses the size of the batch, and so the memory used.
        """
        if self.gallery == "per_exit":
            every = self._nothing() if batch.size == 0 else self._in_sequence(batch.inputs)
            return tuple(every)
        if batch.size == 0:
            return (list(self._nothing())[-1],)
        tensors: Tensors = batch.inputs
        for stage in self._stages[:-1]:
            tensors = stage.run_states(tensors)
        return (self._stages[-1].run(tensors).output,)

    def warm_up(self) -> None:
        """Run every stage once, so that the first request isn't slow, and check what comes out.

        Raises ArtifactError naming the level whose vectors have another dim or aren't normalised.
        """
        for spec, output in zip(
            self.levels, self.encode(self.prepare([self._sample])), strict=True
        ):
            if output.vectors.shape != (1, spec.dim):
                problem = f"has shape {output.vectors.shape}, not (1, {spec.dim})"
            elif abs(float(np.linalg.norm(output.vectors)) - 1.0) > _NORM_TOLERANCE:
                problem = f"has length {np.linalg.norm(output.vectors):.4f}, not 1"
            else:
                continue
            raise ArtifactError(
                self._artifact.path, f"{self.modality} tower: level {spec.level} {problem}"
            )

    def _nothing(self) -> Iterator[EarlyOutput]:
        for spec in self.levels:
            yield EarlyOutput(spec.level, np.zeros((0, spec.dim), dtype=np.float32))

    def _in_sequence(self, tensors: Tensors) -> Iterator[EarlyOutput]:
        for stage in self._stages:
            answer = stage.run(tensors)
            tensors = answer.tensors
            yield answer.output

    def _running_ahead(self, tensors: Tensors, ahead: Executor) -> Iterator[EarlyOutput]:
        answer = self._stages[0].run(tensors)
        for stage in self._stages[1:]:
            pending = ahead.submit(stage.run, answer.tensors)
            try:
                yield answer.output
                answer = _finish(pending, stage, answer.tensors)
            finally:
                # Not yet begun: it never will be. Begun: it ends by itself and is forgotten.
                pending.cancel()
        yield answer.output


def _finish(pending: Future[StageOutput], stage: Stage, tensors: Tensors) -> StageOutput:
    """The stage's answer, computed here where no thread has begun it."""
    if pending.cancel():
        return stage.run(tensors)
    return pending.result()


def open_text_encoder(
    artifact: Artifact,
    *,
    threads: int = 1,
    ahead: Executor | None = None,
    device: Device = "cpu",
) -> OnnxEncoder[str]:
    """The text tower of an opened artifact. Raises ArtifactError where there is none."""
    tower = artifact.manifest.tower("text")
    if tower is None or tower.text is None:
        raise ArtifactError(artifact.path, "no text tower with a text preparation")
    check_listed(artifact, tower.text.tokenizer_file)
    tokenizer = Tokenizer(artifact.path, tower.text)
    return OnnxEncoder(
        artifact,
        tower,
        prepare=tokenizer.encode,
        sample="a picture",
        threads=threads,
        ahead=ahead,
        device=device,
    )


def open_image_encoder(
    artifact: Artifact,
    *,
    threads: int = 1,
    ahead: Executor | None = None,
    device: Device = "cpu",
) -> OnnxEncoder[RgbImage]:
    """The image tower of an opened artifact. Raises ArtifactError where there is none."""
    tower = artifact.manifest.tower("image")
    if tower is None or tower.image is None:
        raise ArtifactError(artifact.path, "no image tower with an image preparation")
    spec = tower.image

    def prepare(images: Sequence[RgbImage]) -> EncoderBatch:
        return EncoderBatch(
            inputs={"pixel_values": preprocess(images, spec)},
            size=len(images),
            truncated=(False,) * len(images),
        )

    return OnnxEncoder(
        artifact,
        tower,
        prepare=prepare,
        sample=np.full((32, 32, 3), 127, dtype=np.uint8),
        threads=threads,
        ahead=ahead,
        device=device,
    )
