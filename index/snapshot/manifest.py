"""What a snapshot says about itself: `manifest.json`, written last, sealed by its own hash.

Notable: `seal` is the sha256 of the file's bytes with the seal's 64 digits replaced by zeros, so a
changed byte anywhere in the manifest is found like one in any other file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hivlp.index.cascade import PlanName
from hivlp.index.early_exit import ExitRule, Gate
from hivlp.index.errors import SnapshotCorrupt
from hivlp.index.level_index import Codec, Family, Must, RowsType
from hivlp.index.plans import WidthKey, WidthPoint
from hivlp.models.artifact import UNSEALED, FileRecord, broken_seal, sealed_json
from hivlp.models.levels import GalleryKind, LevelSpec, Modality

FORMAT_VERSION = 5
MANIFEST_NAME = "manifest.json"


Loss = Literal["retrieval", "ann"]
"""What early exits keep: R@1 and R@10 of right answers, or ANN recall@10."""


Metric = Literal["cosine", "dot", "euclid", "manhattan"]
"""What imported vectors were ranked by where they came from."""
SourceKind = Literal["npy", "parquet", "qdrant"]
"""What they were read from."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LevelRecord(_Part):
    """One level of the gallery."""

    level: int = Field(ge=1)
    exit_layer: int = Field(ge=1)
    dim: int = Field(ge=1)


class SideRecord(_Part):
    """One gallery side: rows, the most rows of any item, and which levels are FAISS files.

    Since format 2: the codec of level 1's FAISS file, how rows are kept, and which levels have a
    graph (none in the scan family). Since format 3: the codec of level 1's second codes, which take
    a mask where its own don't (None: there are none).
    """

    rows: int = Field(ge=1)
    max_rows_per_item: int = Field(ge=1)
    faiss_levels: tuple[int, ...]
    family: Family = "scan"
    level1: Codec = "flat"
    rows_type: RowsType = "fp32"
    graph_levels: tuple[int, ...] = ()
    maskable: Codec | None = None


class DirectedRecord(_Part):
    """Something measured of one direction."""

    searched: Modality
    query: Modality


class WidthRecord(DirectedRecord):
    """Measured widths of one direction, plan, family and k.

    Chosen as the smallest at which one half of the query sample reaches `target`; the two recalls
    are ANN recall@k on that half and on the held-out one. Since format 2: `recall_lower`, which the
    recall of queries like the held-out ones is above with 95 % confidence, and for graphs the
    beams, `efs`, one a stage. `reached` is whether the held-out half reached the target.
    """

    plan: PlanName
    k: int = Field(ge=1)
    keeps: tuple[int, ...]
    target: float
    recall_chosen_on: float
    recall_held_out: float
    queries: int = Field(ge=1)
    family: Family = "scan"
    efs: tuple[int, ...] = ()
    recall_lower: float | None = None

    @property
    def reached(self) -> bool:
        """Whether queries it was not chosen on reached the target."""
        return self.recall_held_out >= self.target


class GateRecord(_Part):
    """How sure a level is: a logistic model over the signals of `early_exit.py`, in their order."""

    level: int = Field(ge=1)
    weights: tuple[float, ...]
    bias: float


class ExitTrial(_Part):
    """One set of signals, tried on queries that neither gates nor threshold had seen.

    `shares` of queries that stop by level; `saved`: share of the encoder's time; `recalls`: R@1,
    R@10 (None without right answers) and ANN recall@10 of the answers then given.
    """

    signal: str
    shares: dict[int, float]
    saved: float
    recalls: dict[str, float | None]


class ExitRecord(DirectedRecord):
    """When the cascade of one direction may stop early. Since format 3.

    `loss`: what is kept under `most_lost`, R@1 and R@10 of right answers or ANN recall@10;
    `threshold` None: stopping is never safe; `full`: recalls of the whole cascade, beside which
    those of `tried` are to be read.
    """

    signal: str
    loss: Loss
    most_lost: float
    threshold: float | None
    gates: tuple[GateRecord, ...]
    queries: int = Field(ge=1)
    full: dict[str, float | None]
    tried: tuple[ExitTrial, ...]

    @property
    def taken(self) -> ExitTrial:
        """What was measured for the signals that are used."""
        return next(trial for trial in self.tried if trial.signal == self.signal)

    @property
    def rule(self) -> ExitRule | None:
        """The rule, or None where stopping is never safe."""
        if self.threshold is None:
            return None
        gates = {record.level: Gate(record.weights, record.bias) for record in self.gates}
        return ExitRule(self.threshold, gates)


