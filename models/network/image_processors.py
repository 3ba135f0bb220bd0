"""How a checkpoint prepares pictures: Hugging Face's and OpenCLIP's files to `ImagePreparation`.

Notable: a processor that does what no preparation can say is refused by field and file, since a
picture that is prepared otherwise than in training silently finds less.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hivlp.models.artifact import ImagePreparation
from hivlp.models.network.fields import Fields
from hivlp.models.network.tower import TowerError

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Kind of image processor -> what one number for `size` means there.
KINDS: dict[str, Literal["shortest", "square"]] = {
    "CLIP": "shortest",
    "Bit": "shortest",
    "ViT": "square",
    "DeiT": "square",
    "Siglip": "square",
}
# Pillow's numbers for resampling.
RESAMPLING: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}
CROPS = ("CLIP", "Bit", "DeiT")
_SUFFIXES = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")


def processor_file(folder: Path) -> Path:
    """The file that says how pictures are prepared. Raises TowerError where there is none."""
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            return folder / name
    raise TowerError(folder / PROCESSOR_FILES[0], "no such file: it says how pictures are prepared")


def read_processor(path: Path, size: tuple[int, int]) -> ImagePreparation:
    """A Hugging Face image processor, for a tower of pictures of `size` (height, width).

    Raises TowerError naming the field that isn't implemented, or doesn't fit the tower.
    """
    fields = Fields.read(path)
    if "image_processor" in fields:
        fields = fields.part("image_processor")
    kind = _kind(fields)
    if not fields.flag("do_resize", True):
        raise fields.error("do_resize", "is false: pictures of any size must be resized")
    fields.refuse("do_pad", False)
    crops = fields.flag("do_center_crop", kind in CROPS)
    fit, resized = _resizing(fields, kind)
    cut = fields.part("crop_size") if isinstance(fields.values.get("crop_size"), dict) else None
    final = resized
    if crops:
        final = _box(cut) if cut is not None else fields.sides("crop_size")
        if final[0] > resized[0] or final[1] > resized[1]:
            raise fields.error("crop_size", f"{final} is larger than what is cut, {resized}")
    if final != size:
        raise fields.error("size", f"ends at {final}, but the tower reads pictures of {size}")
    mean, std = _scaling(fields)
    return ImagePreparation(
        height=final[0],
        width=final[1],
        fit=fit,
        crop_ratio=_ratio(fields, final, resized),
        interpolation=_resampling(fields, kind),
        mean=mean,
        std=std,
    )


def _kind(fields: Fields) -> str:
    field = "image_processor_type"
    if field not in fields:
        field = "feature_extractor_type"
    name = fields.text(
        field, "CLIPImageProcessor" if "crop_size" in fields else "ViTImageProcessor"
    )
    kind = next((name.removesuffix(s) for s in _SUFFIXES if name.endswith(s)), name)
    if kind not in KINDS:
        raise fields.error(field, f"is {name!r}: implemented are those of {', '.join(KINDS)}")
    return kind


def _resizing(fields: Fields, kind: str) -> tuple[Literal["stretch", "crop"], tuple[int, int]]:
    """How the picture is resized, and to which (height, width); for `crop` both cover the cut."""
    given = fields.values.get("size")
    if isinstance(given, dict):
        size = fields.part("size")
        if "shortest_edge" in size:
            if len(size.values) > 1:
                raise fields.error("size", f"{given}: shortest_edge alone is implemented")
            side = size.whole("shortest_edge")
            return "crop", (side, side)
        return "stretch", _box(size)
    both = fields.sides("size", 256 if kind == "DeiT" else 224)
    return ("crop" if KINDS[kind] == "shortest" else "stretch"), both


def _box(size: Fields) -> tuple[int, int]:
    return size.whole("height"), size.whole("width")


def _ratio(fields: Fields, final: tuple[int, int], resized: tuple[int, int]) -> float:
    ratios = {cut / whole for cut, whole in zip(final, resized, strict=True)}
    if len(ratios) > 1:
        raise fields.error("crop_size", f"{final} of {resized}: one share of both sides is needed")
    return ratios.pop()


def _resampling(fields: Fields, kind: str) -> Literal["bilinear", "bicubic"]:
    number = fields.whole("resample", 2 if kind == "ViT" else 3, least=0)
    if number not in RESAMPLING:
        known = ", ".join(f"{n} ({name})" for n, name in RESAMPLING.items())
        raise fields.error("resample", f"is {number}: one of {known} is implemented")
    return RESAMPLING[number]


def _scaling(fields: Fields) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and deviation of pixels / 255, whatever factor the processor scales them with."""
    rescales, normalises = fields.flag("do_rescale", True), fields.flag("do_normalize", True)
    factor = fields.number("rescale_factor", 1 / 255) if rescales else 1.0
    unit = 1 / (255 * factor)
    mean = fields.triple("image_mean") if normalises else (0.0, 0.0, 0.0)
    std = fields.triple("image_std") if normalises else (1.0, 1.0, 1.0)
    if min(std) <= 0:
        raise fields.error("image_std", f"must be above 0, not {list(std)}")
    unit = 1.0 if abs(unit - 1) < 1e-9 else unit  # 1 / 255 is written with few digits
    return (
        (mean[0] * unit, mean[1] * unit, mean[2] * unit),
        (std[0] * unit, std[1] * unit, std[2] * unit),
    )


def read_open_clip(fields: Fields, size: tuple[int, int]) -> ImagePreparation:
    """OpenCLIP's `preprocess_cfg`, for pictures of `size` (height, width). Raises TowerError."""
    modes: dict[str, Literal["stretch", "crop", "pad"]] = {
        "shortest": "crop",
        "longest": "pad",
        "squash": "stretch",
    }
    mode = fields.word("resize_mode", modes, "shortest")
    interpolation = fields.word("interpolation", RESAMPLING.values(), "bicubic")
    fields.refuse("mode", "RGB")
    if "size" in fields:
        given = fields.sides("size")
        if given != size:
            raise fields.error("size", f"is {given}, but the tower reads pictures of {size}")
    fill = fields.whole("fill_color", 0, least=0)
    mean = fields.triple("mean", (0.48145466, 0.4578275, 0.40821073))
    std = fields.triple("std", (0.26862954, 0.26130258, 0.27577711))
    if min(std) <= 0:
        raise fields.error("std", f"must be above 0, not {list(std)}")
    return ImagePreparation(
        height=size[0],
        width=size[1],
        fit=modes[mode],
        interpolation=interpolation,
        background=(fill, fill, fill),
        mean=mean,
        std=std,
    )
