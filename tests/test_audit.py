"""The audit: what it says of anybody's attention, where it says that an error sits, and what it costs to ask."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from libraries import LIBRARIES
from typer.testing import CliRunner

import clearhead as ch
from clearhead.approximations.method import crossover, exact
from clearhead.approximations.spelling import METHODS, read_method
from clearhead.cli import app

RUN = CliRunner()


def drawn(*shape: int, dtype: str = "float32") -> Any:
    return np.random.default_rng(0).standard_normal((3, *shape)).astype(dtype)


def half_sums(q: np.ndarray, k: np.ndarray, v: np.ndarray, **_: Any) -> np.ndarray:
    """Attention whose sums over keys are kept in float16, as a kernel in low precision may, a tile at a time."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    output = np.zeros((*q.shape[:-1], v.shape[-1]), np.float16)
    total = np.zeros((*q.shape[:-1], 1), np.float16)
    for start in range(0, k.shape[-2], 64):
        part = weights[..., start : start + 64]
        output = (output + (part @ v[..., start : start + 64, :]).astype(np.float16)).astype(np.float16)
        total = (total + part.sum(-1, keepdims=True).astype(np.float16)).astype(np.float16)
    return (output.astype(np.float32) / total.astype(np.float32)).astype(q.dtype)


def test_sums_in_low_precision_at_64k_keys_are_caught() -> None:
    generator = np.random.default_rng(0)
    q = generator.standard_normal((2, 32, 8)).astype(np.float32)
    k, v = generator.standard_normal((2, 2, 65536, 8)).astype(np.float32)
    found = ch.audit(half_sums, q, k, v + 1)
    assert not found.exact
    assert found.excess.min() > 3
    assert [part.high for part in found.by_length] == [1024, 4096, 16384, 65536]
    assert found.by_length[-1].error > 2 * found.by_length[0].error
    assert any(words.startswith("It grows with the number of keys") for words in found.where)
    assert "It is not exact" in str(found)
    assert ch.audit(ch.attention, q, k, v + 1).exact


def test_an_error_in_one_head_is_named() -> None:
    q, k, v = drawn(5, 200, 16)

    def wrong(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        output = ch.attention(q, k, v)
        output[3] *= 1.01
        return output

    found = ch.audit(wrong, q, k, v, lengths=[])
    assert found.where == ["It sits in head 3: " + found.where[0].split(": ")[1]]
    assert found.by_head[3] == pytest.approx(0.01, rel=1e-3)
    assert (found.excess <= 1).tolist() == [True, True, True, False, True]


def test_an_error_that_grows_with_scores_is_named() -> None:
    """Keys rounded to a quarter, as a cache of few bits has them: what it does depends on the size of scores."""
    q, k, v = drawn(2, 300, 16)
    q *= np.linspace(0.1, 6, 300, dtype=np.float32)[:, None]

    def coarse(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return ch.attention(q, np.round(k * 4) / 4, v)

    found = ch.audit(coarse, q, k, v + 3, lengths=[])  # outputs of about one length, whatever the weights
    assert not found.exact
    assert any(words.startswith("It grows with the size of scores") for words in found.where)


def test_causal_calls_are_told_by_length() -> None:
    q, k, v = drawn(2, 400, 8)

    def late(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any) -> np.ndarray:
        output = ch.attention(q, k, v, mask=mask)
        output[:, 300:] += 0.1
        return output

    found = ch.audit(late, q, k, v, mask=ch.causal())
    assert found.by_length[0].error < 1e-5 < 0.1 < found.by_length[-1].error
    assert "It grows with the number of keys" in found.where[0]
    assert found.keys.max() <= 400
    assert (np.diff(found.queries) > 0).all()


@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"bias": ch.alibi(4)}, {"sinks": np.ones(4)}, {"temperature": 2.0}]
)
def test_options_of_attention_reach_both_sides(options: dict[str, Any]) -> None:
    q, k, v = drawn(2, 4, 50, 8, dtype="float64")
    found = ch.audit(ch.attention, q, k[:, :2], v[:, :2], mask=ch.causal() & ch.lengths([50, 20]), **options)
    assert found.exact, str(found)
    assert found.by_head.shape == (2, 4)


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_every_library(library: Any) -> None:
    q, k, v = map(library.make, drawn(2, 30, 8))
    found = ch.audit(ch.performer(16), q, k, v)
    plain = ch.audit(ch.performer(16), *drawn(2, 30, 8))
    assert found.error == pytest.approx(plain.error, rel=1e-4)
    assert found.weights is not None
    assert found.weights.recall == pytest.approx(plain.weights.recall if plain.weights else None)


