"""Features of frozen towers, computed once and kept on disk.

A frozen tower says the same of the same input for ever, so what it says is kept under the hash of
the tower and found again by the hash of the input: an interrupted run goes on where it stopped, and
a corpus that grew costs only what is new. Chunks are safetensors files with a checksum, written
under another name first. The tower runs as the ONNX graph that will later be served, several times
faster here than in torch.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from hivlp.models.artifact import ImagePreparation, TextPreparation, fingerprint
from hivlp.models.encoder import RgbImage
from hivlp.models.errors import ImageError, TextError
from hivlp.models.levels import FloatArray
from hivlp.models.network.tower import Tower, check_exits
from hivlp.models.runtime.images import ImageLimits, decode_image
from hivlp.models.runtime.preprocess import preprocess
from hivlp.models.runtime.progress import Progress, say
from hivlp.models.runtime.texts import Tokenizer
from hivlp.models.training.graphs import Arrays, GraphRunner, Ports, sample_inputs, write_graph

TEXT_BATCH, IMAGE_BATCH = 64, 16
CHUNK_ITEMS = {"text": 4096, "image": 512}
KEY_BYTES = 32
LARGEST_GRAPH = 1_900_000_000
"""Bytes of weights in one graph: its format ends at 2 GiB, and the graph itself needs some."""
_CHUNK = "*.safetensors"
_CHECK = "check"
Prepared = tuple[Sequence[int], Arrays]
"""Rows that could be prepared, and their input arrays."""


@dataclass(frozen=True, slots=True)
class TowerExit:
    """A tower and the layers it is read after."""

    tower: Tower
    exits: tuple[int, ...]

    @property
    def key(self) -> str:
        """Hash of everything that shapes a feature: checkpoint, preparation, exits."""
        exits = str([(layer, self.tower.width(layer)) for layer in self.exits])
        return fingerprint(self.tower.identity() | {"exits": exits})


class FeatureCache:
    """Features by input hash, in one folder per tower. One writer at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._chunks: list[list[FloatArray]] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        for path in sorted(folder.glob(_CHUNK)):
            self._read(path)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def _read(self, path: Path) -> None:
        """Take in a chunk; one that was damaged is dropped and will be computed again."""
        try:
            arrays = load_file(path)
            if arrays.pop(_CHECK).tobytes() != _check(arrays):
                raise KeyError(_CHECK)
            keys, features = arrays.pop("keys"), [arrays[name] for name in sorted(arrays)]
        except (OSError, KeyError, ValueError, SafetensorError):
            path.unlink(missing_ok=True)
            return
        self._place(keys, features)

    def _place(self, keys: npt.NDArray[np.uint8], features: list[FloatArray]) -> None:
        chunk = len(self._chunks)
        self._chunks.append(features)
        self._places |= {key.tobytes(): (chunk, row) for row, key in enumerate(keys)}

    def add(self, keys: Sequence[bytes], features: list[FloatArray]) -> None:
        """Keep the features of some inputs, on disk and here: one (n, width) per exit."""
        packed = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES)
        name = hashlib.sha256(b"".join(keys)).hexdigest()[:32]
        part = self._folder / f"{name}.part"
        arrays = {"keys": packed} | {f"exit{i:02d}": f for i, f in enumerate(features)}
        save_file(arrays | {_CHECK: np.frombuffer(_check(arrays), dtype=np.uint8)}, part)
        part.replace(self._folder / f"{name}.safetensors")
        self._place(packed, features)

    def get(self, keys: Sequence[bytes]) -> list[FloatArray]:
        """Features in the order of `keys`: one (n, width) float32 per exit."""
        places = np.array([self._places[key] for key in keys], dtype=np.int64).reshape(-1, 2)
        found = []
        for i in range(len(self._chunks[0]) if self._chunks else 0):
            rows = np.empty((len(keys), self._chunks[0][i].shape[1]), dtype=np.float32)
            for chunk in np.unique(places[:, 0]):
                here = places[:, 0] == chunk
                rows[here] = self._chunks[chunk][i][places[here, 1]]
            found.append(rows)
        return found


def _check(arrays: Arrays) -> bytes:
    """sha256 over a chunk's names, kinds, shapes and numbers."""
    digest = hashlib.sha256()
    for name, rows in sorted(arrays.items()):
        digest.update(f"{name}{rows.dtype}{rows.shape}".encode())
        digest.update(np.ascontiguousarray(rows).data)
    return digest.digest()


class _AllExits(nn.Module):
    """A tower as one graph: every exit's pooled features."""

    def __init__(self, reading: TowerExit) -> None:
        super().__init__()
        self.tower, self.exits = reading.tower, reading.exits

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(self.tower.input_names, inputs, strict=True))
        return tuple(self.tower.features(named, self.exits))


