"""A fixed set of ratios to peers on this CPU, written by the machine's name, so that two releases can be compared.

    python bench/tracked.py [--rounds 3] [--machine NAME] [--out FILE]

The rows are those of `bench/cpu.py`, above 1 where we are faster. Times are not kept: they say more about the machine's
day than about the code. Each row is measured in several rounds; how far they lie apart is its noise, and is kept too.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
from pathlib import Path

import cpu
import numpy as np
import torch

import clearhead as ch

RESULTS = Path(__file__).parent / "results"


class Tracked(cpu.Report):
    """Ratios by the name of their row; what is no ratio to a peer is printed and not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.ratios: dict[str, float] = {}
        self.section = ""

    def title(self, text: str) -> None:
        super().title(text)
        self.section = re.split(r"[:(,]| against | alone", text)[0].strip()

    def add(self, what: str, peer: str, ratio: float, target: str, **more: object) -> None:
        super().add(what, peer, ratio, target, **more)
        if peer and peer != "chosen":  # the small example's rows are named by their time
            what = "" if what.endswith("µs") else " ".join(what.split())
            self.ratios[f"{self.section}: {what} / {peer}".replace(":  /", " /")] = ratio


def measured() -> dict[str, float]:
    """One round of every row."""
    report = Tracked()
    cpu.forward(report, (512, 1024))
    cpu.others(report)
    cpu.backward(report, (512,))
    cpu.decode(report)
    cpu.small(report)
    return report.ratios


def machine() -> str:
    """What the processor calls itself, and how many threads are used."""
    try:
        said = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stdout
        names = re.findall(r"^Model name:\s*(.+)$", said, re.MULTILINE)
    except (OSError, subprocess.CalledProcessError):
        names = []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} x {torch.get_num_threads()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each row is measured")
    parser.add_argument("--machine", default=machine(), help="the name that the file has; this machine's own")
    parser.add_argument("--out", type=Path, help="the file; by the machine's name in bench/results/")
    options = parser.parse_args()
    rounds = [measured() for _ in range(options.rounds)]
    rows = {
        name: {
            "ratio": round(statistics.median(one[name] for one in rounds), 4),
            "low": round(min(one[name] for one in rounds), 4),
            "high": round(max(one[name] for one in rounds), 4),
        }
        for name in rounds[0]
    }
    used = {"clearhead": ch.__version__, "numpy": np.__version__, "torch": torch.__version__}
    place = options.out or RESULTS / f"{re.sub('[^a-z0-9]+', '-', options.machine.lower()).strip('-')}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    page = {"machine": options.machine, "rounds": options.rounds, "versions": used, "rows": rows}
    place.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\n{len(rows)} ratios in {place}")


if __name__ == "__main__":
    main()