class RetrievalRecord(DirectedRecord):
    """R@K, by K, of held-out queries that have right answers, by exact search or a plan.

    Since format 3. Plans are those of the family that serves, at their widths for k = 10.
    """

    plan: PlanName
    queries: int = Field(ge=1)
    recalls: dict[int, float]


class PaceRecord(DirectedRecord):
    """Milliseconds of one query, encoder included, by either plan. Since format 3.

    Computed from medians of the stages measured one by one, the encoder running ahead of the
    search; `plan` is what `auto` takes.
    """

    plan: PlanName
    encode_ms: tuple[float, ...]
    cascade_ms: float
    funnel_ms: float


class OptionRecord(_Part):
    """A way to search one side that the build considered: measured on a sample of its rows and
    carried over to all `rows`, or (None) not measured.

    `recall` is ANN recall@10 of held-out queries, `search_ms` the whole search of one query,
    `after_ms` what of it comes after the last exit. Since format 3: `maskable`, the codes that it
    would keep beside level 1's for masked searches.
    """

    family: Family
    level1: Codec
    maskable: Codec | None = None
    rows: int
    recall: float | None = None
    search_ms: float | None = None
    after_ms: float | None = None
    build_s: float | None = None
    memory_bytes: int
    chosen: bool
    reason: str


class StatesRecord(_Part):
    """Token states of pictures that the version keeps for a re-ranker. Since format 5.

    `space` is the re-ranker's `states_space`; each picture has `tokens` states of `width` numbers,
    fp16: 2 x tokens x width bytes a row of image/states.npy.
    """

    space: str = Field(pattern=r"^[0-9a-f]{64}$")
    tokens: int = Field(ge=1)
    width: int = Field(ge=1)


class CorpusRecord(_Part):
    """Where the items came from: relative image references start at `root`."""

    kind: str
    root: str
    source: str
    failures: int = Field(ge=0)


class ImportRecord(_Part):
    """Vectors that came from elsewhere. Since format 4.

    `source` is what they were read from, `metric` what they were ranked by there; `rotated`: they
    were turned by rotation.npy, which was fitted on `fitted_on` of them, and queries must be too.
    `shares` of the vectors' squared length lie in the numbers of each level, coarse first;
    `lengths` are the least and the greatest there was before they were normalised. `model` is the
    name that was given for what made them.
    """

    source: SourceKind
    dim: int = Field(ge=1)
    metric: Metric
    rotated: bool
    fitted_on: int = Field(ge=1)
    shares: tuple[float, ...]
    lengths: tuple[float, float]
    model: str | None = None


class BuildRecord(_Part):
    """Settings that the build ran with. Since format 3: what the index must do, and how many
    threads built its graphs.
    """

    batch_size: int
    max_failures: float
    materialise: bool
    metadata_group: str | None = None
    sample: int
    target: float
    must: tuple[Must, ...] = ()
    build_threads: int = 1


class SegmentRecord(_Part):
    """One file of changes: from which sequence number to which, and how many of each kind."""

    file: str
    first: int = Field(ge=1)
    last: int = Field(ge=1)
    upserts: int = Field(ge=0)
    deletes: int = Field(ge=0)


class ChangesRecord(_Part):
    """Items that came or went beside what was built. Since format 4.

    `since` is the version that was built; changes up to the sequence number `folded` are in its
    levels, and are kept so that the next build from the same corpus knows of them. `columns` are
    metadata columns that only changed items have, by kind.
    """

    since: str
    folded: int = Field(default=0, ge=0)
    segments: tuple[SegmentRecord, ...]
    columns: dict[str, str] = {}

    @property
    def last(self) -> int:
        """The sequence number of the last change."""
        return max([self.folded, *(segment.last for segment in self.segments)])

    @property
    def pending(self) -> tuple[SegmentRecord, ...]:
        """The segments that are searched beside the levels."""
        return tuple(segment for segment in self.segments if segment.last > self.folded)