def tower_runner(reading: TowerExit, *, threads: int) -> Callable[[Arrays], list[FloatArray]]:
    """A function from prepared inputs to one (n, width) float32 array per exit.

    A graph unless the tower is too large for one file of it; torch then, with torch's own threads.
    """
    check_exits(reading.tower, reading.exits)
    size = sum(
        value.numel() * value.element_size() for value in reading.tower.state_dict().values()
    )
    if size > LARGEST_GRAPH:
        return _torch_runner(reading)
    sample = sample_inputs(reading.tower)
    names = tuple(f"exit{i:02d}" for i in range(len(reading.exits)))
    axes = {} if reading.tower.modality == "image" else dict.fromkeys(sample, 1)
    ports = Ports(reading.tower.input_names, names, axes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tower.onnx"
        write_graph(_AllExits(reading), [sample[n] for n in ports.inputs], ports, path)
        runner = GraphRunner(path, threads=threads)

    def run(arrays: Arrays) -> list[FloatArray]:
        found = runner(arrays)
        return [found[name] for name in names]

    return run


def _torch_runner(reading: TowerExit) -> Callable[[Arrays], list[FloatArray]]:
    def run(arrays: Arrays) -> list[FloatArray]:
        inputs = {name: torch.from_numpy(arrays[name]) for name in reading.tower.input_names}
        with torch.no_grad():
            return [found.numpy() for found in reading.tower.features(inputs, reading.exits)]

    return run


def input_reader(tower: Tower) -> Callable[[Sequence[Any]], Arrays]:
    """A function from texts, or from paths of pictures, to a tower's inputs.

    Raises what reading them raises: TextError, ImageError, OSError.
    """
    spec = tower.preparation
    if isinstance(spec, TextPreparation):
        tokenizer = Tokenizer(tower.sources[0].parent, spec)
        return lambda texts: tokenizer.encode(list(texts)).inputs

    def read(paths: Sequence[Path]) -> Arrays:
        decoded = [decode_image(path.read_bytes(), ImageLimits()) for path in paths]
        return {"pixel_values": preprocess(decoded, spec)}

    return read


@dataclass(frozen=True, slots=True)
class FeatureReader:
    """Reads features of texts or pictures, from the cache where they are there."""

    reading: TowerExit
    folder: Path
    threads: int = 1

    def texts(self, texts: Sequence[str]) -> tuple[list[FloatArray], dict[int, str]]:
        """Features of the texts that can be read, in order, and of the others why not.

        One (k, width) float32 per exit, k readable texts; the reasons by position in `texts`.
        """
        keys = [hashlib.sha256(text.encode()).digest() for text in texts]
        spec = self.reading.tower.preparation
        assert isinstance(spec, TextPreparation)
        tokenizer = Tokenizer(self.reading.tower.sources[0].parent, spec)

        broken: dict[int, str] = {}

        def readable(row: int) -> bool:
            try:
                tokenizer.encode([texts[row]])
            except TextError as error:
                broken[row] = error.message
                return False
            return True

        def prepare(rows: Sequence[int]) -> Prepared:
            try:
                return rows, tokenizer.encode([texts[row] for row in rows]).inputs
            except TextError:
                kept = [row for row in rows if readable(row)]
            return kept, tokenizer.encode([texts[row] for row in kept]).inputs

        cache = self._cache(keys, prepare, [len(text) for text in texts], TEXT_BATCH)
        return _found(cache, keys, broken)

    def pictures(
        self, paths: Sequence[Path], *, limits: ImageLimits
    ) -> tuple[list[FloatArray], dict[int, str]]:
        """Features of the pictures that can be read, in order, and of the others why not.

        One (k, width) float32 per exit, k readable pictures; the reasons by position in `paths`.
        """
        keys = [hashlib.sha256(path.read_bytes()).digest() for path in paths]
        spec = self.reading.tower.preparation
        assert isinstance(spec, ImagePreparation)
        broken: dict[int, str] = {}

        def prepare(rows: Sequence[int]) -> Prepared:
            decoded: dict[int, RgbImage] = {}
            for row in rows:
                try:
                    decoded[row] = decode_image(paths[row].read_bytes(), limits)
                except ImageError as error:
                    broken[row] = error.message
            return list(decoded), {"pixel_values": preprocess(list(decoded.values()), spec)}

        cache = self._cache(keys, prepare, [0] * len(paths), IMAGE_BATCH)
        return _found(cache, keys, broken)

    def _cache(
        self,
        keys: Sequence[bytes],
        prepare: Callable[[Sequence[int]], Prepared],
        lengths: Sequence[int],
        batch: int,
    ) -> FeatureCache:
        """The tower's cache, holding every key that can be computed."""
        modality = self.reading.tower.modality
        cache = FeatureCache(self.folder / self.reading.key[:32])
        missing = list({key: row for row, key in enumerate(keys) if key not in cache}.values())
        if missing:
            self._fill(cache, keys, sorted(missing), prepare, lengths, batch)
        elif keys:
            say(f"{modality} features: all {len(keys)} kept from before")
        return cache

    def _fill(
        self,
        cache: FeatureCache,
        keys: Sequence[bytes],
        missing: Sequence[int],
        prepare: Callable[[Sequence[int]], Prepared],
        lengths: Sequence[int],
        batch: int,
    ) -> None:
        modality = self.reading.tower.modality
        run: Callable[[Arrays], list[FloatArray]] | None = None
        with Progress(f"{modality} features", len(missing), modality) as progress:
            for rows in _chunks(missing, CHUNK_ITEMS[modality]):
                # like lengths together: less padding, and so less work
                ordered = sorted(rows, key=lambda row: lengths[row])
                done: list[int] = []
                found: list[list[FloatArray]] = []
                for some in _chunks(ordered, batch):
                    kept, arrays = prepare(some)
                    if kept:
                        run = run or tower_runner(self.reading, threads=self.threads)
                        found.append(run(arrays))
                        done += kept
                    progress.step(len(some))
                if done:
                    stacked = [np.concatenate(parts) for parts in zip(*found, strict=True)]
                    cache.add([keys[row] for row in done], stacked)


def _found(
    cache: FeatureCache, keys: Sequence[bytes], broken: dict[int, str]
) -> tuple[list[FloatArray], dict[int, str]]:
    """What the cache holds, in order, and for every other position the reason."""
    reasons = {keys[row]: reason for row, reason in broken.items()}
    why = {row: reasons[key] for row, key in enumerate(keys) if key in reasons}
    return cache.get([key for key in keys if key in cache]), why


def _chunks(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
