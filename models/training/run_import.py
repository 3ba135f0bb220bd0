"""What `hivlp import` does with its arguments."""

from __future__ import annotations

from pathlib import Path

from hivlp.models.errors import TrainingError
from hivlp.models.training.hub import Hub, HuggingFaceHub, Named, fetch
from hivlp.models.training.importing import Imported, check_name, import_checkpoint

CHECKPOINTS = "checkpoints"


def run_import(source: str, name: str | None, home: Path, hub: Hub | None = None) -> Imported:
    """A folder, or a name on a hub, to HIVLP_HOME/checkpoints/NAME. Raises TrainingError."""
    path = Path(source)
    if path.is_file():
        raise TrainingError(f"{source}: is a file; a checkpoint is a folder, or a name on the hub")
    if path.is_dir():
        own = check_name(name or path.resolve().name)
        return import_checkpoint(path, home / CHECKPOINTS / own, origin={"source": source})
    named = Named.parse(source)
    if named is None:
        raise TrainingError(f"{source}: no such folder, and no name of the form owner/name")
    own = check_name(name or named.name.rpartition("/")[2])
    # the branch that the hub takes too; from a cache it needn't be the newest of it
    origin = {"source": named.name, "revision": named.revision or "main"}
    fetched = fetch(named, hub or HuggingFaceHub())
    return import_checkpoint(fetched, home / CHECKPOINTS / own, origin=origin)
