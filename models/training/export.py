"""A fitted model as an artifact: one ONNX graph per tower and stage, and a manifest.

Everything is written and checked in a temporary folder beside the target, which is then renamed to
take the target's place: an artifact that is there is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from hivlp.models.artifact import (
    EMBEDDING_NAME,
    MANIFEST_NAME,
    Artifact,
    ArtifactManifest,
    ImagePreparation,
    Precision,
    SourceRecord,
    StageRecord,
    TextPreparation,
    TowerRecord,
    file_record,
    fingerprint,
    write_manifest,
)
from hivlp.models.errors import TrainingError
from hivlp.models.network.cross_modal import CrossModalEncoder
from hivlp.models.network.dual_encoder import DualEncoder
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.weights import weights_hash
from hivlp.models.runtime.progress import Progress, say
from hivlp.models.training.export_reranker import (
    GRAPHS,
    check_fits,
    check_reranker,
    write_reranker,
)
from hivlp.models.training.graphs import write_graph
from hivlp.models.training.parity import check_parity
from hivlp.models.training.placing import check_place, place_folder
from hivlp.models.training.precision import PrecisionError, reduce_heads
from hivlp.models.training.stages import plan_stages


class ExportError(TrainingError):
    """Notes for an artifact that can't be used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ExportNote:
    """What the manifest says besides the model itself.

    `check_texts` are real queries that a low `precision` is checked with before it is written.
    """

    name: str
    sources: tuple[SourceRecord, ...] = ()
    measured: Mapping[str, float] | None = None
    precision: Precision = "fp32"
    check_texts: tuple[str, ...] = ()


def export_model(
    model: DualEncoder, target: Path, note: ExportNote, cross: CrossModalEncoder | None = None
) -> Artifact:
    """Write `model` to the folder `target`, and open it; `cross` becomes its re-ranker.

    Raises PlaceError, ParityError, RerankerParityError, TrainingError where `cross` doesn't fit
    the towers, or PrecisionError where a low precision wouldn't rank alike.
    """
    check_place(target, MANIFEST_NAME)
    if cross is not None:
        check_fits(model, cross)
    if note.precision != "fp32" and model.gallery == "per_exit":
        raise PrecisionError(
            "per_exit: the early heads make gallery vectors, which stay fp32; export with "
            "--precision fp32, or fit with --gallery nested"
        )

    def write(made: Path) -> None:
        _write(model, made, note, cross)
        Artifact.open(made)

    place_folder(target, MANIFEST_NAME, write)
    return Artifact.open(target)


def _write(
    model: DualEncoder, folder: Path, note: ExportNote, cross: CrossModalEncoder | None
) -> None:
    towers, reranker = (model.text, model.image), None
    count = sum(len(exits.exits) for exits in towers) + (GRAPHS if cross is not None else 0)
    with Progress("exporting", count, "graph") as progress:
        records = [_write_tower(exits, folder, progress) for exits in towers]
        if cross is not None:
            reranker = write_reranker(model, cross, folder, progress.step)
    worst = max(
        check_parity(exits, [folder / stage.file for stage in record.stages])
        for exits, record in zip(towers, records, strict=True)
    )
    if cross is not None and reranker is not None:
        worst = max(worst, check_reranker(model, cross, folder, reranker))
    say(f"parity with torch: at most {worst:.1e} apart")
    measured = dict(note.measured or {}) | _reduce(folder, records, note)
    space = gallery_space(model)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = ArtifactManifest(
        name=note.name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        gallery=model.gallery,
        precision=note.precision,
        gallery_space=space,
        query_encoder=query_encoder(model, space, note.precision),
        towers=tuple(records),
        reranker=reranker,
        sources=note.sources,
        measured=measured,
        files={path.relative_to(folder).as_posix(): file_record(path) for path in files},
    )
    write_manifest(folder, manifest)


