"""One block of queries measured against a gallery: ranks and ANN recall, query by query.

A *system* is anything that answers: every level ranked exactly, both plans, the cascade that may
stop early, and what a re-ranker makes of a plan. Each gets two numbers a query: the pessimistic
rank of the best right row (1-based; inf where a plan found none), and its ANN recall@10.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import Plan, PlanName, PlanRequest
from hivlp.index.early_exit import DEPTH
from hivlp.index.evaluation.answers import Answers, Block, Numbers
from hivlp.index.evaluation.counting import Counter, Counts, Ranker, Tops, scored
from hivlp.index.evaluation.gallery import Gallery
from hivlp.index.evaluation.plain import ANN_K
from hivlp.index.evaluation.queries import SEED, Sampled
from hivlp.models.levels import Modality

PLANS: tuple[PlanName, ...] = ("cascade", "funnel")
LEVEL = "level "
LEAST_GALLERY = 100
TOGETHER = 64
"""Queries whose candidates are in memory together."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A system's `ranks` (n,), inf where nothing right was found, and its `ann` recall@10 (n,)."""

    ranks: Numbers
    ann: Numbers


@dataclass(frozen=True, slots=True)
class Stages:
    """The cascade that may stop early, as if it answered with each of its S stages.

    `ranks`, `ann` and `confidence` are (n, S); the confidence is -inf where it can't stop, and inf
    at the last stage.
    """

    levels: tuple[int, ...]
    ranks: Numbers
    ann: Numbers
    confidence: Numbers

    def stopped(self, threshold: float) -> npt.NDArray[np.int64]:
        """The stage that answers each query at a threshold: (n,)."""
        first: npt.NDArray[np.int64] = (self.confidence >= threshold).argmax(axis=1)
        return first

    def at(self, stages: npt.NDArray[np.int64]) -> Scored:
        """Each query answered by one of its stages, (n,)."""
        each = np.arange(len(stages))
        return Scored(self.ranks[each, stages], self.ann[each, stages])


@dataclass(frozen=True, slots=True)
class Head:
    """What a plan found that is to be re-ranked: its first `rows` (n, depth), in the side's
    numbers, -1 where there are fewer, and the `ranks` (n,) of its answers as they are.
    """

    rows: RowArray
    ranks: Numbers


