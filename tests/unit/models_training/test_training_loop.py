"""The loop: what a run leaves, goes on with, starts from and refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hivlp.models.cli_train import train as train_command
from hivlp.models.errors import HivlpError, TrainingError
from hivlp.models.training.loop import train as loop
from hivlp.models.training.loop.checkpoints import Checkpoints
from hivlp.models.training.loop.curves import read_curves
from hivlp.models.training.loop.holding import held
from hivlp.models.training.loop.schedule import Clock
from hivlp.models.training.loop.start import check_teachable
from hivlp.models.training.loop.trained import load_run
from hivlp.models.training.recipe import read_recipe
from tests.unit.models_training import pictured
from tests.unit.models_training.checkpoints import make_bert
from tests.unit.models_training.runs import SHORT, arguments, run, weights


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictured.folder(tmp_path_factory.mktemp("corpus") / "pictures", pictured.rows())


def test_a_run_leaves_what_its_document_says(corpus: Path, tmp_path: Path) -> None:
    out = run(corpus, tmp_path / "run", *SHORT)
    for name in ("recipe.toml", "data.json", "tokenizer.json", "data/pictures.arrow"):
        assert (out / name).is_file()
    lines = read_curves(out)
    assert [each["step"] for each in lines] == list(range(1, 9))
    assert {"total", "retrieval_1", "mlm", "matching"} <= set(lines[-1]["losses"])
    assert lines[-1]["learning_rate"] == pytest.approx(1e-4)
    state = load_run(out).state
    assert (state.step, state.finished) == (8, True)


def test_the_same_seed_gives_the_same_weights_and_another_one_others(
    corpus: Path, tmp_path: Path
) -> None:
    first, again, other = (
        weights(run(corpus, tmp_path / str(i), *SHORT, f"train.seed={seed}"))
        for i, seed in enumerate((0, 0, 1))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_run_goes_on_only_as_the_run_it_was(corpus: Path, tmp_path: Path) -> None:
    out = run(corpus, tmp_path / "run", *SHORT)
    with pytest.raises(TrainingError, match=r"holds a run with train.batch = 8, not 16"):
        run(corpus, out, *SHORT, "train.batch=16")
    with pytest.raises(TrainingError, match=r"holds a run with --corpus: paths"):
        run(tmp_path, out, *SHORT)
    run(corpus, out, *SHORT, "train.keep=5", "data.workers=1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(TrainingError, match="is a folder of something else"):
        run(corpus, tmp_path / "other", *SHORT)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]


def test_a_temperature_learns_from_its_limit_on_and_stays_within(
    corpus: Path, tmp_path: Path
) -> None:
    hot = ("model.temperature=100", "train.steps=20")
    with_rates = (*SHORT, *hot, "train.weight_decay=0", "train.warm_up=0")
    learned = load_run(run(corpus, tmp_path / "run", *with_rates)).model.temperature.factor
    # so young a model is unsure: sharp scores cost it much, and its factor falls
    assert learned.item() < 99.5
    start = tmp_path / "start.safetensors"
    save_file(weights(tmp_path / "run") | {"temperature.log_scale": torch.tensor(6.0)}, start)
    tokenizer = f"tokenizer.file={tmp_path / 'run' / 'tokenizer.json'}"
    begun = run(corpus, tmp_path / "begun", *with_rates, f"train.from={start}", tokenizer)
    assert load_run(begun).model.temperature.factor.item() < 100.01
    still = load_run(run(corpus, tmp_path / "off", *with_rates, "model.learn_temperature=false"))
    assert still.model.temperature.factor.item() == pytest.approx(100)


def test_a_run_that_could_learn_nothing_is_refused_before_it_begins(
    corpus: Path, tmp_path: Path
) -> None:
    def refused(told: str, *changes: str, recipe: str = "hivlp-tiny") -> None:
        given = arguments(corpus, tmp_path / "run", changes)
        with pytest.raises(TrainingError, match=told):
            train_command([recipe, *given[1:]])
        assert not (tmp_path / "run").exists()

    alone = ("train.batch=1", "losses.matching=0")
    refused(r"train\.batch: 1 on 1 process leaves nothing to tell", *alone)
    refused(r"train\.from: this recipe goes on from a trained run", recipe="hivlp-finetune")
    tiny = read_recipe("hivlp-tiny", ["train.batch=1"])
    with pytest.raises(TrainingError, match=r"train\.batch: 1, but matching takes its negatives"):
        check_teachable(tiny, 2)
    check_teachable(read_recipe("hivlp-tiny", alone), 2)
    check_teachable(read_recipe("hivlp-tiny", ["train.batch=1", "model.cross=none"]), 2)


def test_a_cross_modal_encoder_that_never_learned_is_no_reranker(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(corpus, tmp_path / "first", *SHORT)
    assert load_run(first).reranker is not None
    untaught = run(corpus, tmp_path / "untaught", *SHORT, "losses.matching=0")
    assert load_run(untaught).reranker is None
    assert "was never trained and is left out" in capsys.readouterr().err
    begun = (*SHORT, "losses.matching=0", f"train.from={first}")
    assert load_run(run(corpus, tmp_path / "begun", *begun)).reranker is not None


def test_a_model_that_does_not_fit_into_memory_is_an_error_by_name(
    corpus: Path, tmp_path: Path
) -> None:
    # positions of 2 GiB, in a process that may have 1 GiB more than it has
    large = ("image_size=4096", "patch=1", "width=32")
    given = arguments(corpus, tmp_path / "run", [f"model.vision.{each}" for each in large])
    code = (
        "import resource, sys, accelerate, torch; from hivlp.service.main import main; "
        "most = int(open('/proc/self/statm').read().split()[0]) * 4096 + 2**30; "
        "resource.setrlimit(resource.RLIMIT_AS, (most, most)); sys.exit(main(sys.argv[1:]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "train", *given],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "model: its weights don't fit into memory" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_second_command_on_the_same_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with held(out), pytest.raises(TrainingError, match="another hivlp train is at work there"):
        run(corpus, out, *SHORT)
    run(corpus, out, *SHORT)  # a folder that holds a lock only is one to begin in


def test_batches_accumulated_have_the_gradient_of_one_of_their_size(
    corpus: Path, tmp_path: Path
) -> None:
    # hidden words alone: no pair is another's negative, and every caption hides one of three words
    alone = [f"losses.{name}=0" for name in ("retrieval", "matching", "early", "distillation")]
    same = (*SHORT, *alone, "model.text.dropout=0", "train.steps=2")
    gradients = {}
    for batch, batches in ((16, 1), (8, 2), (4, 4)):
        out = tmp_path / str(batch)
        run(corpus, out, *same, f"train.batch={batch}", f"train.accumulation={batches}")
        gradients[batch] = [line["gradient"] for line in read_curves(out)]
    assert gradients[8] == pytest.approx(gradients[16], rel=1e-3)
    assert gradients[4] == pytest.approx(gradients[16], rel=1e-3)


def test_a_run_keeps_its_number_of_processes(corpus: Path, tmp_path: Path) -> None:
    out = run(corpus, tmp_path / "run", *SHORT)
    state = Checkpoints(out, 1).all()[-1] / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"processes": 4}))
    with pytest.raises(TrainingError, match="begun on 4 processes and can't go on on 1"):
        run(corpus, out, *SHORT)


@pytest.fixture
def even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at a run's clock takes 50 ms, of which a step has two."""

    def clock(before: float) -> Clock:
        moments = count()
        return Clock(before, lambda: next(moments) * 0.05)

    monkeypatch.setattr(loop, "Clock", clock)


