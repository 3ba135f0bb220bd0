"""From a recipe and corpora to everything that a run works with, on one process or on many.

Notable: the first process alone reads corpora, learns the tokenizer and writes the folder, while
the others wait; then all open what it wrote. So the folder must be on a disk that all of them see.
"""

from __future__ import annotations

import math
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from hivlp.models.artifact import ImagePreparation, TextPreparation
from hivlp.models.corpus import Unusable
from hivlp.models.errors import HivlpError, MissingExtra, TrainingError
from hivlp.models.network.hivlp import Hivlp, make_hivlp
from hivlp.models.network.text_tower import TokenizerFile
from hivlp.models.runtime.progress import say
from hivlp.models.training.data.failures import SHOWN, FailureLog, told
from hivlp.models.training.data.listed import ListedBatches, Share
from hivlp.models.training.data.listing import Listing, make_listing
from hivlp.models.training.data.loader import BatchLoader
from hivlp.models.training.data.parts import PartCounts
from hivlp.models.training.data.prepare import Loaded, Preparation, read_vocabulary
from hivlp.models.training.data.sources import DataSource, UsablePicture
from hivlp.models.training.data.streamed import StreamedBatches
from hivlp.models.training.data.wordpiece import learn_wordpiece
from hivlp.models.training.loop.initial import initial_tokenizer, load_initial
from hivlp.models.training.loop.record import LISTING, TOKENIZER, RunRecord, is_run, write_record
from hivlp.models.training.loop.settings import TrainSettings
from hivlp.models.training.recipe import Recipe, losses_of

LEAST_BATCH = 2
WAITING = timedelta(hours=6)
"""The others wait so long for the first process to list the corpora."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run on one of its processes: what was asked, where it writes, how much it learns from."""

    recipe: Recipe
    source: DataSource
    folder: Path
    accelerator: Any
    pictures: int
    """A pass."""

    @property
    def steps(self) -> int:
        """Steps of the whole run: its passes', or the most that the recipe allows."""
        train = self.recipe.train
        a_step = train.batch * train.accumulation * self.processes
        steps = max(1, math.ceil(train.epochs * self.pictures / a_step))
        return min(steps, train.steps) if train.steps else steps

    @property
    def processes(self) -> int:
        """How many train together."""
        return int(self.accelerator.num_processes)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return bool(self.accelerator.is_main_process)


def make_accelerator(recipe: Recipe) -> Any:
    """What knows of devices, processes and precision. Raises MissingExtra."""
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "accelerate", "train") from error
    weights = losses_of(recipe)
    left_out = 0.0 in (weights.retrieval, weights.mlm, weights.matching, weights.early)
    return Accelerator(
        mixed_precision="bf16" if wants_bf16(recipe.train) else "no",
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=left_out),
            InitProcessGroupKwargs(timeout=WAITING),
        ],
    )


def wants_bf16(settings: TrainSettings) -> bool:
    """What `precision` means on this machine."""
    if settings.precision == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return settings.precision == "bf16"


def start_run(recipe: Recipe, source: DataSource, folder: Path, accelerator: Any) -> Run:
    """Write or check the folder, list the pictures, make the tokenizer. Raises HivlpError."""
    if accelerator.is_main_process:
        # before anything is written, so that a mended command isn't refused as another run's
        given = None if (folder / TOKENIZER).is_file() else given_tokenizer(recipe)
        if not is_run(folder):
            source.open()
        write_record(folder, RunRecord(recipe, source))
        _prepare_folder(recipe, source, folder, given)
    accelerator.wait_for_everyone()
    counted = recipe.data.stream_items
    pictures = counted if recipe.data.stream else len(Listing(folder / LISTING))
    return Run(recipe, source, folder, accelerator, pictures)


def check_teachable(recipe: Recipe, processes: int) -> None:
    """Raises TrainingError for a recipe that nothing can be learned by."""
    train = recipe.train
    if train.needs_from and not train.from_:
        raise TrainingError(
            "train.from: this recipe goes on from a trained run: --set train.from=RUN "
            "(or, to begin from nothing all the same, train.needs_from=false)"
        )
    if train.batch * processes < LEAST_BATCH:
        raise TrainingError(
            f"train.batch: {train.batch} on {processes} process leaves nothing to tell a picture "
            f"from; {LEAST_BATCH} at least"
        )
    if train.batch < LEAST_BATCH and recipe.model.cross and losses_of(recipe).matching:
        raise TrainingError(
            f"train.batch: {train.batch}, but matching takes its negatives from a process's own "
            f"pairs; {LEAST_BATCH} at least, or losses.matching=0"
        )


