"""Is the suite awake? The formula is broken in many ways, and the conformance suite must notice each of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import CASES
from conformance import whole
from libraries import LIBRARIES

from clearhead.core import formula
from clearhead.kernels.dense import Dense

NUMPY = LIBRARIES[0]


def changed(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """The formula with some of its options replaced before it runs."""

    def broken(q: Any, k: Any, v: Any, **options: Any) -> Any:
        for name, change in changes.items():
            if options.get(name) is not None:
                options[name] = change(options[name])
        return formula.attention(q, k, v, **options)

    return broken


def softmax_over_queries(q: Any, k: Any, v: Any, **options: Any) -> Any:
    answer = formula.attention(q, k, v, **options)
    scores = formula.score(q, k, **{name: options.get(name) for name in ("scale", "softcap", "bias", "mask")})
    flipped, _, _ = formula.softmax(np.swapaxes(scores, -1, -2))
    weights = np.swapaxes(flipped, -1, -2)
    return formula.Answer(weights @ v, weights, answer.lse, answer.max_score, answer.entropy)


def masked_after_the_softmax(q: Any, k: Any, v: Any, **options: Any) -> Any:
    mask = options.pop("mask", None)
    answer = formula.attention(np.nan_to_num(q), np.nan_to_num(k), np.nan_to_num(v), **options)
    weights = answer.weights if mask is None else np.where(mask, answer.weights, 0)
    return formula.Answer(weights @ np.nan_to_num(v), weights, answer.lse, answer.max_score, answer.entropy)


def no_peak_subtracted(q: Any, k: Any, v: Any, **options: Any) -> Any:
    answer = formula.attention(q, k, v, **options)
    with np.errstate(all="ignore"):
        total = np.exp(answer.lse)[..., None]
        output = answer.output * total / total
    return formula.Answer(output, answer.weights, answer.lse, answer.max_score, answer.entropy)


def nan_for_rows_without_keys(q: Any, k: Any, v: Any, **options: Any) -> Any:
    answer = formula.attention(q, k, v, **options)
    output = np.where((answer.lse == -np.inf)[..., None], np.nan, answer.output)
    return formula.Answer(output, answer.weights, answer.lse, answer.max_score, answer.entropy)


def keys_as_values(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return formula.attention(q, k, k, **options)


def softcap_after_bias(q: Any, k: Any, v: Any, **options: Any) -> Any:
    cap, bias = options.get("softcap"), options.get("bias")
    if cap is not None and bias is not None:
        plain = formula.score(q, k, scale=options["scale"])
        wrong = cap * np.tanh((plain + bias) / cap)
        options["bias"] = wrong - cap * np.tanh(plain / cap)
    return formula.attention(q, k, v, **options)


def padding_not_blanked(q: Any, k: Any, v: Any, **options: Any) -> Any:
    answer = formula.attention(q, k, v, **options)
    output = np.where(options["keep"], answer.weights, 0) @ v if "keep" in options else answer.weights @ v
    return formula.Answer(output, answer.weights, answer.lse, answer.max_score, answer.entropy)


def entropy_in_bits(q: Any, k: Any, v: Any, **options: Any) -> Any:
    answer = formula.attention(q, k, v, **options)
    return formula.Answer(answer.output, answer.weights, answer.lse, answer.max_score, answer.entropy / np.log(2))


MUTANTS = {
    "no scale": changed(scale=lambda scale: 1.0),
    "scaled by D": changed(scale=lambda scale: scale**2),
    "wrong axis": softmax_over_queries,
    "inverted mask": changed(mask=lambda mask: ~mask),
    "causal off by one": changed(mask=lambda mask: mask | np.roll(mask, 1, axis=-1)),
    "masked after the softmax": masked_after_the_softmax,
    "no peak subtracted": no_peak_subtracted,
    "NaN for rows without keys": nan_for_rows_without_keys,
    "keys as values": keys_as_values,
    "softcap after bias": softcap_after_bias,
    "bias subtracted": changed(bias=lambda bias: -bias),
    "sinks ignored": changed(sinks=lambda sinks: np.full_like(sinks, -np.inf)),
    "dropout not rescaled": changed(rescale=lambda rescale: 1.0),
    "dropout inverted": changed(keep=lambda keep: ~keep),
    "padding not blanked": padding_not_blanked,
    "entropy in bits": entropy_in_bits,
}


def survives(kernel: str = "dense") -> bool:
    """True where no case of the suite notices anything; as it is the formula survives, by `test_conformance.py`."""
    for case in CASES:
        try:
            with np.errstate(all="ignore"):
                whole(kernel, case, NUMPY)
        except Exception:
            return False
    return True


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_suite_notices(mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SimpleNamespace(**{**vars(formula), "attention": mutant})
    monkeypatch.setattr("clearhead.kernels.dense.formula", broken)
    assert not survives()


def test_the_suite_notices_heads_grouped_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Dense.arguments

    def wrong(self: Dense, problem: Any) -> Any:
        q, k, v, options = right(self, problem)
        if problem.group > 1:  # head h uses key head h % Hk, not h // group
            k, v = (np.concatenate([a[..., :: problem.group, :, :]] * problem.group, axis=-3) for a in (k, v))
        return q, k, v, options

    monkeypatch.setattr(Dense, "arguments", wrong)
    assert not survives()


def test_the_suite_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arrays: Any, **options: Any) -> Any:
        found = formula.gradients(*arrays, **options)
        return formula.Gradients(found.dq, found.dk * 1.001, found.dv, found.dbias, found.dsinks)

    broken = SimpleNamespace(**{**vars(formula), "gradients": wrong})
    monkeypatch.setattr("clearhead.kernels.dense.formula", broken)
    assert not survives()
