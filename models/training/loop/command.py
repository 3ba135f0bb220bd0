"""What `hivlp train` does with its arguments."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch

from hivlp.models.cli import DONE
from hivlp.models.corpus import PictureOptions
from hivlp.models.runtime.progress import say
from hivlp.models.training.data.choice import Choice
from hivlp.models.training.data.sources import DataSource
from hivlp.models.training.loop.holding import held
from hivlp.models.training.loop.record import check_place
from hivlp.models.training.loop.start import check_teachable, make_accelerator, start_run
from hivlp.models.training.loop.train import train
from hivlp.models.training.recipe import read_recipe


def run_train(given: argparse.Namespace) -> int:
    """Train, or go on training. Raises HivlpError."""
    recipe = read_recipe(given.recipe, given.set)
    options = PictureOptions(tuple(given.split), given.images, given.aliases, given.group)
    choice = Choice.read(recipe.data.only, recipe.data.leave_out)
    source = DataSource(tuple(given.corpus), options, recipe.data.reader, choice)
    if given.threads:
        torch.set_num_threads(given.threads)
    accelerator = make_accelerator(recipe)
    try:
        check_teachable(recipe, int(accelerator.num_processes))
        check_place(given.out)
        with held(given.out) if accelerator.is_main_process else nullcontext():
            run = start_run(recipe, source, given.out, accelerator)
            state = train(run)
        if run.first:
            say(f"trained {state.step} steps in {state.seconds:.0f} s")
            say(f"next: hivlp export {given.out} --out ARTIFACT")
    finally:
        accelerator.end_training()
    return DONE
