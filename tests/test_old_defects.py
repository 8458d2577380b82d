"""Is the fuzz awake? Answers are made wrong as they once were, or could be, and the random problems must notice.

Each mutation changes what a public function is given or what it gives, whatever is inside. It counts as noticed where a
problem of those that `make test` begins and `make fuzz` goes on with passes without it and fails with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from draw import draw
from drawn import Drawn
from fuzz import hold, plainly_seen
from test_fuzz import SEEDS

import clearhead as ch
from clearhead.core.mask import Both, Either, Not
from clearhead.core.masks import Band

Arrays = tuple[Any, ...]
Options = dict[str, Any]
FORWARD = ("attention", "observe")
ALL = ("attention", "observe", "gradients")
ENOUGH = 25  # problems that a mutation should show in, of which one must


@dataclass(frozen=True)
class Mutation:
    """Which problems should show it, which functions it changes, and how: before the call, or after it."""

    shows: Callable[[Drawn], bool]
    verbs: tuple[str, ...]
    arrays: Callable[[Arrays], Arrays] = lambda arrays: arrays
    options: Callable[[Options, Arrays], Options] = lambda options, arrays: options
    result: Callable[[Any, Arrays, Options], Any] = lambda result, arrays, options: result

    def of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function, broken."""

        def broken(*arrays: Any, **options: Any) -> Any:
            given = self.arrays(arrays)
            return self.result(original(*given, **self.options(options, given)), arrays, options)

        return broken


def option(name: str, change: Callable[[Any], Any]) -> Callable[[Options, Arrays], Options]:
    """One option changed where it is given."""
    return lambda options, arrays: options if options.get(name) is None else {**options, name: change(options[name])}


def field(name: str, change: Callable[..., Any]) -> Callable[[Any, Arrays, Options], Any]:
    """One field of an observation changed; also the output where it is the result itself."""

    def changed(result: Any, arrays: Arrays, options: Options) -> Any:
        if not isinstance(result, ch.Observed | ch.Partial):
            return change(result, arrays, options)
        value = change(getattr(result, name), arrays, options)
        return replace(result, **{name: value})

    return changed


def shifted_keys(arrays: Arrays) -> Arrays:
    """Keys from 512 on are read two places too early: blocks of 6 did not divide tiles of 512."""
    q, k, *rest = arrays
    if k.shape[-2] <= 512:
        return arrays
    join = torch.cat if isinstance(k, torch.Tensor) else np.concatenate
    return q, join([k[..., :512, :], k[..., 510:-2, :]], -2), *rest


def bare_memory(arrays: Arrays) -> Arrays:
    """PyTorch's negative bit is not looked at."""
    return tuple(torch._neg_view(a) if isinstance(a, torch.Tensor) and a.is_neg() else a for a in arrays)


def overflowing(seen: Any, arrays: Arrays, options: Options) -> Any:
    """exp(sink − largest score) does not fit into float32 past 88."""
    xp = torch if isinstance(seen.lse, torch.Tensor) else np
    return replace(seen, lse=xp.where(seen.lse - seen.max_score > 88, xp.inf, seen.lse))


def from_rounded_output(found: Arrays, arrays: Arrays, options: Options) -> Arrays:
    """dq where Σ dout · output is taken of the output in half precision."""
    q, k, v, dout = (np.asarray(a.float() if isinstance(a, torch.Tensor) else a, np.float32) for a in arrays)
    plain = {name: value for name, value in options.items() if name != "kernel"}
    seen = ch.observe(q, k, v, **plain, weights=True)
    half = np.asarray(ch.attention(*arrays[:3], **options), np.float32)
    delta = (dout * (half - seen.output)).sum(-1, keepdims=True)
    scale = q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    k = np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3) if k.ndim > 2 else k
    dq = np.asarray(found[0], np.float32) - scale * delta * (seen.weights @ k)
    return (dq.astype(found[0].dtype), *found[1:])


def as_if_weights_summed_to_one(whole: Any, parts: Arrays, options: Options) -> Any:
    """The entropy of a merge, from parts of which none has a sink."""
    lse, entropy = np.asarray(whole.lse), np.zeros_like(np.asarray(whole.lse))
    for part in parts:
        apart = np.where(np.isinf(part.lse) | np.isinf(lse), 0, lse - np.asarray(part.lse))
        entropy += np.where(np.isinf(part.lse), 0, np.exp(-apart) * (np.asarray(part.entropy) + apart))
    return replace(whole, entropy=entropy)