class SnapshotManifest(_Part):
    """Everything needed to open, check and search one version of an index.

    Formats 1 and 2 are read too: neither holds RaBitQ or maskable second codes, and format 1 no
    codes but flat ones, no graphs and no fp16 rows.
    """

    format_version: Literal[1, 2, 3, 4, 5] = 5
    seal: str = Field(default=UNSEALED, pattern=r"^[0-9a-f]{64}$")
    index: str
    version: str
    created_at: str
    items: int = Field(ge=0)
    sides: dict[Modality, SideRecord]
    levels: tuple[LevelRecord, ...] = Field(min_length=1)
    metric: Literal["inner_product"] = "inner_product"
    gallery: GalleryKind
    gallery_space: str = Field(pattern=r"^[0-9a-f]{64}$")
    query_encoder: str = Field(pattern=r"^[0-9a-f]{64}$")
    model: str
    artifact: str
    faiss_version: str
    corpus: CorpusRecord
    build: BuildRecord
    options: dict[Modality, tuple[OptionRecord, ...]] = {}
    calibrated_from: str | None = None
    imported: ImportRecord | None = None
    widths: tuple[WidthRecord, ...] = ()
    exits: tuple[ExitRecord, ...] = ()
    retrieval: tuple[RetrievalRecord, ...] = ()
    paces: tuple[PaceRecord, ...] = ()
    gate: dict[str, float] = {}
    states: StatesRecord | None = None
    changes: ChangesRecord | None = None
    amended_from: str | None = None
    files: dict[str, FileRecord]

    @property
    def built_files(self) -> dict[str, FileRecord]:
        """The files of what was built: all but the changes."""
        return {name: own for name, own in self.files.items() if not name.startswith("changes/")}

    @property
    def specs(self) -> tuple[LevelSpec, ...]:
        """The levels, coarse first."""
        return tuple(LevelSpec(r.level, r.exit_layer, r.dim) for r in self.levels)

    def width_table(self, family: Family = "scan") -> dict[WidthKey, tuple[WidthPoint, ...]]:
        """Measured widths of a family by (searched, query, plan), ascending in k."""
        return width_table(self.widths, family)

    def served_plans(self) -> dict[tuple[Modality, Modality], PlanName]:
        """What `auto` takes, by (searched, query)."""
        return {(record.searched, record.query): record.plan for record in self.paces}

    def exit_rules(self) -> dict[tuple[Modality, Modality], ExitRule]:
        """When the cascade may stop early, by (searched, query)."""
        rules = {(record.searched, record.query): record.rule for record in self.exits}
        return {key: rule for key, rule in rules.items() if rule is not None}


def width_table(
    records: Iterable[WidthRecord], family: Family
) -> dict[WidthKey, tuple[WidthPoint, ...]]:
    """Measured widths of a family by (searched, query, plan), ascending in k."""
    table: dict[WidthKey, tuple[WidthPoint, ...]] = {}
    for record in sorted(records, key=lambda record: record.k):
        if record.family == family:
            key = (record.searched, record.query, record.plan)
            point = WidthPoint(record.k, record.keeps, record.efs)
            table[key] = (*table.get(key, ()), point)
    return table


def write_manifest(folder: Path, manifest: SnapshotManifest) -> None:
    """Seal and write `folder`/manifest.json."""
    (folder / MANIFEST_NAME).write_bytes(sealed_json(manifest))


def read_manifest(folder: Path, index: str, version: str) -> SnapshotManifest:
    """Read, check the seal, and parse. Raises SnapshotCorrupt naming manifest.json."""
    try:
        data = (folder / MANIFEST_NAME).read_bytes()
    except OSError as error:
        reason = f"missing or unreadable: {error.strerror}"
        raise SnapshotCorrupt(index, version, MANIFEST_NAME, reason) from error
    if (trouble := broken_seal(data)) is not None:
        raise SnapshotCorrupt(index, version, MANIFEST_NAME, trouble)
    try:
        manifest = SnapshotManifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        raise SnapshotCorrupt(index, version, MANIFEST_NAME, reason) from error
    if (manifest.index, manifest.version) != (index, version):
        reason = f"belongs to index {manifest.index!r}, version {manifest.version!r}"
        raise SnapshotCorrupt(index, version, MANIFEST_NAME, reason)
    return manifest
