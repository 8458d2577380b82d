"""Two files of ratios, before and after: what changed, what of it is beyond noise, and whether anything became slower.

    python bench/compare.py BEFORE.json AFTER.json [--limit 0.1]

It reads what `make bench` writes, and what `bench/cpu.py --json` writes, which says nothing about noise. A row is
slower where it lost more than the limit and its rounds do not overlap those before. Ends with 1 if any row is slower,
with 2 for files that cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """A ratio that is better the larger it is, and the range of its rounds."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Change:
    """One row before and after."""

    name: str
    before: Row
    after: Row
    limit: float

    @property
    def change(self) -> float:
        """The part by which the ratio grew; below 0 where it shrank."""
        return self.after.ratio / self.before.ratio - 1

    @property
    def verdict(self) -> str:
        """What it means: nothing where rounds overlap, or where it is within the limit."""
        apart = self.after.high < self.before.low or self.after.low > self.before.high
        if not apart or abs(self.change) <= self.limit:
            return ""
        return "slower" if self.change < 0 else "faster"


class Unreadable(Exception):
    """A file that holds no ratios, in words."""


def read(path: Path) -> tuple[str, dict[str, Row]]:
    """The machine of a file, and its rows by name."""
    try:
        page = json.loads(path.read_text(encoding="utf-8"))
        rows = _tracked(page["rows"]) if isinstance(page["rows"], dict) else _reported(page["rows"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unreadable(f"{path} holds no ratios: {type(error).__name__}: {error}") from None
    if not rows:
        raise Unreadable(f"{path} holds no ratios")
    return str(page.get("machine") or "a machine without a name"), rows


def _tracked(rows: dict[str, Any]) -> dict[str, Row]:
    return {name: Row(float(row["ratio"]), float(row["low"]), float(row["high"])) for name, row in rows.items()}


def _reported(rows: list[dict[str, Any]]) -> dict[str, Row]:
    """Rows of a report, one round each: those that should be small are turned over, those with no peer left out."""
    found: dict[str, Row] = {}
    for row in rows:
        ratio = float(row["ratio"])
        if not row["peer"] or "µs" in row["what"] or not (math.isfinite(ratio) and ratio > 0):
            continue
        name = f"{' '.join(row['what'].split())} / {row['peer']}"
        count = sum(one == name or one.startswith(f"{name} #") for one in found)
        ratio = 1 / ratio if str(row["target"]).startswith("≤") else ratio
        found[f"{name} #{count + 1}" if count else name] = Row(ratio, ratio, ratio)
    return found


def compared(before: dict[str, Row], after: dict[str, Row], limit: float) -> list[Change]:
    """The rows that both have, the greatest loss first."""
    changes = [Change(name, row, after[name], limit) for name, row in before.items() if name in after]
    return sorted(changes, key=lambda one: one.change)


def table(changes: list[Change]) -> str:
    """A line for each."""
    width = max(len(one.name) for one in changes)
    lines = [f"{'':<{width}}  before   after  change"]
    for one in changes:
        numbers = f"{one.before.ratio:6.2f}  {one.after.ratio:6.2f}  {one.change:+6.1%}"
        lines.append(f"{one.name:<{width}}  {numbers}  {one.verdict}".rstrip())
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--limit", type=float, default=0.1, help="the part of a ratio that may be lost; 0.1")
    options = parser.parse_args(arguments)
    try:
        (here, before), (there, after) = read(options.before), read(options.after)
    except Unreadable as error:
        print(error, file=sys.stderr)
        return 2
    changes = compared(before, after, options.limit)
    if not changes:
        print(f"{options.before} and {options.after} have no row in common", file=sys.stderr)
        return 2
    if here != there:
        print(f"Two machines, {here} and {there}: what differs may be theirs.\n")
    print(table(changes))
    for path, rows, other in ((options.before, before, after), (options.after, after, before)):
        if alone := [name for name in rows if name not in other]:
            print(f"\nOnly in {path}: {', '.join(alone)}")
    slower = [one for one in changes if one.verdict == "slower"]
    print(f"\n{len(changes)} rows, {len(slower)} slower by more than {options.limit:.0%} and beyond noise")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
