"""A re-ranker of three onnxruntime sessions: texts' states, pictures' states, and pairs.

    reranker = load_reranker(artifact.path)
    reranker.score("a red heart", pictures, searched="image")

All candidates of a query are one run of the pairs' graph, up to MOST_PAIRS. The query's own states
are computed once; making a text's costs next to nothing beside the pairs (docs/operations.md), so
nothing is handed over from the towers' stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from hivlp.models.artifact import Artifact, ImagePreparation, fingerprint
from hivlp.models.encoder import RgbImage
from hivlp.models.errors import ArtifactError, DeadlinePassed
from hivlp.models.levels import FloatArray, Modality
from hivlp.models.reranker import StatesArray, TextStates
from hivlp.models.runtime.preprocess import preprocess
from hivlp.models.runtime.providers import Device, choose_providers, open_session, run_until
from hivlp.models.runtime.stages import check_listed
from hivlp.models.runtime.texts import Tokenizer

MOST_PAIRS = 64
"""Pairs in one run; more are several runs."""
MOST_PICTURES = 32

TEXT_STATES, IMAGE_STATES, PROBABILITY = "text_states", "image_states", "probability"
TEXT_INPUTS = ("input_ids", "attention_mask")
IMAGE_INPUTS = ("pixel_values",)
CROSS_INPUTS = (TEXT_STATES, "attention_mask", IMAGE_STATES)


class OnnxReranker:
    """The cross-modal encoder of an artifact; implements `hivlp.models.reranker.Reranker`."""

    def __init__(
        self,
        artifact: Artifact,
        *,
        threads: int = 1,
        device: Device = "auto",
    ) -> None:
        """`threads` are those of one run. Raises ArtifactError naming what is missing or broken."""
        record = artifact.manifest.reranker
        text, image = artifact.manifest.tower("text"), artifact.manifest.tower("image")
        if record is None:
            raise ArtifactError(artifact.path, "has no re-ranker")
        if text is None or text.text is None or image is None or image.image is None:
            raise ArtifactError(artifact.path, "a re-ranker needs a text and an image tower")
        self._artifact = artifact
        self._record = record
        check_listed(artifact, text.text.tokenizer_file)
        self._tokenizer = Tokenizer(artifact.path, text.text)
        self._preparation: ImagePreparation = image.image
        self._texts = self._session(record.text_states, TEXT_INPUTS, TEXT_STATES, threads, device)
        self._images = self._session(
            record.image_states, IMAGE_INPUTS, IMAGE_STATES, threads, device
        )
        self._cross = self._session(record.cross, CROSS_INPUTS, PROBABILITY, threads, device)

    @property
    def fits(self) -> str:
        """The gallery_space of its artifact."""
        return self._artifact.manifest.gallery_space

    @property
    def identity(self) -> str:
        """Hash of its graphs, and of how texts and pictures are prepared."""
        files, record = self._artifact.manifest.files, self._record
        used = (record.text_states, record.image_states, record.cross)
        return fingerprint(
            {
                "space": self.fits,
                "preparation": self._preparation.model_dump_json(),
                **{name: files[name].sha256 for name in used},
            }
        )

    @property
    def states_space(self) -> str:
        """What states of pictures belong to."""
        return self._record.states_space

    @property
    def image_shape(self) -> tuple[int, int]:
        """Tokens and width of one picture's states: (m, d)."""
        return self._record.image_tokens, self._record.image_width

    def text_states(self, texts: Sequence[str], *, until: float | None = None) -> TextStates:
        """States of texts. Raises TextError, ArtifactError, DeadlinePassed."""
        batch = self._tokenizer.encode(texts)
        mask = cast("np.ndarray[Any, np.dtype[np.int64]]", batch.inputs["attention_mask"])
        if not texts:
            return TextStates(np.zeros((0, 1, self._record.text_width), np.float32), mask)
        feed = {value.name: batch.inputs[value.name] for value in self._texts.get_inputs()}
        return TextStates(self._run(self._texts, TEXT_STATES, feed, until), mask)

    def image_states(self, images: Sequence[RgbImage], *, until: float | None = None) -> FloatArray:
        """(n, m, d) float32 states. Raises ImageError, ArtifactError, DeadlinePassed."""
        if not images:
            return np.zeros((0, *self.image_shape), np.float32)
        parts = []
        for start in range(0, len(images), MOST_PICTURES):
            pixels = preprocess(images[start : start + MOST_PICTURES], self._preparation)
            parts.append(self.prepared_states(pixels, until=until))
        return np.concatenate(parts)

    def prepared_states(self, pixels: FloatArray, *, until: float | None = None) -> FloatArray:
        """(n, m, d) float32 states of pictures that were prepared as for the image tower."""
        return self._run(self._images, IMAGE_STATES, {"pixel_values": pixels}, until)

    def match(
        self, texts: TextStates, images: StatesArray, *, until: float | None = None
    ) -> FloatArray:
        """(n,) float32 match probabilities of n pairs; a single text or picture stands for all.

        Raises ArtifactError where the graph fails or answers NaN, DeadlinePassed.
        """
        count = max(len(texts), len(images)) if len(texts) and len(images) else 0
        assert all(len(side) in (1, count) for side in (texts, images)) or not count
        found = np.empty(count, np.float32)
        for start in range(0, count, MOST_PAIRS):
            part = slice(start, min(count, start + MOST_PAIRS))
            feed = {
                TEXT_STATES: _spread(texts.states, part),
                "attention_mask": _spread(texts.mask, part),
                IMAGE_STATES: _spread(images, part).astype(np.float32, copy=False),
            }
            found[part] = self._run(self._cross, PROBABILITY, feed, until)
        if not (np.isfinite(found).all() and (found >= 0).all() and (found <= 1).all()):
            reason = f"{self._record.cross}: an answer is no probability"
            raise ArtifactError(self._artifact.path, reason)
        return found

    def score(
        self,
        query: str | RgbImage,
        candidates: Sequence[str] | Sequence[RgbImage],
        *,
        searched: Modality,
        until: float | None = None,
    ) -> FloatArray:
        """(n,) float32 match probabilities in [0, 1], one per candidate, in the order given."""
        if isinstance(query, str):
            assert searched == "image", "a text is matched with pictures"
            pictures = cast("Sequence[RgbImage]", candidates)
            texts, images = [query], pictures
        else:
            assert searched == "text", "a picture is matched with texts"
            texts, images = list(cast("Sequence[str]", candidates)), [query]
        states = self.image_states(images, until=until)
        return self.match(self.text_states(texts, until=until), states, until=until)

    def warm_up(self) -> None:
        """Run all three graphs once, and check what comes out against the manifest.

        Raises ArtifactError naming the file whose answer has another shape.
        """
        record = self._record
        texts = self.text_states(["a picture"])
        images = self.image_states([np.full((32, 32, 3), 127, np.uint8)])
        wanted = (*texts.mask.shape, record.text_width)
        self._check_shape(record.text_states, texts.states, wanted)
        self._check_shape(record.image_states, images, (1, *self.image_shape))
        self.match(texts, images)

    def _run(
        self, session: Any, output: str, feed: Mapping[str, Any], until: float | None
    ) -> FloatArray:
        """One run of a graph with one output. Raises ArtifactError, DeadlinePassed."""
        try:
            (found,) = run_until(session, [output], feed, until)
        except DeadlinePassed:
            raise
        except Exception as error:  # onnxruntime's errors share no base below Exception
            reason = f"the graph of {output} failed: {error}"
            raise ArtifactError(self._artifact.path, reason) from error
        return np.asarray(found, np.float32)

    def _session(
        self, file: str, inputs: tuple[str, ...], output: str, threads: int, device: Device
    ) -> Any:
        check_listed(self._artifact, file)
        providers = choose_providers(device)
        folder = self._artifact.path
        session = open_session(folder, file, threads=threads, providers=providers)
        found = {v.name for v in session.get_inputs()}, {v.name for v in session.get_outputs()}
        # A text tower that attends to its padding has no use for the mask.
        if not found[0] <= set(inputs) or not found[0] or found[1] != {output}:
            raise ArtifactError(
                folder,
                f"{file}: reads {sorted(found[0])} and answers {sorted(found[1])}, "
                f"not {sorted(inputs)} and {output}",
            )
        return session

    def _check_shape(self, file: str, states: FloatArray, wanted: tuple[int, ...]) -> None:
        if states.shape != wanted or not np.isfinite(states).all():
            reason = f"{file}: answers {states.shape}, finite: {np.isfinite(states).all()}"
            raise ArtifactError(self._artifact.path, f"{reason}; the manifest says {wanted}")


def _spread(values: Any, part: slice) -> Any:
    """Rows of a part of the pairs; a single row is repeated, without being copied."""
    if len(values) > 1:
        return values[part]
    return np.broadcast_to(values, (part.stop - part.start, *values.shape[1:]))
