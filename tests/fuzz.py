"""Random problems against the reference, for as long as one likes; a finding is cut down and printed as a line.

    python tests/fuzz.py [--seconds 60] [--from SEED] [--seed SEED] [--processes N]

A result is held to the distance of the reference in the kernel's own precision, twice, plus the rounding of its sums,
(4 + √n) · eps times the size of what is summed, plus one rounding of the result itself. Half precisions are summed in
float32: their own eps is allowed once, on the result.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

if __name__ == "__main__":
    import interpreted

    interpreted.import_kernels()

from asked import able, answer, as_numbers, sum_bias
from draw import draw, smaller
from drawn import Drawn, number_type, question
from reference import Question, Solved, observed, solve

ROUNDINGS = 4  # of a term before it is summed: scale, exponential, division, product


def expected(drawn: Drawn, ask: Question, number: Any) -> Solved:
    """The reference on a problem in one precision, with every result that its verb gives."""
    solved = solve(ask, number)
    if drawn.verb == "observe":
        seen = observed(solved, dict(drawn.want))
        for part in ("value", "size", "spoiled"):
            getattr(solved, part).update(getattr(seen, part))
    if drawn.bias is not None and drawn.bias[0] != "alibi" and "b" in drawn.wants:
        for part, by in (("value", np.sum), ("size", np.sum), ("spoiled", np.any)):
            full = getattr(solved, part)["dbias"]
            for name in ("dtable",) if drawn.bias[0] == "relative" else ("dbias",):
                getattr(solved, part)[name] = sum_bias(drawn, name, full, drawn.sizes, by)
    return solved


def hold(drawn: Drawn) -> list[str]:
    """What is wrong with the answer to a problem: sentences, none where it is right."""
    if not able(drawn):  # the same problem by whatever kernel there is
        drawn = replace(drawn, kernel=None, isa="", tile=None)
    ask = question(drawn)
    try:
        found = answer(drawn, ask)
    except Exception as error:
        return [f"raised {type(error).__name__}: {str(error)[:300]}"]
    own = np.float64 if drawn.dtype == "float64" else np.float32
    exact = expected(drawn, ask, np.longdouble if drawn.dtype == "float64" else np.float64)
    plain = expected(drawn, ask, own)
    wrong = []
    for what, got in found.items():
        if what == "top_indices":
            wrong += names(drawn, exact, as_numbers(got))
        else:
            wrong += compare(drawn, what, got, exact, plain)
    return wrong


def eps_of(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def allowance(drawn: Drawn, what: str, exact: Solved, plain: Solved, rounded: np.dtype) -> np.ndarray:
    """How far each number of a result may be off."""
    own = np.dtype(np.float64 if drawn.dtype == "float64" else np.float32)
    sizes = drawn.sizes
    summed = max(sizes.batch * sizes.heads * sizes.queries, sizes.keys, drawn.features, drawn.width, 1)
    value, size = exact.value[what], exact.size[what]
    with np.errstate(all="ignore"):
        near = plain.value[what].astype(rounded).astype(value.dtype)
        distance = np.where(np.isfinite(value) & np.isfinite(near), np.abs(near - value), 0)
    if distance.ndim and distance.size:
        distance = distance.max(-1, keepdims=True)  # a single number may be right by luck
    # parts of a merge, and gradients on the way to them, are rounded to the dtype of q; so are weights on a GPU
    rounds = "merge" in drawn.verb or drawn.kernel == "triton"
    step = eps_of(number_type(drawn.dtype)) if rounds and what in HALVED else eps_of(own)
    # what is too small for the precision is nothing there
    small = float(ml_dtypes.finfo(own).tiny) * summed * (1 + float(np.nan_to_num(size, posinf=0).max(initial=0)))
    small += float(ml_dtypes.finfo(rounded).smallest_subnormal)
    return 2 * distance + (ROUNDINGS + np.sqrt(summed)) * step * size + eps_of(rounded) * np.abs(value) + small


HALVED = ("output", "dq", "dk", "dv", "dsinks", "dbias", "dtable")


def compare(drawn: Drawn, what: str, got: Any, exact: Solved, plain: Solved) -> list[str]:
    """One result against its budget."""
    if got is None:
        return [f"{what} is None"]
    value, spoiled = exact.value[what], exact.spoiled[what]
    own = "float64" if drawn.dtype == "float64" else "float32"
    dtype = str(got.dtype).rsplit(".", 1)[-1]
    rounded = number_type(dtype)  # of sinks and bias their own, whatever q has
    if what not in ("dsinks", "dbias", "dtable"):
        rounded = number_type(drawn.dtype if what in ("output", "dq", "dk", "dv") else own)
    if dtype != rounded.name:
        return [f"{what} has dtype {dtype}, expected {rounded.name}"]
    numbers = as_numbers(got)
    if numbers.size != value.size or numbers.shape[-1:] != value.shape[-1:]:
        return [f"{what} has shape {numbers.shape}, expected {value.shape} up to leading axes"]
    if what in ("output", "lse") and numbers.shape != expected_shape(drawn, what):
        return [f"{what} has shape {numbers.shape}, expected {expected_shape(drawn, what)}"]
    numbers = numbers.reshape(value.shape).astype(value.dtype)
    care = ~spoiled
    wrong = []
    if (unfinished := np.isnan(numbers) & care).any():
        return [f"{what} is NaN in {unfinished.sum()} of {numbers.size}, {where(unfinished)}"]
    infinite = np.isinf(value) & care
    if not np.array_equal(numbers[infinite], value[infinite]):
        return [f"{what} is finite where it is infinite, {where(infinite & (numbers != value))}"]
    with np.errstate(all="ignore"):
        allowed = allowance(drawn, what, exact, plain, rounded)
        off = np.where(care & ~infinite, np.abs(numbers - value), 0)
        # beyond the largest number of a half precision there is only infinity
        over = np.abs(value) + allowed >= float(ml_dtypes.finfo(rounded).max)
        bad = (off > allowed) & ~over
    if bad.any():
        at = np.unravel_index(np.argmax(np.where(bad, off / np.maximum(allowed, 1e-300), 0)), bad.shape)
        wrong.append(
            f"{what} is off by {float(off[at]):.3g} where {float(np.broadcast_to(allowed, bad.shape)[at]):.3g} is "
            f"allowed, in {bad.sum()} of {bad.size}, {where(bad)}: {float(numbers[at]):.6g} for {float(value[at]):.6g}"
        )
    if what in ("output", "dq") and plainly_seen(drawn) and (hidden := np.isnan(value) & np.isfinite(numbers)).any():
        wrong.append(f"{what} hides a NaN that it sees, {where(hidden)}")
    return wrong


def plainly_seen(drawn: Drawn) -> bool:
    """True where a NaN has a weight well above 0 in all that see it."""
    kinds = {plant[1] for plant in drawn.planted}
    infinite_bias = drawn.bias is not None and drawn.bias[0] == "array" and drawn.bias[3] > 0
    quiet = drawn.large <= 1 and drawn.scale is None and drawn.sinks in (None, 0.0, 3.0)
    return kinds == {"nan"} and quiet and drawn.dropout is None and not infinite_bias and drawn.bias is None


def expected_shape(drawn: Drawn, what: str) -> tuple[int, ...]:
    """The shape of an output, or of what has one number for each query."""
    lead = () if drawn.flat else (*drawn.whole_batch, drawn.sizes.heads)
    return (*lead, drawn.queries, drawn.width) if what == "output" else (*lead, drawn.queries)


def where(places: np.ndarray) -> str:
    """The first of some places."""
    return f"first at {tuple(int(n) for n in np.argwhere(places)[0])}"


def names(drawn: Drawn, exact: Solved, indices: np.ndarray) -> list[str]:
    """The keys that are named as the largest: theirs are the largest weights, and none is named twice."""
    weights, top = exact.value["weights"], exact.value["top"]
    indices = indices.reshape(top.shape).astype(int)
    spoiled = exact.spoiled["top"]
    allowed = allowance(drawn, "top", exact, exact, np.dtype(np.float64 if drawn.dtype == "float64" else np.float32))
    if drawn.keys:
        theirs = np.where(indices < 0, 0, np.take_along_axis(weights, np.maximum(indices, 0), -1))
    else:
        theirs = np.zeros_like(top)
    wrong = (np.abs(theirs - top) > 2 * allowed) & ~spoiled
    if wrong.any():
        return [f"top names other keys than the largest, {where(wrong)}"]
    for place in np.ndindex(*indices.shape[:-1]):
        named = indices[place][indices[place] >= 0]
        if len(set(named.tolist())) != len(named):
            return [f"top names a key twice, at {place}"]
    return []


def symptom(wrong: list[str]) -> str:
    """What a finding has in common with others like it."""
    return " ".join(wrong[0].split()[:3])


def cut_down(drawn: Drawn, wrong: list[str], seconds: float = 20.0) -> tuple[Drawn, list[str]]:
    """A smaller problem with the same symptom."""
    end = time.monotonic() + seconds
    again = True
    while again and time.monotonic() < end:
        again = False
        for candidate in smaller(drawn):
            try:
                found = hold(candidate)
            except Exception:
                continue  # a problem that cannot be posed, such as one cut to two arrays that do not fit
            if found and symptom(found) == symptom(wrong):
                drawn, wrong, again = candidate, found, True
                break
            if time.monotonic() > end:
                break
    return drawn, wrong


def search(first: int, seconds: float, last: int | None, reduce: bool) -> int:
    """Draw until the time is up; print what is found. The number of findings."""
    start = said = time.monotonic()
    seed, failed, symptoms = first, 0, Counter[str]()
    while time.monotonic() - start < seconds if last is None else seed <= last:
        drawn = draw(seed)
        wrong = hold(drawn)
        if wrong:
            failed += 1
            key = f"{drawn.verb}, {drawn.library}, {drawn.kernel}: {symptom(wrong)}"
            symptoms[key] += 1
            if symptoms[key] <= 2:
                print(f"seed {seed}: {'; '.join(wrong)}\n    {drawn}", flush=True)
                if reduce:
                    less, wrong = cut_down(drawn, wrong)
                    print(f"    cut down: {'; '.join(wrong)}\n    {less},", flush=True)
        seed += 1
        if time.monotonic() - said > 10:
            said = time.monotonic()
            print(f"… {seed - first} problems, {failed} findings, {said - start:.0f} s, at seed {seed}", flush=True)
    print(f"{seed - first} problems from seed {first}, {failed} findings")
    for key, count in symptoms.most_common():
        print(f"    {count:5d} × {key}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60, help="how long")
    parser.add_argument("--from", type=int, dest="first", help="the first seed; by the clock unless given")
    parser.add_argument("--to", type=int, help="the last seed, instead of a time")
    parser.add_argument("--seed", type=int, help="this one alone, cut down")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--as-drawn", action="store_true", help="do not cut findings down")
    given = parser.parse_args()
    os.environ.setdefault("CLEARHEAD_THREADS", "1")
    if given.seed is not None:
        return min(1, search(given.seed, given.seconds, given.seed, not given.as_drawn))
    first = int(time.time()) if given.first is None else given.first
    if given.processes > 1:
        common = [sys.executable, sys.argv[0], "--seconds", str(given.seconds)]
        starts = [first + n * 10**7 for n in range(given.processes)]
        running = [subprocess.Popen([*common, "--from", str(start)]) for start in starts]
        return max(process.wait() for process in running)
    return min(1, search(first, given.seconds, given.to, not given.as_drawn))


if __name__ == "__main__":
    sys.exit(main())
