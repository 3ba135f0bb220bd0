"""A pretrained checkpoint into HIVLP_HOME/checkpoints: converted, loaded strictly, compared, kept.

    import.json         where it came from, what it is, and a hash of every file
    config.json ...     configuration, tokenizer and preprocessing, as they were
    model.safetensors   all weights in one file; OpenCLIP's keep its own names

Notable: what is loaded and compared is the converted folder itself, before it takes its place, so
that a checkpoint that is there is one that works.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from hivlp.models.artifact import ImagePreparation, TextPreparation, file_record
from hivlp.models.errors import TrainingError
from hivlp.models.levels import Modality
from hivlp.models.network.bert import MODULE_LIST, pooling_file
from hivlp.models.network.checkpoint import read_weights, weight_file
from hivlp.models.network.families import FAMILIES, Family, families_at, load_tower
from hivlp.models.network.openclip import OPEN_CONFIG
from hivlp.models.network.tokenizer_files import TOKENIZER, read_tokenizer, vocabulary_of
from hivlp.models.network.tower import Tower, TowerError
from hivlp.models.runtime.progress import Progress
from hivlp.models.training.placing import check_place, place_folder
from hivlp.models.training.reference import check_reference

MARK = "import.json"
KEPT = (
    "config.json",
    OPEN_CONFIG,
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "sentence_bert_config.json",
    MODULE_LIST,
)
POOLED = ("bert", "roberta")  # families whose pooling sentence-transformers' files tell
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint in its place, its towers, and how far they are from transformers' own.

    `difference` is None where nothing could be compared, `reason` then says why.
    """

    path: Path
    towers: Mapping[Modality, Tower]
    difference: float | None
    reason: str = ""


def check_name(name: str) -> str:
    """A folder's name. Raises TrainingError."""
    if not _NAME.match(name):
        raise TrainingError(f"--name {name!r}: letters, digits, '.', '_' and '-' only")
    return name


def import_checkpoint(source: Path, target: Path, *, origin: Mapping[str, str]) -> Imported:
    """Convert, check and keep the checkpoint in `source`; `origin` is noted beside it.

    Raises TowerError naming the file of `source` that can't be used, ReferenceDiffers, PlaceError.
    """
    families = families_at(source)
    if not families:
        listed = "; ".join(f"{name}: {family.looks_like}" for name, family in FAMILIES.items())
        raise TowerError(source, f"no checkpoint of a known family. Known are {listed}")
    check_place(target, MARK)
    modalities = [family.modality for family in families.values()]
    found: list[tuple[float | None, str]] = []

    def write(made: Path) -> None:
        try:
            _convert(source, made, families)
            found.append(_check(made, modalities))
        except TowerError as error:
            raise _told_of_source(error, made, source) from error
        _note(made, {**origin, "families": ", ".join(families)})

    place_folder(target, MARK, write)
    towers = {modality: load_tower(target, modality) for modality in modalities}
    return Imported(target, towers, *found[0])


def _convert(source: Path, made: Path, families: Mapping[str, Family]) -> None:
    """Every file that loading reads, weights as one safetensors, the tokenizer as it must be."""
    # "clip-text" and "bert" alike
    text = next((n.partition("-")[0] for n, f in families.items() if f.modality == "text"), None)
    names = [name for name in KEPT if (source / name).is_file()]
    pooling = pooling_file(source) if text in POOLED else None
    if pooling is not None:
        names.append(str(pooling.relative_to(source)))
    weights = {family.weights for family in families.values()}
    with Progress("importing", len(names) + len(weights), "file") as progress:
        for name in names:
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, made / name)
            progress.step()
        for known in weights:
            # the first of the names that a family's weights may bear is the safetensors'
            _convert_weights(weight_file(source, known), made / known[0])
            progress.step()
    if text is not None:
        read_tokenizer(source, vocabulary_of(text)).save(str(made / TOKENIZER))


def _convert_weights(file: Path, kept: Path) -> None:
    if file.suffix == ".safetensors":
        shutil.copyfile(file, kept)
        return
    # a copy of each, as safetensors keeps no two names of one tensor
    weights = {name: value.contiguous().clone() for name, value in read_weights(file).items()}
    save_file(weights, kept, metadata={"format": "pt"})


def _check(made: Path, modalities: list[Modality]) -> tuple[float | None, str]:
    """Load every tower strictly, and ask transformers whether it says the same."""
    towers = [load_tower(made, modality) for modality in modalities]
    if any(tower.family == "openclip" for tower in towers):
        return None, "OpenCLIP's own form: nothing installed to compare it with"
    difference = check_reference(made, towers)
    return difference, "" if difference is not None else "transformers is not installed"


def _told_of_source(error: TowerError, made: Path, source: Path) -> TowerError:
    """The error with the path that the user knows."""
    inside = error.path.is_relative_to(made)
    return TowerError(source / error.path.relative_to(made) if inside else error.path, error.reason)


def _note(made: Path, origin: Mapping[str, str]) -> None:
    files = sorted(path for path in made.rglob("*") if path.is_file())
    told = {
        "format_version": 1,
        **origin,
        "files": {path.relative_to(made).as_posix(): file_record(path).sha256 for path in files},
    }
    (made / MARK).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def describe(imported: Imported) -> list[str]:
    """What a user wants to know of a checkpoint: a few lines."""
    lines = [f"{imported.path}"]
    for tower in imported.towers.values():
        last = tower.width(tower.depth)
        lines.append(
            f"  {tower.modality}: {tower.family}, {tower.depth} layers, ends {last} wide, read at "
            f"{tower.pooling}, exits {','.join(map(str, tower.exits(min(3, tower.depth))))}"
        )
        lines.append(f"    {_preparation(tower.preparation)}")
    if imported.difference is None:
        lines.append(f"  not compared with transformers: {imported.reason}")
    else:
        lines.append(f"  the same as transformers: at most {imported.difference:.1e} apart")
    return lines


def _preparation(spec: TextPreparation | ImagePreparation) -> str:
    if isinstance(spec, TextPreparation):
        padded = "always padded to that" if spec.pad_to_max else "padding is left out"
        return f"at most {spec.max_tokens} tokens, {padded}"
    mean, std = (", ".join(f"{each:.4g}" for each in three) for three in (spec.mean, spec.std))
    cut = f" after 1/{spec.crop_ratio:.4g}" if spec.crop_ratio != 1 else ""
    size = f"{spec.height} x {spec.width}, {spec.fit}{cut}, {spec.interpolation}"
    return f"{size}, mean {mean}, std {std}"


def next_command(imported: Imported) -> str:
    """What to run on this checkpoint."""
    spaces = {tower.joint_space for tower in imported.towers.values()}
    if len(imported.towers) == 2 and None not in spaces:
        return (
            f"hivlp fit-exits --towers {imported.path} --images PICTURES/ --texts TEXTS.txt "
            "--out fit/"
        )
    own = next(iter(imported.towers))
    other = "image" if own == "text" else "text"
    return (
        f"hivlp fit-exits --{own}-tower {imported.path} --{other}-tower OTHER --pairs PAIRS/ "
        "--texts TEXTS.txt --out fit/"
    )