def test_half_precisions_have_their_own_rounding() -> None:
    q, k, v = (torch.from_numpy(a).to(torch.bfloat16) for a in drawn(2, 64, 16))
    assert ch.audit(ch.attention, q, k, v).exact
    assert not ch.audit(lambda q, k, v: 1.2 * ch.attention(q, k, v), q, k, v).exact


def test_implied_weights() -> None:
    """Weights that are exact have no divergence and recall all; one head axis, or none."""
    q, k, v = drawn(64, 8, dtype="float64")
    found = ch.audit(ch.clusters(64), q, k, v)
    assert found.weights is not None
    assert abs(found.weights.kl) < 1e-12
    assert abs(found.weights.variation) < 1e-12
    assert found.weights.recall == 1
    linear = ch.audit(ch.linear(), q, k, v).weights
    assert linear is not None
    assert linear.kl > 0
    assert 0 < linear.variation < 1
    signed = ch.audit(ch.linformer(8, projection=0), q, k, v)
    assert signed.weights is not None
    assert np.isnan(signed.weights.kl)
    assert "–" in str(signed)
    json.loads(signed.json())
    assert ch.audit(ch.linear(normalized=False), q, k, v).weights is None


def test_pinsker() -> None:
    """Total variation is at most √(KL / 2), whatever the method."""
    q, k, v = drawn(3, 80, 8, dtype="float64")
    for method in (ch.linear(), ch.performer(32), ch.lsh(8), ch.topk_blocks(2, block=16), ch.clusters(8)):
        found = ch.audit(method, q, k, v).weights
        assert found is not None
        assert (found.variation <= np.sqrt(found.kl / 2) + 1e-9).all(), method


def test_crossover_is_where_costs_meet() -> None:
    for text in (
        "linear",
        "performer(256)",
        "nystrom(64)",
        "linformer(128)",
        "lsh(16)",
        "topk_blocks(4)",
        "clusters(32)",
    ):
        method = read_method(text)
        length = crossover(method, 64)
        assert length is not None
        assert method.spent(length, 64, 64).flops < exact(length, 64, 64).flops
        assert method.spent(length - 1, 64, 64).flops >= exact(length - 1, 64, 64).flops
    assert crossover(ch.lsh(2, rounds=4), 64) is None


def test_the_audit_is_linear() -> None:
    """Twice the length is about twice the time, where the exact matrix would be four times."""
    import time

    given = {length: drawn(1, length, 8) for length in (16384, 65536)}
    best = dict.fromkeys(given, np.inf)
    for turn in range(20):  # by turns, until neither was disturbed by what else the machine does
        for length, (q, k, v) in given.items():
            start = time.perf_counter()
            ch.audit(ch.linear(), q, k, v, queries=16)
            best[length] = min(best[length], time.perf_counter() - start)
        if turn >= 2 and best[65536] < 6.5 * best[16384]:
            return
    assert best[65536] < 6.5 * best[16384]


def test_printed_within_any_width() -> None:
    q, k, v = drawn(20, 40, 4)
    found = ch.audit(ch.performer(8), q, k, v, mask=ch.causal())
    for width in (30, 50, 76):
        assert max(map(len, found.text(width).splitlines())) <= width
    assert "The 16 worst of 20 heads." in found.text()
    assert json.loads(found.json())["by_head"] == pytest.approx(found.by_head.tolist())