LIMITED = (*SHORT, "train.steps=0", "train.max_seconds=6")


@pytest.mark.usefixtures("even_clock")
def test_a_time_limit_ends_a_run_with_its_rate_down(corpus: Path, tmp_path: Path) -> None:
    out = run(corpus, tmp_path / "run", *LIMITED)
    state, lines = load_run(out).state, read_curves(out)
    assert state.finished
    assert state.step == state.plan.steps == lines[-1]["step"]
    assert 55 <= state.step <= 60
    rates = [each["learning_rate"] for each in lines]
    assert max(rates) > 1.9e-3
    assert rates[-1] == pytest.approx(1e-4)


@pytest.mark.usefixtures("even_clock")
def test_a_run_with_a_time_limit_goes_on_by_the_plan_that_it_had(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limited = (*LIMITED, "train.checkpoint_seconds=0", "train.keep=100")
    whole = run(corpus, tmp_path / "whole", *limited)
    out = tmp_path / "killed"
    shutil.copytree(whole, out)
    for later in Checkpoints(out, 100).all()[30:]:
        shutil.rmtree(later)
    capsys.readouterr()
    found = weights(run(corpus, out, *limited))
    assert "goes on after step 30 of" in (said := capsys.readouterr().err)
    assert "planned" not in said
    assert load_run(out).state.plan == load_run(whole).state.plan
    assert all(torch.equal(value, found[name]) for name, value in weights(whole).items())


def test_a_run_may_start_from_another_and_leave_parts_of_it_out(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(corpus, tmp_path / "first", *SHORT)
    still = ("train.learning_rate=1e-12", "train.last_learning_rate=0", "model.cross=none")
    out = run(corpus, tmp_path / "second", *SHORT, f"train.from={first}", *still)
    assert "its part 'cross' is left out" in capsys.readouterr().err
    before, after = weights(first), weights(out)
    assert not any(name.startswith("cross.") for name in after)
    assert all(torch.allclose(before[name], after[name], atol=1e-9) for name in after)
    shutil.move(first, tmp_path / "moved")  # a run that was begun has no need of its start
    run(corpus, out, *SHORT, f"train.from={first}", *still)
    shutil.move(tmp_path / "moved", first)
    assert (first / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    with pytest.raises(HivlpError, match="mis-shaped weights"):
        run(corpus, tmp_path / "third", *SHORT, f"train.from={first}", "model.head_hidden=32")
    with pytest.raises(TrainingError, match="no run's folder, no checkpoint"):
        run(corpus, tmp_path / "fourth", *SHORT, f"train.from={tmp_path}")


def test_a_start_without_its_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    first = run(corpus, tmp_path / "first", *SHORT)
    alone = tmp_path / "alone" / "model.safetensors"
    alone.parent.mkdir()
    shutil.copyfile(Checkpoints(first, 1).all()[-1] / "model.safetensors", alone)
    begun = (*SHORT, f"train.from={alone}")
    with pytest.raises(TrainingError, match=r"train\.from: no tokenizer.json lies beside"):
        run(corpus, tmp_path / "a", *begun)
    run(corpus, tmp_path / "b", *begun, f"tokenizer.file={first / 'tokenizer.json'}")
    shutil.copyfile(first / "tokenizer.json", alone.parent / "tokenizer.json")
    run(corpus, tmp_path / "c", *begun)


def test_a_tokenizer_is_checked_before_it_belongs_to_a_run(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    unmasked = make_bert(tmp_path / "bert") / "tokenizer.json"
    for given, told in ((tmp_path / "broken.json", "not a tokenizer"), (unmasked, "no token")):
        out = tmp_path / f"run-{told.split()[0]}"
        with pytest.raises(TrainingError, match=rf"tokenizer\.file: .*{told}"):
            run(corpus, out, *SHORT, f"tokenizer.file={given}")
        assert not (out / "tokenizer.json").exists()
        assert train_command(arguments(corpus, out, SHORT)) == 0  # it holds no other run


@pytest.mark.parametrize("form", ["nested", "per_exit"])
def test_early_heads_are_fitted_afterwards_and_nothing_else_is_touched(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    short = (*SHORT, f"form={form}")
    flat = run(corpus, tmp_path / "flat", *short, "model.dims=[32]")
    assert load_run(flat).model.dual.text.exits == (3,)
    early = (*short, f"train.from={flat}", "train.only=early")
    fitted = run(corpus, tmp_path / "fitted", *early)
    assert "the first 2 of ours begin anew" in capsys.readouterr().err
    before, after = weights(flat), weights(fitted)
    heads = [f"dual.{tower}.heads" for tower in ("text", "image")]
    for head in heads:  # one level's only head is three levels' last
        moved = {n.replace(f"{head}.0", f"{head}.2"): w for n, w in before.items() if head in n}
        before = {n: w for n, w in before.items() if head not in n} | moved
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    rest = sorted(set(after) - set(before))
    assert rest
    assert all(name.startswith(tuple(f"{h}.{i}." for h in heads for i in (0, 1))) for name in rest)
    assert not {"mlm", "matching"} & set(read_curves(fitted)[-1]["losses"])
    again = weights(run(corpus, tmp_path / "again", *early[:-2], f"train.from={fitted}", early[-1]))
    assert not any(torch.equal(again[name], after[name]) for name in rest if "bias" in name)


def test_early_heads_alone_need_a_run_and_several_levels(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"train\.only: early heads alone are trained on a run"):
        run(corpus, tmp_path / "a", *SHORT, "train.only=early")
    flat = run(corpus, tmp_path / "flat", *SHORT, "model.dims=[32]")
    early = ("train.only=early", f"train.from={flat}", "model.dims=[32]")
    with pytest.raises(TrainingError, match=r"train\.only: model\.dims has one level"):
        run(corpus, tmp_path / "b", *SHORT, *early)


def test_a_karpathy_split_is_chosen_by_the_command(tmp_path: Path) -> None:
    corpus = pictured.karpathy(tmp_path / "corpus", pictured.rows(20))
    moved = corpus.rename(tmp_path / "elsewhere.json")
    images = ["--split", "train", "--images", str(tmp_path / "corpus")]
    out = tmp_path / "run"
    assert train_command([*arguments(moved, out, SHORT), *images]) == 0
    assert read_curves(out)[-1]["epoch"] == pytest.approx(8 * 8 / 10)  # of 20, 10 are for training
    with pytest.raises(TrainingError, match=r"holds a run with --corpus: options"):
        train_command([*arguments(moved, out, SHORT), *images, "--split", "val"])


def test_a_split_that_the_corpus_lacks_leaves_no_run_behind(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(TrainingError, match=r"--split: .*/pictures would be read whole"):
        train_command([*arguments(corpus, out, SHORT), "--split", "train"])
    run(corpus, out, *SHORT)


def test_streamed_shards_train_too(tmp_path: Path) -> None:
    shards = pictured.tars(tmp_path / "tars", pictured.rows())
    out = run(shards, tmp_path / "run", *SHORT, "data.stream=true", "data.stream_items=45")
    assert load_run(out).state.step == 8
    assert not (out / "data" / "pictures.arrow").exists()
    assert (out / "data" / "parts.jsonl").is_file()
    with pytest.raises(TrainingError, match=r"data.stream_items: how many pictures are a pass"):
        run(shards, tmp_path / "other", *SHORT, "data.stream=true")


def test_a_stream_of_nothing_usable_says_why(tmp_path: Path) -> None:
    shards = pictured.tars(tmp_path / "tars", pictured.rows(6))
    out = tmp_path / "run"
    streamed = (*SHORT, "data.stream=true", "data.stream_items=6")
    with pytest.raises(TrainingError, match=r"no picture with a caption; such as .*asked for"):
        train_command([*arguments(shards, out, streamed), "--group", "colour"])
    assert len((out / "failures.jsonl").read_text().splitlines()) == 6


def test_arguments_that_lack_something_are_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train_command(["hivlp-tiny", "--out", "x"]) == 2
    assert "--corpus is needed" in capsys.readouterr().err
    assert train_command(["--corpus", "x"]) == 2
    assert "a recipe (see --list) is needed" in capsys.readouterr().err


def test_the_list_says_what_each_recipe_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_command(["--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [each.split()[0] for each in shown] == [
        "hivlp",
        "hivlp-finetune",
        "hivlp-small",
        "hivlp-tiny",
    ]
    assert all(len(each.split()) > 5 for each in shown)
