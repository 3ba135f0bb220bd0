"""Searches as library calls, in one process and without HTTP: what `service.py alone` times."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from measure import interleaved
from timed_encoder import TimedEncoder, picture_of
from timed_home import MEASURED_WITH, NAME, QUERIES, Given, K

from hivlp.models.levels import Modality
from hivlp.models.runtime.images import decode_image
from hivlp.service.queries import ImageQuery, Setting, TextQuery, image_limits, text_query
from hivlp.service.schemas import ImageSearch, TextSearch
from hivlp.service.serving import ServedVersion
from hivlp.service.settings import Limits, Settings
from hivlp.service.timeline import Timeline
from hivlp.service.work import find

TIMES = {"text": 200, "image": 20}
Search = Callable[[int], object]
Query = TextQuery | ImageQuery


class Subject:
    """An open index and the queries it is asked, by kind; `whole`: encoders without exits."""

    def __init__(
        self,
        served: ServedVersion,
        queries: Mapping[Modality, Sequence[Query]],
        ahead: ThreadPoolExecutor,
        whole: Mapping[Modality, TimedEncoder],
    ) -> None:
        self._served, self._queries, self._ahead = served, queries, ahead
        self._exits: defaultdict[str, list[int]] = defaultdict(list)
        self.whole = whole

    @property
    def kinds(self) -> tuple[Modality, ...]:
        """What it can be asked with."""
        return tuple(self._queries)

    def query(self, kind: Modality, number: int) -> Query:
        """One after the other, from the first again after the last."""
        of_kind = self._queries[kind]
        return of_kind[number % len(of_kind)]

    def searching(self, kind: Modality, *, overlap: bool = False, **asked: Any) -> Search:
        """A whole search by these options."""

        def search(number: int) -> object:
            query = self.query(kind, number)
            options = {"index": NAME, "k": K, **asked}
            wanted = (
                TextSearch(query=query.text, **options)
                if isinstance(query, TextQuery)
                else (ImageSearch(**options))
            )
            own = Setting(self._served.searcher, self._served.model, "image", Limits(), Timeline())
            found = find(query, wanted, own, self._ahead if overlap else None)
            if asked.get("early_exit"):
                self._exits[kind].append(found["exit_level"])
            return found

        return search

    def encoding(self, kind: Modality, encoder: Any = None) -> Search:
        """The encoder alone: every level, from the prepared item on."""
        encoder = encoder or self._served.model.encoders[kind]

        def encode(number: int) -> object:
            query = self.query(kind, number)
            item = query.text if isinstance(query, TextQuery) else self._picture(query)
            return list(encoder.encode(encoder.prepare([item])))

        return encode

    def stopped_early(self, kind: Modality) -> float:
        """The share of early-exit searches that ended before the last level."""
        last = max(spec.level for spec in self._served.searcher.info.levels)
        return float(np.mean([level < last for level in self._exits[kind]]))

    @staticmethod
    def _picture(query: ImageQuery) -> np.ndarray:
        return decode_image(query.data, image_limits(Limits()))


def library_times(subject: Subject, kind: Modality, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each contender, interleaved."""
    contenders = {
        "encoder alone": subject.encoding(kind),
        "cascade, overlapped": subject.searching(kind, plan="cascade", overlap=True),
        "cascade, in turn": subject.searching(kind, plan="cascade"),
        "funnel": subject.searching(kind, plan="funnel"),
        "early exit": subject.searching(kind, plan="cascade", overlap=True, early_exit=True),
        "early exit, in turn": subject.searching(kind, plan="cascade", early_exit=True),
    }
    if kind in subject.whole:
        contenders["encoder as one graph"] = subject.encoding(kind, subject.whole[kind])
    return interleaved(contenders, TIMES[kind] * rounds)


@contextmanager
def synthetic_subject(rows: int, *, instant: bool = False) -> Iterator[Subject]:
    """The index of `timed_home`, asked with its timed encoders."""
    from timed_servers import load

    given = Given.of(rows)
    settings = Settings(home=given.home, indexes=(NAME,))
    queries: dict[Modality, Sequence[Query]] = {
        "text": [text_query(f"q{n}", Limits()) for n in range(MEASURED_WITH, QUERIES)],
        "image": [ImageQuery(picture_of(n)) for n in range(MEASURED_WITH, MEASURED_WITH + 64)],
    }
    whole: dict[Modality, TimedEncoder] = {kind: given.one_graph(kind) for kind in queries}
    with (
        load(given, settings, instant=instant).lease(NAME) as served,
        ThreadPoolExecutor(1) as ahead,
    ):
        yield Subject(served, queries, ahead, whole)


@contextmanager
def demo_subject(home: Path, index: str) -> Iterator[Subject]:
    """An index of the home as it is, asked with its captions, and with its pictures turned."""
    from hivlp.service.loading import load_catalogue

    catalogue = load_catalogue(Settings(home=home, indexes=(index,)))
    with catalogue.lease(index) as served, ThreadPoolExecutor(1) as ahead:
        assert served.snapshot is not None
        rng = np.random.default_rng(0)
        sides = served.snapshot.sides
        texts = [text.as_py() for text in sides["text"].texts]
        some = rng.choice(len(texts), min(2_000, len(texts)), replace=False)
        pictures = [ref for ref in served.snapshot.catalogue.images() if ref is not None]
        refs = rng.choice(pictures, 200, replace=False).tolist()
        queries: dict[Modality, Sequence[Query]] = {
            "text": [text_query(texts[row], Limits()) for row in some],
            "image": [ImageQuery(_turned(served.pictures.read(ref))) for ref in refs],
        }
        yield Subject(served, queries, ahead, {})


def _turned(data: bytes) -> bytes:
    """A picture turned a little and on white, so that it is no longer the one in the gallery."""
    from PIL import Image

    picture = Image.open(io.BytesIO(data)).convert("RGBA").rotate(12, Image.Resampling.BICUBIC)
    out = io.BytesIO()
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture)
    white.convert("RGB").save(out, "PNG", compress_level=1)
    return out.getvalue()