def test_sweeps() -> None:
    q, k, v = drawn(2, 96, 8, dtype="float64")
    by_features = ch.sweep([ch.performer(), ch.nystrom(), ch.linear()], q / 2, k / 2, v, at=[8, 32, 96])
    assert by_features.names == ["performer", "nystrom", "linear"]
    assert by_features.of("performer")[0].error > by_features.of("performer")[-1].error
    assert len({point.error for point in by_features.of("linear")}) == 1
    by_length = ch.sweep(ch.performer(32), q, k, v, by="length", at=[16, 96], seeds=2)
    assert [point.at for point in by_length.points] == [16, 96]
    warm = ch.sweep(ch.performer(32), q, k, v, by="temperature", at=[0.5, 4.0])
    assert warm.points[0].error > warm.points[1].error
    ax = ch.plot_sweep(by_features)
    assert [text.get_text() for text in ax.get_legend().get_texts()][-3:] == ["performer", "nystrom", "linear"]
    with pytest.raises(ch.ArgumentError, match="by: is 'heads'"):
        ch.sweep(ch.linear(), q, k, v, by="heads")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ch.ArgumentError, match=r"at: has 1.5, expected whole numbers"):
        ch.sweep(ch.linear(), q, k, v, at=[1.5])


def test_profile_measures_a_method() -> None:
    found = ch.profile([64, 512, 2048], heads=1, features=16, method=ch.linear())
    assert found.method == "linear()"
    assert all(point.method is not None for point in found.points)
    assert len(found.blocks()) == 3
    assert "quicker than the kernel" in str(found)
    told = json.loads(found.json())
    assert {"method", "method_fit", "crossover"} <= set(told)
    assert "method" not in json.loads(ch.profile([64], heads=1, features=8).json())
    with pytest.raises(ch.ArgumentError, match="method: is 3"):
        ch.profile([64], method=3)  # type: ignore[arg-type]  # wrong on purpose
    assert len(ch.plot_profile(found)[0].get_lines()) == 3


def test_methods_are_read_and_not_run() -> None:
    for name in METHODS:
        assert repr(read_method(name if name not in ("lsh", "topk_blocks") else f"{name}(4)")).startswith(name)
    for value in (ch.performer(64, seed=2, kind="relu", eps=0.5, norms="equal", orthogonal=False), ch.linear("relu"),
                  ch.linformer(8, projection=3), ch.lsh(8, 2, seed=1, duplicates=True), ch.topk_blocks(3, block=16),
                  ch.clusters(9, iterations=2, seed=4), ch.nystrom(7, iterations=3)):  # fmt: skip
        assert repr(read_method(repr(value))) == repr(value)
    for text in ("performer(__import__('os'))", "exec('1')", "performer(256", "x" * 300, "performer(sizes=3)", ""):
        with pytest.raises(ch.ArgumentError, match="method: "):
            read_method(text)


def run(*words: str) -> str:
    done = RUN.invoke(app, ["approximate", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_line(tmp_path: Path) -> None:
    told = run("random:64,64,8", "-m", "performer(32)", "-m", "linear", "--causal")
    assert "performer(32) beside exact attention, 64 queries a head, float64" in told
    assert "linear() beside exact attention" in told
    found = json.loads(run("random:64,64,8", "-m", "performer(32)", "--json"))
    assert found[0]["name"] == "performer(32)"
    q, k, v = np.random.default_rng(0).standard_normal((3, 64, 8))
    np.savez(tmp_path / "call.npz", q=q, k=k, v=v)
    same = json.loads(run("--npz", str(tmp_path / "call.npz"), "-m", "performer(32)", "--json"))
    assert same[0]["error"] == pytest.approx(ch.audit(ch.performer(32), q, k, v).error)
    table = run("random:64,64,8", "-m", "performer", "--by", "features", "--at", "8,32", "-o", str(tmp_path / "e.svg"))
    assert re.search(r"features +performer", table)
    assert (tmp_path / "e.svg").stat().st_size > 1000
    for words, said in (
        (["-m", "perform(2)"], "--method: is 'perform(2)', expected linear(…)"),
        (["--at", "3"], "--at: is given without --by"),
        (["--by", "heads"], "--by: is 'heads', expected features, length or temperature"),
        (["--by", "length", "--at", "a"], "--at: is 'a', expected numbers with commas between"),
        (["--mask", "window(3)"], "window(3) cannot be honoured by linear()"),
    ):
        done = RUN.invoke(app, ["approximate", "random:8,8,4", *words])
        assert done.exit_code == 2
        assert said in done.output