def rounded_rows(arrays: Arrays) -> Arrays:
    """Keys and values once for each batch row, whose gradients are added up in half precision."""
    q, k, v, dout = arrays
    lead = dout.shape[:-3]
    return q, np.broadcast_to(k, (*lead, *k.shape[-3:])), np.broadcast_to(v, (*lead, *v.shape[-3:])), dout


def summed_in_half(found: Arrays, arrays: Arrays, options: Options) -> Arrays:
    def summed(gradient: np.ndarray, like: np.ndarray) -> np.ndarray:
        for axis, size in enumerate((1,) * (gradient.ndim - like.ndim) + like.shape):
            if size != gradient.shape[axis]:
                gradient = gradient.sum(axis, keepdims=True, dtype=gradient.dtype)
        return gradient.reshape(like.shape)

    return found[0], summed(found[1], arrays[1]), summed(found[2], arrays[2])


def without_nan(output: Any, *_: Any) -> Any:
    return (torch if isinstance(output, torch.Tensor) else np).nan_to_num(output)


def inner(mask: Any) -> Any:
    return mask.mask if isinstance(mask, Not) else mask


def no_empty_axis(arrays: Arrays) -> Arrays:
    if 0 in arrays[1].shape:
        raise ZeroDivisionError
    return arrays


def narrower(options: Options, arrays: Arrays) -> Options:
    """Few queries begin to read one key after the first that their window shows them."""
    mask = options.get("mask")
    if not isinstance(mask, Band) or mask.back is None or arrays[0].shape[-2] > 5:
        return options
    return {**options, "mask": replace(mask, back=mask.back - 1)}


def zero_times(name: str, number: int) -> Callable[[Any, Arrays, Options], Any]:
    """0 · NaN where there should be nothing."""
    return field(name, lambda value, arrays, options: value + 0 * arrays[number].sum())


def of_gradients(place: int, change: Callable[..., Any]) -> Callable[[Any, Arrays, Options], Any]:
    return lambda found, arrays, options: (
        *found[:place], change(found[place], arrays, options), *found[place + 1 :]
    )  # fmt: skip


def first_row(mask: Any) -> Any:
    """The offset or length of the first batch row for all."""
    given = mask.alignment.given if isinstance(mask, Band) else mask.count
    alone = np.full_like(given, given.reshape(-1)[0])
    if isinstance(mask, Band):
        return replace(mask, alignment=replace(mask.alignment, given=alone))
    return replace(mask, count=alone)


def plain_numbers(drawn: Drawn) -> bool:
    return drawn.library in ("numpy", "torch") and not drawn.planted and drawn.dtype in ("float32", "float64")


def kind(drawn: Drawn) -> str:
    return "" if drawn.mask is None else drawn.mask[0]


def half(drawn: Drawn) -> bool:
    return drawn.dtype in ("float16", "bfloat16")


