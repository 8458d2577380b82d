"""How fast each way of computing a call is on a GPU: a table that ships, what was measured here, and measuring.

A way is a kernel or, of a kernel that has several, one of its back ends. Rates are in TFLOP/s of whole calls, launching
included, so that they can be compared over sizes.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.kernels.contract import Passes
from clearhead.kernels.gpu.tuning import FEW

Rates = Mapping[str, float]

BUDGET = 0.05  # seconds that measuring may add to a call
LONG = 5e11  # FLOPs of a call that is measured, at most: two milliseconds
LONGEST = 16384  # positions of such a call; from there on rates are the same
NEAR = 1.5  # distance of sizes, in powers of two, up to which what was measured here holds
LISTED = ("H100", "H200")  # GPUs that the shipped table, of an H200, is taken for
MOST = 4096  # rows that are kept on disk
REPEATS = 3  # calls that are timed together


class Sizes(NamedTuple):
    """What the speed of a plain call depends on."""

    passes: Passes
    causal: bool
    head_dim: int
    value_dim: int
    group: int  # of query heads over a key head
    rows: int  # batch rows times heads
    queries: int
    keys: int

    @property
    def work(self) -> float:
        """FLOPs of a call; with gradients there are seven products where the output alone has two."""
        pairs = self.rows * self.queries * self.keys * (0.5 if self.causal else 1.0)
        return 2.0 * pairs * (self.head_dim + self.value_dim) * (1.0 if self.passes == "forward" else 3.5)

    def distance(self, other: Sizes) -> float:
        """How far other sizes are, in powers of two; infinite where they are of another kind."""
        few = (self.queries <= FEW, other.queries <= FEW)
        if self.passes != other.passes or few[0] != few[1] or (self.causal != other.causal and not any(few)):
            return math.inf
        steps = [
            (1.0, self.rows, other.rows),
            (1.0, min(self.queries, LONGEST), min(other.queries, LONGEST)),
            (1.0, min(self.keys, LONGEST), min(other.keys, LONGEST)),
            (2.0, self.head_dim, other.head_dim),
            (2.0, self.value_dim, other.value_dim),
            (0.5, self.group, other.group),
        ]
        return sum(weight * abs(math.log2(max(a, 1) / max(b, 1))) for weight, a, b in steps)


class Found(NamedTuple):
    """Rates by way, and where they are from, in words."""

    rates: Rates
    source: str


class Speeds:
    """What is known of one device: rows that ship, rows that were measured here, and the answers given."""

    def __init__(self, device: str, file: Path | None = None) -> None:
        self.device = device
        self.file = file
        self.shipped = shipped() if any(name in device for name in LISTED) else {}
        self.measured = read(file, device) if file is not None else {}
        self.answers: dict[Any, Found | None] = {}

    def known(self, sizes: Sizes, ways: tuple[str, ...]) -> Found | None:
        """The rates of these ways for such sizes, as they were measured; None where they were not."""
        asked = (sizes, ways)
        if asked in self.answers:
            return self.answers.get(asked)
        here = nearest(self.measured, sizes, ways, NEAR)
        found = None if here is None else Found(here, f"measured on this {self.device}")
        if found is None:
            listed = nearest(self.shipped, sizes, ways, math.inf)
            found = None if listed is None else Found(listed, "measured on an NVIDIA H200")
        if len(self.answers) >= MOST:
            self.answers = {}
        self.answers[asked] = found
        return found

    def learn(self, sizes: Sizes, rates: Rates) -> None:
        """Take in what was measured, and leave it on disk for the next process."""
        # a new table: other threads may be reading the old one
        self.measured = {**self.measured, sizes: {**self.measured.get(sizes, {}), **rates}}
        self.answers = {}
        if self.file is not None:
            write(self.file, self.device, self.measured)


def nearest(rows: Mapping[Sizes, Rates], sizes: Sizes, ways: tuple[str, ...], most: float) -> Rates | None:
    """The rates of the row that is nearest among those that know one of the ways; None where that is too far.

    That a way refused to run is known of the very sizes alone.
    """
    near = [(sizes.distance(other), known) for other, known in rows.items() if any(known.get(way) for way in ways)]
    far, rates = min(near, key=lambda row: row[0], default=(math.inf, {}))
    rates = rows.get(sizes) or rates
    if math.isinf(far) or far > most:
        return None
    return {way: rates[way] for way in ways if way in rates and (rates[way] or not far)}


@cache
def shipped() -> dict[Sizes, Rates]:
    """The rows beside this file, from `bench/speeds.py`."""
    return rows_of(json.loads(Path(__file__).with_name("speeds.json").read_text(encoding="utf-8"))["rows"])


def rows_of(entries: list[dict[str, Any]]) -> dict[Sizes, Rates]:
    """Rows as they lie in a file."""
    return {Sizes(**{name: entry[name] for name in Sizes._fields}): entry["rates"] for entry in entries}


def cache_file() -> Path | None:
    """Where rates are kept: beside what Triton compiled; None for who has no home."""
    given = os.environ.get("TRITON_CACHE_DIR")
    if given:
        return Path(given) / "clearhead-speeds.json"
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return None if home == "~" else Path(home) / ".triton" / "cache" / "clearhead-speeds.json"


def versions() -> str:
    """What rates depend on besides the device."""
    torch, ours = sys.modules["torch"], sys.modules["clearhead"]
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    cudnn = torch.backends.cudnn.version()
    return f"torch {torch.__version__}, cuDNN {cudnn}, triton {triton}, clearhead {ours.__version__}"


def read(file: Path, device: str) -> dict[Sizes, Rates]:
    """The rows of a device; nothing where there is no file, or none that can be read."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))[device]
        return rows_of(known["rows"]) if known["versions"] == versions() else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write(file: Path, device: str, rows: Mapping[Sizes, Rates]) -> None:
    """Write the rows of a device beside those of others; a folder that cannot be written to is left alone."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if not isinstance(known, dict):
        known = {}
    latest = list(rows.items())[-MOST:]
    entries = [
        {**sizes._asdict(), "rates": {way: round(rate, 3) for way, rate in rates.items()}} for sizes, rates in latest
    ]
    known[device] = {"versions": versions(), "rows": entries}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        number, part = tempfile.mkstemp(dir=file.parent)  # who reads meanwhile finds the old rows or the new ones
        with open(number, "w", encoding="utf-8") as opened:
            opened.write(json.dumps(known))
        os.replace(part, file)
    except OSError:
        pass


@cache
def speeds_of(device: Any) -> Speeds:
    """What is known of a device."""
    return Speeds(sys.modules["torch"].cuda.get_device_name(device), cache_file())


def measure(sizes: Sizes, calls: Mapping[str, Callable[[], Any]], synchronize: Callable[[], None]) -> dict[str, float]:
    """TFLOP/s of each way; 0 for one that refuses to run. What it takes to start one for the first time is not counted.

    They take turns, so that what slows the device down for a while slows down all, for as long as the budget lasts.
    """
    torch = sys.modules["torch"]
    able: dict[str, Callable[[], Any]] = {}
    for way, call in calls.items():
        try:
            call()
            synchronize()
        except (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)):
            raise
        except Exception:  # gradients are not asked for when a back end says what it takes; a kernel may not compile
            continue
        able[way] = call
    times: dict[str, float] = dict.fromkeys(able, math.inf)
    end = time.perf_counter() + BUDGET
    while able and time.perf_counter() < end:
        for way, call in able.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(REPEATS):
                call()
            synchronize()
            times[way] = min(times[way], (time.perf_counter() - start) / REPEATS)
            if time.perf_counter() > end and all(map(math.isfinite, times.values())):
                break
    return {way: sizes.work / times[way] / 1e12 if way in times else 0.0 for way in calls}
