"""Comparing ratios of two releases: what is beyond noise and limit is flagged, and a loss ends with 1."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))
import compare  # noqa: E402  # it lies beside what it compares

RESULTS = ROOT / "bench" / "results"


def written(folder: Path, name: str, machine: str = "one", **rows: tuple[float, float, float]) -> str:
    path = folder / f"{name}.json"
    kept = {row: dict(zip(("ratio", "low", "high"), numbers, strict=True)) for row, numbers in rows.items()}
    path.write_text(json.dumps({"machine": machine, "rows": kept}))
    return str(path)


def test_a_loss_beyond_noise_and_limit_ends_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(tmp_path, "a", kept=(2.0, 1.9, 2.1), lost=(2.0, 1.9, 2.1), won=(1.0, 0.9, 1.1), gone=(1, 1, 1))
    after = written(tmp_path, "b", kept=(1.95, 1.9, 2.0), lost=(1.5, 1.4, 1.6), won=(1.5, 1.4, 1.6), new=(1, 1, 1))
    assert compare.main([before, after]) == 1
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines()[1:4]] == [
        ["lost", "2.00", "1.50", "-25.0%", "slower"],
        ["kept", "2.00", "1.95", "-2.5%"],
        ["won", "1.00", "1.50", "+50.0%", "faster"],
    ]
    assert f"Only in {before}: gone" in said
    assert f"Only in {after}: new" in said
    assert said.endswith("3 rows, 1 slower by more than 10% and beyond noise\n")
    assert "Two machines" not in said


@pytest.mark.parametrize(
    ("ratio", "low", "high", "limit", "status"),
    [
        (1.5, 1.4, 1.95, "0.1", 0),  # the rounds overlap: noise
        (1.5, 1.4, 1.6, "0.3", 0),  # within the limit
        (1.5, 1.4, 1.6, "0.2", 1),
        (1.85, 1.84, 1.86, "0.1", 0),  # apart, and little
        (1.85, 1.84, 1.86, "0.05", 1),
    ],
)
def test_noise_and_limit(tmp_path: Path, ratio: float, low: float, high: float, limit: str, status: int) -> None:
    before, after = written(tmp_path, "a", row=(2.0, 1.9, 2.1)), written(tmp_path, "b", row=(ratio, low, high))
    assert compare.main([before, after, "--limit", limit]) == status


def test_another_machine_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = written(tmp_path, "a", row=(1, 1, 1)), written(tmp_path, "b", "another", row=(1, 1, 1))
    assert compare.main([before, after]) == 0
    assert capsys.readouterr().out.startswith("Two machines, one and another: what differs may be theirs.")


def test_files_without_ratios_are_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = written(tmp_path, "a", row=(1, 1, 1))
    for text in ("{", "[]", "{}", '{"rows": {}}', '{"rows": [{"what": "x"}]}'):
        (tmp_path / "bad.json").write_text(text)
        assert compare.main([good, str(tmp_path / "bad.json")]) == 2
        assert "bad.json holds no ratios" in capsys.readouterr().err
    assert compare.main([good, str(tmp_path / "none.json")]) == 2
    assert compare.main([good, written(tmp_path, "b", other=(1, 1, 1))]) == 2
    assert "have no row in common" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_committed_can_be_read(path: Path, tmp_path: Path) -> None:
    if path.stem.startswith("gpu"):  # times and targets of another kind
        with pytest.raises(compare.Unreadable, match="holds no ratios"):
            compare.read(path)
        return
    machine, rows = compare.read(path)
    assert machine
    assert all(0 < row.low <= row.ratio <= row.high for row in rows.values())
    assert compare.main([str(path), str(path)]) == 0
    half = {name: (row.ratio / 2, row.low / 2, row.high / 2) for name, row in rows.items()}
    worse = tmp_path / "worse.json"
    kept = {name: dict(zip(("ratio", "low", "high"), numbers, strict=True)) for name, numbers in half.items()}
    worse.write_text(json.dumps({"machine": machine, "rows": kept}))
    assert compare.main([str(path), str(worse), "--limit", "0.49"]) == 1


def test_rows_that_should_be_small_are_turned_over() -> None:
    rows = [
        {"what": "time of  observe", "peer": "attention", "ratio": 2.0, "target": "≤ 1.80"},
        {"what": "MB", "peer": "", "ratio": 12.0, "target": "≤ 32.00"},
        {"what": "  8.5 µs", "peer": "SDPA", "ratio": 3.0, "target": ""},
        {"what": "worst", "peer": "SDPA", "ratio": 1.5, "target": ""},
        {"what": "worst", "peer": "SDPA", "ratio": 1.25, "target": ""},
    ]
    found = {name: row.ratio for name, row in compare._reported(rows).items()}
    assert found == {"time of observe / attention": 0.5, "worst / SDPA": 1.5, "worst / SDPA #2": 1.25}
