"""How many queries may stop early, for things a model was fitted on and for things it never saw.

    python bench/early_exit.py            # one fold; --folds 5 for all five

Needs the demo's pictures and texts under HIVLP_HOME (`hivlp demo --no-serve` makes them). Concepts
are dealt into five folds; a fit that never saw one fold's concepts answers their captions and
pictures among all pictures and captions. Gates and thresholds are chosen as a build chooses them,
on queries of known things, and applied to never-seen ones unchanged; besides, chosen on never-seen
things themselves. About three minutes a fold on 2 cores; fitted vectors are kept and read again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import WORK, machine

from hivlp.index.backends.exact import ExactLevel
from hivlp.index.backends.rows import LevelRows, inverse_norms
from hivlp.index.build.answers import answers_for
from hivlp.index.build.directions import Direction
from hivlp.index.build.exits import apply_rule, measure_exits
from hivlp.index.build.widths import exact_best, sweep
from hivlp.index.cascade import Plan, PlanRequest
from hivlp.index.early_exit import DEPTH
from hivlp.index.plans import make_plan
from hivlp.index.snapshot.manifest import ExitRecord, width_table
from hivlp.index.snapshot.store import default_home
from hivlp.models import cli
from hivlp.models.levels import LevelSpec
from hivlp.models.training.fitting import fit_heads, level_vectors
from hivlp.models.training.reading import read_corpus, read_exits, read_settings, read_towers
from hivlp.service.demo.cli import demo_steps

FOLDS, SEED, TARGET = 5, 0, 0.99
ENCODE_MS = {"text": (1.9, 1.9, 1.7), "image": (8.6, 1.5, 0.3)}
"""The demo's stages, one query alone, on quiet cores: what shares are weighed by."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folds", type=int, default=1)
    parser.add_argument("--max-texts", default="20000")
    parser.add_argument("--json", type=Path, default=WORK / "early_exit.json")
    options = parser.parse_args()
    print(machine())
    found = []
    for fold in range(options.folds):
        vectors = fold_vectors(fold, options.max_texts)
        for searched, query in (("image", "text"), ("text", "image"), ("image", "image")):
            found.append({"fold": fold, **direction_report(vectors, searched, query)})
            show(found[-1])
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def fold_vectors(fold: int, max_texts: str) -> dict[str, np.ndarray]:
    """Every level's vectors of captions and pictures by a fit without one fold's concepts."""
    file = WORK / f"early-exit-fold{fold}-{max_texts}.npz"
    if not file.is_file():
        step = next(s for s in demo_steps(default_home()) if s.name == "fit early outputs")
        assert not callable(step.run)
        arguments = list(step.run[1:])
        arguments[arguments.index("--max-texts") + 1] = max_texts
        given = cli.fit_parser().parse_args(arguments)
        towers = read_towers(given)
        settings = read_settings(given, towers)
        cache = given.cache or cli.default_cache()
        readings = read_exits(given, towers, len(settings.dims))
        corpus = read_corpus(given, readings, settings, cache, 2)
        groups = np.unique(corpus.picture_group)
        left_out = groups[np.random.default_rng(SEED).permutation(len(groups)) % FOLDS == fold]
        heads = fit_heads(corpus.of_groups(np.setdiff1d(groups, left_out)), settings)
        text = level_vectors(heads.text, corpus.captions)
        image = level_vectors(heads.image, corpus.pictures)
        named = {f"text{n}": v for n, v in enumerate(text, 1)}
        named |= {f"image{n}": v for n, v in enumerate(image, 1)}
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            file,
            left_out=left_out,
            text_group=corpus.caption_group,
            image_group=corpus.picture_group,
            **named,
        )
    return dict(np.load(file))


def direction_report(vectors: dict[str, np.ndarray], searched: str, query: str) -> dict[str, Any]:
    """Exits chosen on known things, tried on both; and chosen on never-seen ones."""
    never = np.isin(vectors[f"{query}_group"], vectors["left_out"])
    known = directed(vectors, searched, query, ~never)
    unseen = directed(vectors, searched, query, never)
    of_known, seen_known = measured(known)
    of_unseen, _ = measured(unseen)
    moved = applied(of_known, unseen)
    return {
        "searched": searched,
        "query": query,
        "known": of_known.model_dump(exclude={"gates"}),
        "never_seen_with_the_thresholds_of_known": moved,
        "never_seen_with_their_own": of_unseen.model_dump(exclude={"gates"}),
        "queries": [int((~never).sum()), int(never.sum())],
        "keeps": seen_known,
    }


def directed(
    vectors: dict[str, np.ndarray], searched: str, query: str, chosen: np.ndarray
) -> Direction:
    """Some queries against every row of a side, as a build would hold them."""
    levels = sorted(int(n.removeprefix("text")) for n in vectors if n[4:].isdigit())
    dims = {n: vectors[f"text{n}"].shape[1] for n in levels}
    finest = np.ascontiguousarray(vectors[f"{searched}{levels[-1]}"])
    rows = {
        n: LevelRows(finest, dim, inverse_norms(finest, dim) if n < levels[-1] else None)
        for n, dim in dims.items()
    }
    group = vectors[f"{query}_group"][chosen].astype(np.int64)
    row_group = vectors[f"{searched}_group"].astype(np.int64)
    answers = answers_for(
        group, row_group, np.arange(row_group.max() + 1), same_side=searched == query
    )
    place = np.unique(group, return_inverse=True)[1]
    return Direction(
        searched,  # type: ignore[arg-type]
        query,  # type: ignore[arg-type]
        {n: np.ascontiguousarray(vectors[f"{query}{n}"][chosen]) for n in levels},
        rows,
        place % 2 == 1,
        levels={n: ExactLevel(n, own) for n, own in rows.items()},
        items=group,
        answers=answers,
        encode_ms=ENCODE_MS[query],
    )


def cascade(direction: Direction) -> Plan:
    """The cascade at measured widths."""
    specs = tuple(LevelSpec(n, n, own.dim) for n, own in sorted(direction.rows.items()))
    records = sweep(direction, specs, "nested", TARGET)
    request = PlanRequest(direction.searched, direction.query, DEPTH + 1, "cascade")
    return make_plan(request, specs, width_table(records, "scan"), direction.size)


def measured(direction: Direction) -> tuple[ExitRecord, list[int]]:
    plan = cascade(direction)
    best = exact_best(direction, max(direction.rows), 100)
    record = measure_exits(direction, plan, {}, best)
    assert record is not None
    return record, [stage.keep for stage in plan.stages]


def applied(record: ExitRecord, direction: Direction) -> dict[str, Any] | None:
    """A rule as it is, on other queries: who stops where, and both recalls; None where no rule."""
    if record.rule is None:
        return None
    plan = replace(cascade(direction), exits=record.rule)
    found = apply_rule(
        direction, plan, {}, exact_best(direction, max(direction.rows), 100), record.loss
    )
    return {**found.trial.model_dump(exclude={"signal"}), "full": found.full}


def show(found: dict[str, Any]) -> None:
    """A few lines a direction."""
    print(f"\nfold {found['fold']}, {found['query']} to {found['searched']}: {found['queries']}")
    for who in ("known", "never_seen_with_their_own"):
        record = found[who]
        print(f"  {who}: {record['signal']} in use, full {record['full']}")
        for trial in record["tried"]:
            print(
                f"    {trial['signal']:<10} stop {trial['shares']} saved {trial['saved']:.3f} "
                f"{trial['recalls']}"
            )
    print(f"  never seen, thresholds of known: {found['never_seen_with_the_thresholds_of_known']}")


if __name__ == "__main__":
    main()
