"""Karpathy's split of COCO, Flickr8k and Flickr30k: one JSON file, pictures in folders beside it.

The file may be hundreds of megabytes: it is read picture by picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hivlp.index.build.items import BadItem, Item
from hivlp.index.build.readers.base import PLAIN, Corpus, CorpusOptions
from hivlp.index.build.readers.files import Files, files_at
from hivlp.index.build.readers.tables import item_or_bad
from hivlp.index.errors import CorpusError
from hivlp.index.pictures import Root

LIST = "images"
MAX_DEPTH = 32
OWN_FIELDS = ("split", "imgid", "cocoid")


class KarpathyCorpus(Corpus):
    """`{"images": [{filepath, filename, imgid, cocoid, split, sentences: [{raw}]}]}`.

    The id is `cocoid`, else `imgid`, else the path. Pictures lie below `root` by `filepath` and
    `filename`. With a `split`, only its pictures; all have theirs as metadata.
    """

    kind = "karpathy"

    def __init__(
        self, source: Root, files: Files, name: str, root: Root, options: CorpusOptions = PLAIN
    ) -> None:
        super().__init__(source, files_at(root).root, options)
        self._files = files
        self._name = name

    def _read(self) -> Iterator[Item | BadItem]:
        wanted = self.options.split
        for number, found in enumerate(self._images()):
            place = f"image {number}"
            row = _row(found)
            if isinstance(row, str):
                yield BadItem(place, None, row)
            elif wanted in ("all", row.get("split")):
                yield item_or_bad(row, self.root, "", place, PLAIN)

    def _images(self) -> Iterator[Any]:
        import ijson

        label = f"{self._files.root}/{self._name}"
        number = 0
        try:
            with self._files.open(self._name) as stream:
                for found in _elements(ijson.basic_parse(stream, use_float=True), LIST):
                    yield found
                    number += 1
        except (OSError, ValueError, ijson.JSONError) as error:
            raise CorpusError(label, f"not readable as JSON at image {number}: {error}") from error
        if not number:
            raise CorpusError(label, f"no list `{LIST}` as a Karpathy split JSON has")


def _elements(events: Iterable[tuple[str, Any]], name: str) -> Iterator[Any]:
    """The elements of a list that a JSON object has under a name, from the events of a parser.

    `ijson.items` does the same, and ends the process where lists lie too deep in one another.
    Raises ValueError for those.
    """
    from ijson.common import ObjectBuilder

    depth, key, inside = 0, None, False
    builder = ObjectBuilder()
    for event, value in events:
        ends = event in ("end_map", "end_array")
        depth += (event in ("start_map", "start_array")) - ends
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if not inside:
            key = value if event == "map_key" and depth == 1 else key
            inside = event == "start_array" and depth == 2 and key == name
        elif ends and depth == 1:
            inside = False
        else:
            builder.event(event, value)
            if depth == 2:
                yield builder.value
                builder = ObjectBuilder()


def _row(found: Any) -> dict[str, Any] | str:
    """The picture as a table's row, or what is wrong with it."""
    if not isinstance(found, Mapping):
        return f"an object is expected, got {type(found).__name__}"
    folder, file, sentences = (found.get(k) for k in ("filepath", "filename", "sentences"))
    if not isinstance(file, str) or not isinstance(folder, str | None):
        return "no `filename`, or no text as `filepath`"
    if not isinstance(sentences, list):
        return "no list `sentences`"
    captions = [s.get("raw") if isinstance(s, Mapping) else None for s in sentences]
    if not all(isinstance(caption, str) for caption in captions):
        return "a sentence without the text `raw`"
    metadata = {name: found[name] for name in OWN_FIELDS if name in found}
    own_id = next((found[n] for n in ("cocoid", "imgid") if found.get(n) is not None), None)
    image = f"{folder}/{file}" if folder else file
    return {**metadata, "id": own_id, "image": image, "captions": captions}
