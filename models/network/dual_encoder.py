"""Two towers with exits whose levels meet in one space."""

from __future__ import annotations

from torch import nn

from hivlp.models.errors import TrainingError
from hivlp.models.levels import GalleryKind, Modality
from hivlp.models.network.exits import TowerExits


class DualEncoder(nn.Module):
    """A text and an image tower with the same number of levels, of the same dims.

    With a `nested` gallery a gallery vector is the last level's, and level l its first dim numbers;
    with `per_exit` every level is its own.
    """

    def __init__(self, text: TowerExits, image: TowerExits, gallery: GalleryKind) -> None:
        super().__init__()
        dims = {exits.tower.modality: [s.dim for s in exits.levels] for exits in (text, image)}
        if dims["text"] != dims["image"]:
            raise TrainingError(f"dims differ: text {dims['text']}, image {dims['image']}")
        self.text = text
        self.image = image
        self.gallery: GalleryKind = gallery

    def tower(self, modality: Modality) -> TowerExits:
        """The tower of `modality`, with its exits."""
        return self.text if modality == "text" else self.image
