"""The exported model folder: one ONNX graph per tower and stage, and a manifest that says it all.

    manifest.json             this module's ArtifactManifest
    text/stage1.onnx ...      stage l reads what stage l-1 left, and answers level l
    text/tokenizer.json
    image/stage1.onnx ...
    rerank/text_states.onnx image_states.onnx cross.onnx   where there is a re-ranker

A stage graph's inputs are any of the tower's own inputs (`input_ids`, `attention_mask`,
`pixel_values`) and the states of the stage before, matched by name; its outputs are `embedding`
((n, dim) float32, L2-normalised in the graph) and the states the next stage wants. Nothing here
needs onnxruntime: see `hivlp.models.runtime` for what runs it.

Notable: a manifest's `seal` is the sha256 of its file's bytes with the seal's 64 digits replaced by
zeros, so a changed byte in the manifest is found like one in any other file. Snapshots do the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hivlp.models.errors import ArtifactCorrupt, ArtifactError
from hivlp.models.levels import GalleryKind, LevelSpec, Modality
from hivlp.models.stopping import go_on

FORMAT_VERSION = 1
Precision = Literal["fp32", "w8-heads"]
"""`w8-heads`: the text tower's early heads have 8-bit weights, everything else is fp32."""
MANIFEST_NAME = "manifest.json"
EMBEDDING_NAME = "embedding"
UNSEALED = "0" * 64
_SEAL = re.compile(rb'"seal": "([0-9a-f]{64})"')


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Part):
    """Size and content hash of one file of the folder."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0)


class StageRecord(_Part):
    """One graph: the level it answers, where it is read, and the names of its tensors."""

    level: int = Field(ge=1)
    exit_layer: int = Field(ge=1)
    dim: int = Field(ge=1)
    file: str
    inputs: tuple[str, ...]
    states: tuple[str, ...] = ()


class TextPreparation(_Part):
    """How a text becomes `input_ids` and `attention_mask` (both (n, t) int64)."""

    tokenizer_file: str
    max_tokens: int = Field(ge=2)
    pad_id: int = Field(ge=0)
    # SigLIP was trained attending to padding to a fixed length; everyone else masks it.
    pad_to_max: bool = False


class ImagePreparation(_Part):
    """How an RGB picture becomes `pixel_values` ((n, 3, height, width) float32).

    `fit` = `stretch` resizes both sides; `crop` resizes the short side and cuts the centre; `pad`
    resizes the long side and centres on `background`. Then (x / 255 - mean) / std per channel.
    """

    version: Literal[1] = 1
    height: int = Field(ge=1)
    width: int = Field(ge=1)
    fit: Literal["stretch", "crop", "pad"]
    # `crop` first resizes the short side to size / crop_ratio (timm's crop_pct), `stretch` both
    # sides; then the centre is cut.
    crop_ratio: float = Field(default=1.0, gt=0, le=1)
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    background: tuple[int, int, int] = (255, 255, 255)
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class TowerRecord(_Part):
    """One tower: its family, its stages, coarse first, and how its input is prepared.

    A gallery vector is the last stage's output when the gallery is nested, and every stage's own
    output when it is per_exit.
    """

    modality: Modality
    family: str
    pooling: str
    stages: tuple[StageRecord, ...] = Field(min_length=1)
    text: TextPreparation | None = None
    image: ImagePreparation | None = None

    @property
    def levels(self) -> tuple[LevelSpec, ...]:
        """The early outputs, coarse first."""
        return tuple(LevelSpec(s.level, s.exit_layer, s.dim) for s in self.stages)


class RerankerRecord(_Part):
    """A cross-modal encoder as three graphs, which read nothing of the towers' stages.

    `text_states` makes (n, t, d) of `input_ids` and `attention_mask`, `image_states` (n, m, d') of
    `pixel_values`: token states of each tower's full depth, prepared as for that tower. `cross`
    makes `probability` (n,) of `text_states`, `attention_mask` and `image_states`. States of one
    `states_space` are the same whichever artifact made them: an index may keep those of pictures.
    """

    layers: int = Field(ge=1)
    text_width: int = Field(ge=1)
    image_tokens: int = Field(ge=1)
    image_width: int = Field(ge=1)
    states_space: str = Field(pattern=r"^[0-9a-f]{64}$")
    text_states: str = "rerank/text_states.onnx"
    image_states: str = "rerank/image_states.onnx"
    cross: str = "rerank/cross.onnx"


class SourceRecord(_Part):
    """Where a part of the model came from, and what its licence asks for."""

    name: str
    licence: str
    url: str = ""
    attribution: str = ""


class ArtifactManifest(_Part):
    """Everything needed to run the model, and to tell whether it fits an index."""

    format_version: Literal[1] = 1
    seal: str = Field(default=UNSEALED, pattern=r"^[0-9a-f]{64}$")
    name: str
    created_at: str
    gallery: GalleryKind
    precision: Precision = "fp32"
    gallery_space: str = Field(pattern=r"^[0-9a-f]{64}$")
    query_encoder: str = Field(pattern=r"^[0-9a-f]{64}$")
    towers: tuple[TowerRecord, ...] = Field(min_length=1)
    # None also in artifacts from before there was one.
    reranker: RerankerRecord | None = None
    sources: tuple[SourceRecord, ...] = ()
    # What the fit measured of itself; shown by /info, never used to decide anything.
    measured: dict[str, float] = {}
    files: dict[str, FileRecord]

    def tower(self, modality: Modality) -> TowerRecord | None:
        """The tower of `modality`, or None where the artifact has none."""
        return next((t for t in self.towers if t.modality == modality), None)


def file_record(path: Path) -> FileRecord:
    """Hash and measure one file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
            go_on()
    return FileRecord(sha256=digest.hexdigest(), size_bytes=path.stat().st_size)


def fingerprint(parts: Mapping[str, str]) -> str:
    """One sha256 (64 hex digits) over named parts, whatever their order."""
    canonical = json.dumps(dict(parts), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Artifact:
    """An opened, verified model folder."""

    path: Path
    manifest: ArtifactManifest

    @staticmethod
    def open(path: Path) -> Artifact:
        """Read the manifest and check every file against it.

        Raises ArtifactError for a folder that is no artifact, ArtifactCorrupt naming the first file
        that is missing or differs.
        """
        manifest = read_manifest(path)
        for name, record in manifest.files.items():
            verify_file(path, name, record)
        return Artifact(path, manifest)


def read_manifest(path: Path) -> ArtifactManifest:
    """Read `path`/manifest.json, check its seal, and parse it. Raises ArtifactError."""
    try:
        data = (path / MANIFEST_NAME).read_bytes()
    except OSError as error:
        raise ArtifactError(path, f"no readable {MANIFEST_NAME}: {error.strerror}") from error
    if (trouble := broken_seal(data)) is not None:
        raise ArtifactCorrupt(path, f"{MANIFEST_NAME}: {trouble}")
    try:
        return ArtifactManifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(path, f"{MANIFEST_NAME}: {where}: {first['msg']}") from error


def verify_file(root: Path, name: str, record: FileRecord) -> None:
    """Check one file against its record. Raises ArtifactCorrupt naming it."""
    target = root / name
    if not target.resolve().is_relative_to(root.resolve()):
        raise ArtifactCorrupt(root, f"{name}: leaves the folder")
    if not target.is_file():
        raise ArtifactCorrupt(root, f"{name}: missing")
    found = file_record(target)
    if found != record:
        raise ArtifactCorrupt(
            root, f"{name}: sha256 {found.sha256[:12]}, the manifest says {record.sha256[:12]}"
        )


def write_manifest(folder: Path, manifest: ArtifactManifest) -> None:
    """Seal and write `folder`/manifest.json, indented, ending in a newline."""
    (folder / MANIFEST_NAME).write_bytes(sealed_json(manifest))


def sealed_json(manifest: BaseModel) -> bytes:
    """A manifest with a field `seal`, as the bytes of its file."""
    unsealed = manifest.model_copy(update={"seal": UNSEALED}).model_dump_json(indent=2) + "\n"
    seal = hashlib.sha256(unsealed.encode()).hexdigest()
    return unsealed.replace(f'"seal": "{UNSEALED}"', f'"seal": "{seal}"', 1).encode()


def broken_seal(data: bytes) -> str | None:
    """What is wrong with the seal of a manifest's bytes, or None."""
    found = _SEAL.search(data)
    if found is None:
        return "no seal"
    unsealed = data[: found.start(1)] + UNSEALED.encode() + data[found.end(1) :]
    same = hashlib.sha256(unsealed).hexdigest() == found.group(1).decode()
    return None if same else "differs from its own seal"