def _prepare_folder(
    recipe: Recipe, source: DataSource, folder: Path, tokenizer: Path | None
) -> None:
    target = folder / TOKENIZER
    listing, failures = None, FailureLog(folder)
    if not recipe.data.stream:
        path, most = folder / LISTING, recipe.data.max_failures
        listing = make_listing(path, source, failures, most)
    elif not recipe.data.stream_items:
        raise TrainingError(
            "data.stream_items: how many pictures are a pass? A stream isn't counted beforehand"
        )
    if target.is_file():
        return
    if tokenizer is not None:
        part = target.with_suffix(".part")
        shutil.copyfile(tokenizer, part)
        part.replace(target)
        return
    found = listing.captions() if listing is not None else _streamed_captions(source, failures)
    learn_wordpiece(found, recipe.tokenizer, target)


def given_tokenizer(recipe: Recipe) -> Path | None:
    """The tokenizer that a run doesn't learn itself, checked; None where it does.

    Raises TrainingError for a start without its own, and for a file that the model can't use.
    """
    start = recipe.train.from_
    given = recipe.tokenizer.file or initial_tokenizer(start)
    if not given:
        if start:
            raise TrainingError(
                f"train.from: no {TOKENIZER} lies beside {start}; weights mean nothing with "
                "another vocabulary than theirs: name it by tokenizer.file"
            )
        return None
    path = Path(given)
    if not path.is_file():
        raise TrainingError(f"tokenizer.file: no such file {given!r}")
    try:
        TokenizerFile.read(path, recipe.model.text.pad_token)
        if recipe.model.mlm and losses_of(recipe).mlm:
            read_vocabulary(path)
    except HivlpError as error:
        raise TrainingError(f"tokenizer.file: {error}") from error
    return path


def _streamed_captions(source: DataSource, failures: FailureLog) -> Iterator[str]:
    """Captions of what is usable; the rest is listed. Raises TrainingError where nothing is."""
    usable, bad = 0, deque[Unusable](maxlen=SHOWN)
    for found in source.open().read():
        if isinstance(found, UsablePicture):
            usable += 1
            yield from found.captions
        elif isinstance(found, Unusable):
            failures.add(found)
            bad.append(found)
    if not usable:
        reasons = f"; such as {told(bad)}" if bad else ""
        raise TrainingError(f"{', '.join(source.paths)}: no picture with a caption{reasons}")


def make_model(run: Run, *, begun: bool) -> Hivlp:
    """The model with fresh weights from the seed, or those that the recipe starts from.

    Of a run that was `begun` before, whose weights are to be loaded, the start isn't read again.
    """
    torch.manual_seed(run.recipe.train.seed)
    try:
        model = make_hivlp(run.recipe.model, run.folder / TOKENIZER)
    except (MemoryError, RuntimeError) as error:  # torch's allocators raise the latter
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        raise TrainingError(f"model: its weights don't fit into memory: {error}") from error
    if run.recipe.train.from_ and not begun:
        anew = run.recipe.train.only == "early"
        load_initial(Path(run.recipe.train.from_), model, early_anew=anew)
    if run.recipe.train.only == "early":
        freeze_all_but_early(model)
    if run.first:
        say(f"{sum(weight.numel() for weight in model.parameters()):,} weights")
    return model


def freeze_all_but_early(model: Hivlp) -> None:
    """Leave nothing to be trained but early heads, and nothing of the rest to chance.

    Raises TrainingError for a model of one level.
    """
    early = [head for exits in (model.dual.text, model.dual.image) for head in exits.heads[:-1]]
    if not early:
        raise TrainingError("train.only: model.dims has one level, so there are no early heads")
    model.eval().requires_grad_(False)
    for head in early:
        head.train().requires_grad_(True)


def make_loader(run: Run, model: Hivlp, first_step: int) -> BatchLoader:
    """This process's batches from step `first_step` to the end."""
    recipe, train = run.recipe, run.recipe.train
    share = Share(int(run.accelerator.process_index), run.processes, train.batch)
    batches = range(first_step * train.accumulation, run.steps * train.accumulation)
    preparation = _preparation(run, model)
    parts = PartCounts(run.folder, share.process) if recipe.data.stream else None
    found: Dataset[Loaded] | IterableDataset[Loaded]
    if parts is not None:
        known = parts.known
        found = StreamedBatches(run.source, recipe.data, preparation, share, batches, known)
    else:
        found = ListedBatches(run.folder / LISTING, run.source, preparation, share)
    return BatchLoader(
        found,
        batches,
        FailureLog(run.folder, share.process),
        workers=recipe.data.workers,
        pinned=run.accelerator.device.type == "cuda",
        expected=run.pictures,
        max_failures=recipe.data.max_failures,
        parts=parts,
    )


def _preparation(run: Run, model: Hivlp) -> Preparation:
    recipe = run.recipe
    text, image = model.dual.text.tower.preparation, model.dual.image.tower.preparation
    assert isinstance(text, TextPreparation)
    assert isinstance(image, ImagePreparation)
    masked = model.mlm is not None and losses_of(recipe).mlm > 0
    masking = recipe.masking if masked else None
    return Preparation(run.folder, text, image, recipe.augment, masking, recipe.train.seed)


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """Weights that are trained."""
    return [weight for weight in module.parameters() if weight.requires_grad]
