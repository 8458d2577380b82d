"""Attention over keys that come in chunks: every case as over all keys at once; files; what cannot be read."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from budget import LAST, MAP, TOP, check, emphasis, expected, queries_of
from cases import CASES, Case

import clearhead as ch
from clearhead.distributed import on_disk, stream, stream_observe
from clearhead.distributed.disk import DiskArray
from clearhead.distributed.mapped import Mapped, is_mapped

STREAMED = [case for case in CASES if case.k[-2] > 1 and case.layout != "fortran"]


def given(case: Case, library: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    (q, k, v), _, options = case.build()
    if library == "torch":
        types = {"float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
        q, k, v = (
            torch.from_numpy(np.array(a, np.float64)).to(types.get(case.dtype, torch.float32)) for a in (q, k, v)
        )
    return q, k, v, options


@pytest.mark.parametrize("case", STREAMED, ids=str)
def test_chunks_give_what_all_keys_give(case: Case) -> None:
    library = ("numpy", "torch")[STREAMED.index(case) % 2 if case.dtype != "bfloat16" else 1]
    q, k, v, options = given(case, library)
    count, exact = q.shape[-2], expected(case.name)
    by_key = [name for name in ("received", "received_max", "removal") if name in exact]
    halves = [(k[..., :9, :], v[..., :9, :]), (k[..., 9:, :], v[..., 9:, :])]
    with np.errstate(all="ignore"):
        want = {"top": TOP, "map": MAP, "queries": queries_of(count), **dict.fromkeys(by_key, True)}
        seen = stream_observe(q, (k, v), chunk=7, **options, **want)
        last = stream_observe(q, halves, **dict.fromkeys(by_key, LAST), **options)
        counts = emphasis(tuple(seen.lse.shape)).astype(np.float32)
        weighted = stream_observe(q, halves, received=torch.from_numpy(counts) if library == "torch" else counts,
                                  **options)  # fmt: skip
        output = stream(q, (k, v), chunk=7, **options)
    found = {
        "output": output, "lse": seen.lse, "max_score": seen.max_score, "entropy": seen.entropy,
        "top": seen.top.weights, "received_weighted": weighted.received,
        "map_mean": seen.map.mean, "map_max": seen.map.max, "queries": seen.queries.weights,
    }  # fmt: skip
    found |= {name: getattr(seen, name) for name in by_key} | {f"{name}_last": getattr(last, name) for name in by_key}
    for what, got in found.items():
        numbers = got.double().numpy() if library == "torch" else np.asarray(got)
        check(numbers, exact[what], k.shape[-2], f"{case.name}: {what}")


def arrays(*shape: int) -> list[np.ndarray]:
    return list(np.random.default_rng(3).standard_normal((3, *shape)).astype(np.float32))


def saved(folder: Path, k: np.ndarray, v: np.ndarray) -> dict[str, tuple[Any, Any]]:
    from safetensors.numpy import save_file

    np.save(folder / "k.npy", k)
    np.save(folder / "v.npy", v)
    np.savez(folder / "both.npz", keys=k, values=v)
    save_file({"k": k, "v": v}, folder / "both.safetensors")
    return {
        "npy": (on_disk(folder / "k.npy"), on_disk(folder / "v.npy")),
        "npz": (on_disk(folder / "both.npz", "keys"), on_disk(folder / "both.npz", "values")),
        "safetensors": (on_disk(folder / "both.safetensors", "k"), on_disk(folder / "both.safetensors", "v")),
        "memory map": (np.load(folder / "k.npy", mmap_mode="r"), np.load(folder / "v.npy", mmap_mode="r")),
    }


def test_files_are_read_a_stretch_at_a_time(tmp_path: Path) -> None:
    q, k, v = arrays(2, 3, 101, 8)
    whole = ch.attention(q, k, v, mask=ch.causal())
    for name, source in saved(tmp_path, k, v).items():
        for chunk in (None, 13):
            np.testing.assert_allclose(
                stream(q, source, chunk=chunk, mask=ch.causal()), whole, rtol=2e-6, atol=2e-6, err_msg=name
            )
        found = stream(torch.from_numpy(q), source, chunk=50, mask=ch.causal())
        torch.testing.assert_close(found, torch.from_numpy(whole))


def test_files_are_read_where_the_system_reads_at_no_given_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.random.default_rng(0).standard_normal((2, 11, 3), dtype=np.float32)
    np.save(tmp_path / "k.npy", array)
    monkeypatch.delattr("os.preadv")
    assert np.array_equal(on_disk(tmp_path / "k.npy")[..., 4:9, :], array[:, 4:9])


def test_long_stretches_are_read_past_the_cache_wherever_they_lie(tmp_path: Path) -> None:
    from clearhead.distributed.direct import ALIGNED, opened

    random = np.random.default_rng(5)
    # 40 bytes a row: heads begin anywhere between two places that the system reads from
    k, v = random.standard_normal((2, 3, 2, 7001, 10), dtype=np.float32)
    q = random.standard_normal((3, 4, 5, 10), dtype=np.float32)
    for name, source in saved(tmp_path, k, v).items():
        if name == "memory map":
            continue
        if opened(source[0].path) >= 0:
            room = source[0].room(2000)
            assert room is not None, name
            assert room.memory.ctypes.data % ALIGNED == 0
            found = source[0].read_past(1001, 3001, room)
            assert found.flags.aligned, name
            assert np.array_equal(found, k[..., 1001:3001, :]), name
            assert np.array_equal(source[0].read_past(6990, 7001, room), k[..., 6990:, :]), name
        assert source[0].room(20) is None, name  # too short to be worth it
        np.testing.assert_allclose(
            stream(q, source, chunk=2000, mask=ch.causal()), ch.attention(q, k, v, mask=ch.causal()),
            rtol=2e-6, atol=2e-6, err_msg=name,
        )  # fmt: skip


def test_memory_maps_are_copied_and_not_kept(tmp_path: Path) -> None:
    k = np.random.default_rng(7).standard_normal((3, 4001, 10), dtype=np.float32)
    np.save(tmp_path / "k.npy", k)
    for part in (slice(None), slice(1, 3)):  # a map, and a part of one
        whole = np.load(tmp_path / "k.npy", mmap_mode="r")[part]
        assert is_mapped(whole)
        mapped, room = Mapped(whole), np.empty((*whole.shape[:1], 1000, 10), np.float32)
        for low, high in ((0, 1000), (1000, 2000), (3990, 4001), (0, 1000)):
            assert np.array_equal(mapped.read(low, high, room), k[part, low:high])
    assert not is_mapped(np.load(tmp_path / "k.npy", mmap_mode="r")[:, ::2])
    # what was changed in memory alone must not be forgotten
    changed = np.load(tmp_path / "k.npy", mmap_mode="c")
    changed[:] = 1.0
    assert not is_mapped(changed)
    assert np.array_equal(stream(k[:, :2], (changed, changed), chunk=1000), np.ones((3, 2, 10), np.float32))
    assert (changed == 1).all()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not say what is mapped")
def test_of_a_map_that_was_streamed_little_is_in_memory(tmp_path: Path) -> None:
    k = np.random.default_rng(8).standard_normal((2, 16384, 128), dtype=np.float32)
    np.save(tmp_path / "large.npy", k)
    mapped = np.load(tmp_path / "large.npy", mmap_mode="r")
    stream(k[:, :2], (mapped, mapped), chunk=2048)
    told = re.search(r"large\.npy\n(?:.*\n)*?Rss:\s+(\d+) kB", Path("/proc/self/smaps").read_text())
    assert told is not None
    assert int(told[1]) * 1024 < 0.25 * k.nbytes


def test_numbers_that_lie_askew_are_moved(tmp_path: Path) -> None:
    k = np.random.default_rng(6).standard_normal((2, 9001, 8), dtype=np.float32)
    for before in (b"abc", bytes(4097)):
        (tmp_path / "raw").write_bytes(before + k.tobytes())
        array = DiskArray(tmp_path / "raw", len(before), k.shape, k.dtype)
        room = array.room(9001)
        if room is not None:
            found = array.read_past(17, 9001, room)
            assert found.flags.aligned
            assert np.array_equal(found, k[:, 17:])
        assert np.array_equal(array[..., 17:9001, :], k[:, 17:])


def test_a_file_system_that_reads_nothing_past_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays(2, 5000, 8)
    source = saved(tmp_path, k, v)["npy"]
    whole, read, refused = stream(q[:, :4], (k, v)), os.preadv, []

    def refusing(file: int, *rest: Any) -> int:
        if file in (source[0].direct, source[1].direct):
            refused.append(file)
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(file, *rest)

    monkeypatch.setattr("os.preadv", refusing)
    np.testing.assert_allclose(stream(q[:, :4], source, chunk=3000), whole, rtol=2e-6, atol=2e-6)
    assert len(refused) == sum(array.direct >= 0 for array in source)
    monkeypatch.setattr("os.O_DIRECT", -1, raising=False)  # a flag that no file can be opened with
    np.testing.assert_allclose(stream(q[:, :4], saved(tmp_path, k, v)["npy"], chunk=3000), whole, rtol=2e-6, atol=2e-6)


def test_a_long_stretch_that_is_cut_short_or_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays(2, 5000, 8)
    source = saved(tmp_path, k, v)["npy"]
    with (tmp_path / "v.npy").open("r+b") as file:
        file.truncate(200_000)
    with pytest.raises(ch.ArgumentError, match=r"v\.npy ends at byte 200,000"):
        stream(q, source, chunk=3000)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.preadv", broken)
    with pytest.raises(ch.ArgumentError, match=r"cannot read .*\.npy: Input/output error"):
        stream(q, source, chunk=3000)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("clearhead-")]


def test_bfloat16_from_disk(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    q, k, v = (torch.from_numpy(a).bfloat16() for a in arrays(2, 61, 8))
    save_file({"k": k, "v": v}, tmp_path / "x.safetensors")
    source = (on_disk(tmp_path / "x.safetensors", "k"), on_disk(tmp_path / "x.safetensors", "v"))
    torch.testing.assert_close(stream(q, source, chunk=9), ch.attention(q, k, v))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    q, k, v = arrays(2, 50, 8)
    saved(tmp_path, k, v)
    with pytest.raises(ch.ArgumentError, match=r"cannot read .*missing\.npy: No such file"):
        on_disk(tmp_path / "missing.npy")
    with pytest.raises(ch.ArgumentError, match="'x', expected one of keys, values in"):
        on_disk(tmp_path / "both.npz", "x")
    with pytest.raises(ch.ArgumentError, match="'x', expected one of k, v in"):
        on_disk(tmp_path / "both.safetensors", "x")
    np.savez_compressed(tmp_path / "small.npz", k=k)
    with pytest.raises(ch.ArgumentError, match=r"small\.npz: k is compressed"):
        on_disk(tmp_path / "small.npz", "k")
    (tmp_path / "short.npy").write_bytes((tmp_path / "k.npy").read_bytes()[:-100])
    with pytest.raises(ch.ArgumentError, match=r"short\.npy is cut short"):
        on_disk(tmp_path / "short.npy")
    source = on_disk(tmp_path / "k.npy"), on_disk(tmp_path / "v.npy")
    with (tmp_path / "v.npy").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(ch.ArgumentError, match=r"v\.npy ends at byte 2,000"):
        stream(q, source, chunk=5)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("clearhead-")]

    def broken() -> Any:
        yield k[:, :5], v[:, :5]
        raise OSError("the tape is gone")

    with pytest.raises(ch.ArgumentError, match="source: cannot be read: OSError: the tape is gone"):
        stream(q, broken())


def test_chunks_that_do_not_fit_are_refused() -> None:
    q, k, v = arrays(2, 20, 8)
    for source, words in (
        ([(k[:, :5], v[:, :4])], "5 keys and 4 values"),
        (iter([(k[:, :5], v[:, :5]), (k[:1, :5], v[:1, :5])]), r"keys of shape \(1, 5, 8\) at position 5"),
        (iter([(k[:, :5].astype(np.float64), v[:, :5])]), "k: has dtype float64"),
        (iter([]), "gives no chunk"),
        (3, "is a int, expected"),
        (iter([k]), "gives a ndarray as chunk 0"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            stream(q, source)
    with pytest.raises(ch.ArgumentError, match="keys: is not given"):
        stream(q, iter([(k, v)]), mask=ch.causal())
    with pytest.raises(ch.ArgumentError, match="gives 20 keys, expected the 21"):
        stream(q, iter([(k, v)]), keys=21)
    with pytest.raises(ch.ArgumentError, match="is read twice"):
        stream_observe(q, iter([(k, v)]), keys=20, received=True)
    whole = ch.observe(q, k, v, received=True)
    np.testing.assert_allclose(
        stream_observe(q, lambda: iter([(k, v)]), keys=20, received=True).received, whole.received, rtol=1e-5
    )


class Shelf:
    """Something that has a shape and slices, and no more; it may fail to give them."""

    def __init__(self, array: np.ndarray, fails: Exception | None = None, **named: Any) -> None:
        self.array, self.shape, self.fails = array, array.shape, fails
        self.__dict__.update(named)

    def __getitem__(self, index: Any) -> np.ndarray:
        if self.fails is not None:
            raise self.fails
        return self.array[index]


def test_anything_with_slices_is_read_and_named_where_it_fails() -> None:
    q, k, v = arrays(2, 50, 8)
    whole = ch.attention(q, k, v, mask=ch.causal())
    np.testing.assert_allclose(stream(q, (Shelf(k), Shelf(v)), chunk=9, mask=ch.causal()), whole, rtol=2e-6, atol=2e-6)
    for shelf, words in (
        (Shelf(k, KeyError("c/0/1")), r"cannot read a Shelf of shape \(2, 50, 8\) at 0 to 9: KeyError: 'c/0/1'"),
        (Shelf(k, EOFError("end")), "cannot read a Shelf .*: EOFError: end"),
        (Shelf(k, OSError("gone"), filename="k.h5", name="/k"), "cannot read k.h5: /k at 0 to 9: OSError: gone"),
        (Shelf(k, OSError("gone"), store="file://k.zarr"), "cannot read file://k.zarr at 0 to 9: OSError: gone"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            stream(q, (shelf, Shelf(v)), chunk=9)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("clearhead-")]


def test_a_map_whose_file_is_cut_short_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    q, k, v = arrays(2, 9000, 8)
    np.save(tmp_path / "k.npy", k)
    for part in (slice(None), slice(1, 2)):
        mapped = np.load(tmp_path / "k.npy", mmap_mode="r")[part]
        np.testing.assert_allclose(
            stream(q[part, :3], (mapped, v[part]), chunk=400), ch.attention(q[part, :3], k[part], v[part]), atol=2e-6
        )
    with (tmp_path / "k.npy").open("r+b") as file:
        file.truncate(k.nbytes)  # the last few numbers are gone: 128 bytes of them come before
    with pytest.raises(ch.ArgumentError, match=r"k\.npy is cut short: 576,000 of 576,128 bytes"):
        stream(q[1:], (mapped, v[1:]), chunk=400)


def test_paths_no_keys_and_what_a_call_gets_wrong(tmp_path: Path) -> None:
    q, k, v = arrays(2, 20, 8)
    saved(tmp_path, k, v)
    np.testing.assert_allclose(
        stream(q, (tmp_path / "k.npy", str(tmp_path / "v.npy"))), ch.attention(q, k, v), atol=2e-6
    )
    assert not stream(q, (k[:, :0], v[:, :0])).any()
    for given, words in (
        ({"chunk": 0}, "chunk: is 0, expected a whole number of at least 1"),
        ({"chunk": 2.5}, "chunk: is 2.5"),
        ({"keys": 7}, "keys: is 7, and source has 20"),
        ({"progress": 3}, "progress: is 3, expected True, False, None or a function"),
        ({"source": [k, v]}, "source: is not .k, v. nor a list of such pairs"),
        ({"source": np.stack([k, v])}, "source: is a ndarray, expected .k, v."),
        ({"source": (tmp_path / "k.npy", tmp_path / "x.npy")}, r"cannot read .*x\.npy: No such file"),
    ):
        with pytest.raises(ch.ArgumentError, match=words):
            stream(q, **{"source": (k, v), **given})


def test_jax_reads_files_too(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    q, k, v = arrays(2, 101, 8)
    want: dict[str, Any] = {"top": 3, "received": True, "map": (4, 5), "queries": [1, -1], "weights": True}
    whole = ch.observe(q, k, v, mask=ch.causal(), **want)
    seen = stream_observe(jax.numpy.asarray(q), saved(tmp_path, k, v)["npy"], chunk=29, mask=ch.causal(), **want)
    assert isinstance(seen.output, jax.Array)
    for found, exact in (
        (seen.output, whole.output), (seen.received, whole.received), (seen.weights, whole.weights),
        (seen.map.mean, whole.map.mean), (seen.queries.weights, whole.queries.weights),
        (seen.top.weights, whole.top.weights),
    ):  # fmt: skip
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("queries", [1, 3, 67])
@pytest.mark.parametrize("large", [1.0, 300.0])
def test_the_second_look_is_by_the_kernel_that_ran(queries: int, large: float) -> None:
    """By either kernel, and as all keys at once: also of few queries, and where scores are large."""
    random = np.random.default_rng(queries)
    q = large * random.standard_normal((2, 4, queries, 16), dtype=np.float32)
    k, v = random.standard_normal((2, 2, 2, 131, 16), dtype=np.float32)
    options: dict[str, Any] = {"mask": ch.causal() & ch.window(90), "sinks": np.array([0.5, -1.0, 3.0, 0.0])}
    want: dict[str, Any] = {"received": min(queries, 13), "map": (5, 7), "weights": True, "top": 3}
    whole = ch.observe(q, k, v, **options, **want)
    for kernel in (None, "tiled"):
        seen = stream_observe(q, (k, v), chunk=29, kernel=kernel, **options, **want)
        assert seen.kernel == (kernel or whole.kernel)
        for found, exact in (
            (seen.received, whole.received), (seen.map.mean, whole.map.mean), (seen.map.max, whole.map.max),
            (seen.weights, whole.weights), (seen.top.weights, whole.top.weights),
        ):  # fmt: skip
            # scores of 10³ have 10⁻⁴ behind their last digit, and so have weights
            np.testing.assert_allclose(found, exact, rtol=2e-6 * large, atol=1e-6 * large, err_msg=str(kernel))
    assert np.all(seen.weights.sum(-1) <= 1 + 1e-5)


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = arrays(2, 20, 8)
    told: list[tuple[Any, ...]] = []
    stream(q, (k, v), chunk=8, progress=lambda *words: told.append(words))
    assert told == [(8, 20, "attention"), (16, 20, "attention"), (20, 20, "attention")]
    stream(q, (k, v), chunk=8, progress=True)
    assert "40 %" in capsys.readouterr().err
    stream(q, (k, v), chunk=8)
    assert capsys.readouterr().err == ""