def _reduce(folder: Path, records: Sequence[TowerRecord], note: ExportNote) -> dict[str, float]:
    """Lower the precision of what was written, as the note says; what its check measured."""
    if note.precision == "fp32":
        return {}
    text = next(record for record in records if record.modality == "text")
    checked = reduce_heads(folder, text, note.check_texts)
    kept = {f"overlap_with_fp32_level{level}": share for level, share in checked.overlap.items()}
    said = ", ".join(f"{share:.3f}" for share in kept.values())
    say(f"8-bit heads: share of fp32's best ten kept, by level: {said}")
    return {name: round(share, 4) for name, share in kept.items()}


def _write_tower(exits: TowerExits, folder: Path, progress: Progress) -> TowerRecord:
    tower = exits.tower
    (folder / tower.modality).mkdir(parents=True)
    stages = []
    for plan, level in zip(plan_stages(exits.folded()), exits.levels, strict=True):
        file = f"{tower.modality}/stage{level.level}.onnx"
        write_graph(plan.module, plan.arguments, plan.ports, folder / file)
        states = tuple(name for name in plan.ports.outputs if name != EMBEDDING_NAME)
        stages.append(
            StageRecord(
                level=level.level,
                exit_layer=level.exit_layer,
                dim=level.dim,
                file=file,
                inputs=plan.ports.inputs,
                states=states,
            )
        )
        progress.step()
    text, image = _preparations(exits, folder)
    return TowerRecord(
        modality=tower.modality,
        family=tower.family,
        pooling=tower.pooling,
        stages=tuple(stages),
        text=text,
        image=image,
    )


def _preparations(
    exits: TowerExits, folder: Path
) -> tuple[TextPreparation | None, ImagePreparation | None]:
    """The tower's preparation; a tokenizer is copied into the artifact."""
    spec = exits.tower.preparation
    if isinstance(spec, ImagePreparation):
        return None, spec
    source = next(p for p in exits.tower.sources if p.name == spec.tokenizer_file)
    file = f"{exits.tower.modality}/{spec.tokenizer_file}"
    shutil.copyfile(source, folder / file)
    return spec.model_copy(update={"tokenizer_file": file}), None


def gallery_space(model: DualEncoder) -> str:
    """Hash of what shapes a gallery vector: towers, preparation, projections, dims, and how cut."""
    parts = {"gallery": model.gallery, "normalised": "l2"}
    for exits in (model.text, model.image):
        modality = exits.tower.modality
        last = len(exits.exits) - 1
        shaping = range(last + 1) if model.gallery == "per_exit" else (last,)
        parts |= {f"{modality}/{n}": value for n, value in exits.tower.identity().items()}
        parts |= {
            f"{modality}/exit{exits.exits[i]}": weights_hash(exits.exit_heads[i]) for i in shaping
        }
        parts[f"{modality}/dims"] = str([level.dim for level in exits.levels])
    return fingerprint(parts)


def query_encoder(model: DualEncoder, space: str, precision: Precision = "fp32") -> str:
    """Hash of exits, their heads and precision, and of the space that they aim at."""
    parts: dict[str, str] = {"gallery_space": space, "precision": precision}
    for exits in (model.text, model.image):
        parts[f"{exits.tower.modality}/exits"] = str(list(exits.exits))
        for level, head in zip(exits.levels, exits.exit_heads, strict=True):
            parts[f"{exits.tower.modality}/head{level.level}"] = weights_hash(head)
    return fingerprint(parts)


def read_sources(files: Sequence[Path]) -> tuple[SourceRecord, ...]:
    """Licence notes from JSON files, each a list of {name, licence, url, attribution}."""
    found: list[SourceRecord] = []
    for file in files:
        try:
            listed = json.loads(file.read_text(encoding="utf-8"))
            found.extend(SourceRecord.model_validate(each) for each in listed)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ExportError(
                file, f"source {len(found)}, field {where!r}: {first['msg']}"
            ) from error
        except (OSError, ValueError, TypeError) as error:
            raise ExportError(file, f"not a JSON list of sources: {error}") from error
    return tuple(found)