@dataclass(frozen=True, slots=True)
class Measured:
    """n queries: their `rows` in their own side, their `items` and `folds` (n,), each system.

    `stages` is None where no early exit was calibrated; `tops[level][size]` are the ranks at a
    level of each query's exact top 10 in a gallery of `size` sampled rows, (n, k); `head` is None
    where nothing is to be re-ranked. `found` are the first 10 rows of each plan's answers, (n, 10),
    in the side's numbers, -1 where there are fewer.
    """

    rows: RowArray
    items: RowArray
    systems: Mapping[str, Scored]
    stages: Stages | None
    tops: Mapping[int, Mapping[int, Counts]]
    head: Head | None = None
    found: Mapping[str, RowArray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def without_rows(self) -> Measured:
        """The same numbers without the rows."""
        return replace(self, head=None, found={})

    def with_systems(self, systems: Mapping[str, Scored]) -> Measured:
        """The same queries of other systems."""
        return replace(self, systems=systems)


class Measurer:
    """Measures queries of one modality against one gallery."""

    def __init__(
        self,
        gallery: Gallery,
        query: Modality,
        results: int,
        keeps: tuple[tuple[int, int], ...] = (),
        depth: int = 0,
    ) -> None:
        """Plans are those of a search for so many `results`; `keeps` are the cascade's widths
        (none: its own). The first `depth` rows of the cascade are to be re-ranked. Raises PlanError
        for widths that don't fit.
        """
        self.gallery = gallery
        self._depth = depth
        self._same = query == gallery.searched
        self.k = min(ANN_K, gallery.size - self._same)
        need = results + self._same
        self.plans: dict[PlanName, Plan] = {
            name: gallery.plan(
                PlanRequest(gallery.searched, query, need, name, keeps if name == "cascade" else ())
            )
            for name in PLANS
        }
        self.reranked: Plan | None = None
        if depth:  # as a service plans it: widths that are given may find fewer than `depth`
            deep = need if keeps else max(need, depth)
            request = PlanRequest(gallery.searched, query, deep, "cascade", keeps)
            self.reranked = gallery.plan(request)
        self.early: Plan | None = None
        if gallery.indexed:
            deep = max(need, DEPTH + self._same)
            early = gallery.plan(PlanRequest(gallery.searched, query, deep, early_exit=True))
            self.early = early if early.exits is not None else None
        self._place = np.argsort(np.random.default_rng(SEED).permutation(gallery.size))
        self._sizes = gallery_sizes(gallery.size) if gallery.indexed else [gallery.size]

    def measure(self, sampled: Sampled, items: RowArray, groups: RowArray) -> Measured | None:
        """Those queries that have a right row to find; None where none has.

        `items` and `groups` (n,) are those of all the queries.
        """
        kept, block = self.block(sampled, groups)
        if not len(kept):
            return None
        plans = {n: answers_of(plan, block, self.k, ANN_K) for n, plan in self.plans.items()}
        deep = self.reranked
        head = None if deep is None else answers_of(deep, block, self.k, self._depth)
        stages = None if self.early is None else _Traced(self.early, block, self.k)
        passes = Passes(block, self.k, self._place, self._sizes)
        more = [*(stages.answers if stages else ()), *([] if head is None else [head])]
        passes.run([*plans.values(), *more])
        return Measured(
            sampled.own_rows[kept],
            items[kept],
            {**passes.levels(), **{name: passes.scored(own) for name, own in plans.items()}},
            None if stages is None else stages.scored(passes),
            passes.tops,
            None if head is None else self._head(head, passes),
            {name: self._in_side(own.head) for name, own in plans.items()},
        )

    def _head(self, found: Answers, passes: Passes) -> Head:
        """What is to be re-ranked, of answers that were counted."""
        return Head(self._in_side(found.head), passes.scored(found).ranks)

    def _in_side(self, rows: RowArray) -> RowArray:
        return np.where(rows < 0, -1, rows + self.gallery.first)

    def block(self, sampled: Sampled, groups: RowArray) -> tuple[RowArray, Block]:
        """The queries that have a right row to find, by their numbers, and as a block."""
        gallery = self.gallery
        own = sampled.own_rows - gallery.first if self._same else np.full(len(groups), -1)
        pairs = zip(groups.tolist(), own.tolist(), strict=True)
        right = [gallery.right_rows(group, row) for group, row in pairs]
        kept = np.array([i for i, rows in enumerate(right) if len(rows)], dtype=np.int64)
        outputs = {level: out[kept] for level, out in sampled.queries.outputs.items()}
        rows = [right[i] for i in kept]
        return kept, Block(gallery, outputs, groups[kept], own[kept], rows)


def results_of(at: Sequence[int]) -> int:
    """How many results the searches ask for whose plans are measured: 10, or the largest K."""
    return max(*at, ANN_K)


def answers_of(plan: Plan, block: Block, k: int, depth: int = 0) -> Answers:
    """What a plan answers a block with; the best k rows of `Answers.first`, and of its `head`."""
    answers = Answers(block, block.gallery.finest, k, depth)
    for number, stages in traced(plan, block):
        answers.put(number, stages[-1])
    return answers


def traced(plan: Plan, block: Block) -> Iterator[tuple[int, list[Candidates]]]:
    """For every query what each stage of the plan found, the query itself left out."""
    for start in range(0, len(block), TOGETHER):
        outputs = {level: out[start : start + TOGETHER] for level, out in block.outputs.items()}
        found = block.gallery.trace(plan, outputs)
        for place in range(len(found[0])):
            number = start + place
            yield number, [block.seen(number, stage[place]) for stage in found]


class _Traced:
    """The answers of every stage of a plan that may stop early, and how sure it was of them."""

    def __init__(self, plan: Plan, block: Block, k: int) -> None:
        assert plan.exits is not None, "a plan that may stop early"
        self._levels = tuple(stage.level for stage in plan.stages)
        self.answers = [Answers(block, level, k) for level in self._levels]
        self._confidence = np.full((len(block), len(self._levels)), -np.inf)
        self._confidence[:, -1] = np.inf
        for number, stages in traced(plan, block):
            before: Candidates | None = None
            for place, found in enumerate(stages):
                self.answers[place].put(number, found)
                if place + 1 < len(stages) and len(found) >= plan.keep:
                    sure = plan.exits.confidence(self._levels[place], found, before)
                    self._confidence[number, place] = sure
                before = found

    def scored(self, passes: Passes) -> Stages:
        """Ranks and ANN recall of each stage."""
        each = [passes.scored(answers) for answers in self.answers]
        ranks = np.stack([one.ranks for one in each], axis=1)
        ann = np.stack([one.ann for one in each], axis=1)
        return Stages(self._levels, ranks, ann, self._confidence)


class Passes:
    """Reads every level's rows once and counts all that must be counted there, finest first."""

    def __init__(self, block: Block, k: int, place: RowArray, sizes: list[int]) -> None:
        """Row i is in the sampled galleries that are larger than its `place`."""
        self._block = block
        self._place = place
        self._best = {size: Tops(len(block), k) for size in sizes}
        self._ranks: dict[int, Numbers] = {}
        self._tied: dict[Answers, Counts] = {}
        self.tops: dict[int, dict[int, Counts]] = {}

    def run(self, answers: list[Answers]) -> None:
        """Count at every level, and for answers the wrong rows that tie with their best."""
        for level in sorted(self._block.gallery.rows, reverse=True):
            own = [some for some in answers if some.level == level]
            counter = Counter(
                self._block.asked(level),
                self._block.best_right(level),
                [some.best for some in own],
            )
            self._run(level, counter)
            self._ranks[level] = counter.above.astype(np.float64) + 1
            self._tied.update(zip(own, counter.tied, strict=True))

    def _run(self, level: int, counter: Counter) -> None:
        """Read one level's rows. The finest comes first: it says which rows are the best."""
        gallery = self._block.gallery
        finest = level == gallery.finest
        rankers = {} if finest else self._rankers(level)
        for part, scores in scored(gallery.rows[level], self._block.asked(level)):
            counter.add(scores, gallery.groups[part])
            place = self._place[part]
            for size, tops in self._best.items() if finest else ():
                inside = np.flatnonzero(place < size)
                own = scores if len(inside) == len(place) else scores[:, inside]
                tops.add(own, inside + part.start)
            for size, ranker in rankers.items():
                whole = size == gallery.size
                ranker.add(scores if whole else scores[:, place < size])
        if rankers:
            self.tops[level] = {size: ranker.ranks for size, ranker in rankers.items()}

    def _rankers(self, level: int) -> dict[int, Ranker]:
        """Where the best rows of each sampled gallery stand at a level: at the first, of all."""
        first = level == min(self._block.gallery.rows)
        sizes = sorted(self._best) if first else [max(self._best)]
        rankers = {}
        for size in sizes:
            rows = self._best[size].rows
            each = [self._block.score(level, i, own) for i, own in enumerate(rows)]
            rankers[size] = Ranker(np.stack(each))
        return rankers

    def levels(self) -> dict[str, Scored]:
        """Every level ranked exactly, coarse first."""
        found = {}
        for level in sorted(self._ranks):
            if level in self.tops:
                inside = self.tops[level][max(self._best)]
                ann = (inside <= inside.shape[1]).mean(axis=1)
            else:
                ann = np.ones(len(self._block))
            found[f"{LEVEL}{level}"] = Scored(self._ranks[level], ann)
        return found

    def scored(self, answers: Answers) -> Scored:
        """Ranks and ANN recall of answers that were counted."""
        kth = self._best[max(self._best)].scores[:, -1]
        return Scored(answers.ranks(self._tied[answers]), answers.ann(kth))


def gallery_sizes(rows: int) -> list[int]:
    """All rows, a half, a quarter and so on, down to LEAST_GALLERY."""
    sizes = [rows]
    while sizes[-1] // 2 >= LEAST_GALLERY:
        sizes.append(sizes[-1] // 2)
    return sizes