MUTATIONS = {
    # as it was found
    "keys past the first tile are misplaced": Mutation(
        lambda d: d.keys > 512 and plain_numbers(d) and "merge" not in d.verb, ALL, arrays=shifted_keys
    ),
    "lse has no gradient": Mutation(
        lambda d: d.verb == "merged autograd", ("observe",), result=field("lse", lambda lse, *_: lse.detach())
    ),
    "padding under a negated mask is read": Mutation(
        lambda d: "'not'" in str(d.mask) and ("padding", "nan") in d.planted, FORWARD, result=zero_times("output", 2)
    ),
    "softcap multiplies padding": Mutation(
        lambda d: d.softcap is not None and ("padding", "nan") in d.planted and d.verb == "gradients",
        ("gradients",),
        result=of_gradients(0, lambda dq, arrays, _: dq + 0 * arrays[1].sum()),
    ),
    "a sink far above the scores overflows": Mutation(
        lambda d: d.sinks in (200.0, 900.0) and d.verb in ("observe", "merge"), ("observe",), result=overflowing
    ),
    "the negative bit is ignored": Mutation(lambda d: "negative" in d.layouts[:3], ALL, arrays=bare_memory),
    "half-precision gradients from the rounded output": Mutation(
        lambda d: half(d) and d.verb == "gradients" and not d.planted and d.whole_batch == () and d.softcap is None
        and d.dropout is None and d.library in ("numpy", "torch") and "negative" not in d.layouts,
        ("gradients",),
        result=from_rounded_output,
    ),
    "entropy of a merge with a sink": Mutation(
        lambda d: d.verb == "merge" and d.sinks in (0.0, 3.0) and not d.planted, ("merge",),
        result=as_if_weights_summed_to_one,
    ),
    "NaN spoils other queries": Mutation(
        lambda d: any(plant[0] == "v" for plant in d.planted) and d.mask is not None,
        FORWARD,
        result=field("output", lambda output, *_: output + 0 * output.sum()),
    ),
    "NaN is hidden": Mutation(
        lambda d: any(plant[:2] == ("v", "nan") for plant in d.planted) and d.library in ("numpy", "torch")
        and d.verb in FORWARD and plainly_seen(d),
        FORWARD,
        result=field("output", without_nan),
    ),
    "few queries miss a key of their window": Mutation(
        lambda d: kind(d) == "window" and d.queries <= 5, ALL, options=narrower
    ),
    "an empty axis is refused": Mutation(lambda d: d.keys == 0, ALL, arrays=no_empty_axis),
    "shared gradients are added up in half precision": Mutation(
        lambda d: half(d) and d.verb == "gradients" and d.library == "numpy" and not d.planted
        and int(np.prod(d.batch[1])) < d.sizes.batch,
        ("gradients",),
        arrays=rounded_rows,
        result=summed_in_half,
    ),
    # as it could be
    "sinks ignored": Mutation(lambda d: d.sinks == 3.0, ALL, options=option("sinks", lambda sinks: None)),
    "no gradient for sinks": Mutation(
        lambda d: d.verb == "autograd" and "s" in d.wants and d.sinks == 0.0, ("attention",),
        options=option("sinks", lambda sinks: sinks.detach()),
    ),
    "no gradient for a bias": Mutation(
        lambda d: d.verb == "autograd" and "b" in d.wants and d.bias is not None and d.bias[0] == "array",
        ("attention",),
        options=option("bias", lambda bias: bias.detach()),
    ),
    "softcap ignored": Mutation(lambda d: d.softcap == 0.3, ALL, options=option("softcap", lambda cap: None)),
    "scale without its sign": Mutation(lambda d: d.scale == -0.7, ALL, options=option("scale", abs)),
    "bias of the wrong sign": Mutation(
        lambda d: d.bias is not None and d.bias[0] == "array" and d.bias[3] == 0, ALL,
        options=option("bias", lambda bias: -bias),
    ),
    "dropout of another seed": Mutation(
        lambda d: d.dropout is not None, ALL, options=option("dropout", lambda given: (given[0], given[1] + 1))
    ),
    "a negation forgotten": Mutation(
        lambda d: kind(d) == "not", ALL, options=option("mask", inner)
    ),
    "and for or": Mutation(
        lambda d: kind(d) == "or", ALL,
        options=option("mask", lambda mask: Both(mask.left, mask.right) if isinstance(mask, Either) else mask),
    ),
    "the first batch row's lengths for all": Mutation(
        lambda d: kind(d) in ("lengths", "prefix", "causal") and isinstance(d.mask and d.mask[-1], tuple)
        and d.sizes.batch > 1 and "merge" not in d.verb,
        ALL,
        options=option("mask", first_row),
    ),
    "the largest score with the sink": Mutation(
        lambda d: d.sinks in (0.0, 3.0, 200.0) and d.verb == "observe", ("observe",),
        result=lambda seen, arrays, options: replace(seen, max_score=seen.lse),
    ),
    "entropy in bits": Mutation(
        lambda d: d.verb == "observe", ("observe",), result=field("entropy", lambda entropy, *_: entropy / np.log(2.0))
    ),
    "other keys named as the largest": Mutation(
        lambda d: "top" in dict(d.want) and d.keys > 3, ("observe",),
        result=field("top", lambda top, *_: top and top._replace(indices=top.indices * 0)),
    ),
    "the mean of a map for its largest": Mutation(
        lambda d: "map" in dict(d.want) and d.keys > 20, ("observe",),
        result=field("map", lambda found, *_: found and found._replace(max=found.mean)),
    ),
    "attention received of all queries": Mutation(
        lambda d: dict(d.want).get("received") == 1 and d.queries > 1, ("observe",),
        options=option("received", lambda count: True),
    ),
    "a gradient a thousandth too large": Mutation(
        lambda d: d.verb == "gradients" and d.dtype == "float32", ("gradients",),
        result=of_gradients(1, lambda dk, *_: dk * 1.001),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_the_random_problems_notice(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    # what few problems could show is looked for among those that `make fuzz` goes on with
    problems = map(draw, range(40 * SEEDS))
    showing = list(islice((one for one in problems if mutation.shows(one) and one.library != "jax"), ENOUGH))
    assert showing, "no problem of these could show it"
    for drawn in showing:
        if hold(drawn):
            continue
        with monkeypatch.context() as patch:
            for verb in mutation.verbs:
                patch.setattr(ch, verb, mutation.of(getattr(ch, verb)))
            if hold(drawn):
                return
    pytest.fail(f"none of {len(showing)} problems notices it")
