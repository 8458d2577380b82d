"""What is seldom left to do on Hopper after both looks: rows that are not finite, and lists that were too short."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import MARKS
from on_gpu import first_of_the_largest

import clearhead as ch
from clearhead.core.observations import want
from clearhead.core.problem import pose

pytestmark = MARKS
T, S, D, TOP = 75, 90, 64, 5
MASKS: dict[str, Any] = {"causal": ch.causal(), "Longformer": ch.window(9, 3) | ch.global_tokens([0, 50])}


@pytest.mark.parametrize("name", MASKS)
def test_marked_blocks_are_computed_anew_and_long_lists_searched(name: str) -> None:
    from clearhead.kernels.gpu.call import Call, Forward
    from clearhead.kernels.hopper.mend import Searched, mended
    from clearhead.kernels.hopper.top_kernel import HELD

    torch.manual_seed(5)
    mask, scale = MASKS[name], D**-0.5
    q, k, v = torch.randn(2, 4, T, D).half(), torch.randn(2, 2, S, D).half(), torch.randn(2, 2, S, D).half()
    k[:, :, 1:] = k[:, :, 5:6]  # all keys but the first are alike: ties
    right = ch.observe(q.double(), k.double(), v.double(), mask=mask, kernel="dense", top=TOP, weights=True)
    call = Call(pose(q, k, v, mask=mask, want=lambda grid: want(grid, top=TOP)))
    output = torch.full((2, 4, T, D), math.nan, dtype=torch.float16)
    odd, counts = torch.zeros(2, 4, T, dtype=torch.int32), torch.full((2, 4, T), HELD, dtype=torch.int32)
    odd[1, 2, 70] = 1
    counts[0, 3, 7], counts[1, 2, 66] = HELD + 1, HELD + 9
    weights, indices = torch.full((2, 4, T, TOP), -3.0), torch.full((2, 4, T, TOP), -3)
    peak, total = right.max_score.float(), torch.exp(right.lse - right.max_score).float()
    span, spanned = call.mask.span, call.form.program is None
    constants = {
        "TOP": TOP, "K": 8, "HEAD_DIM": D, "UPPER": spanned, "LOWER": False, "PROGRAM": call.form.program,
        "SOFTCAP": False, "HELD": HELD,
    }  # fmt: skip
    numbers = (2, span.high if spanned else 0, 0, scale, 1.0, scale * math.log2(math.e))
    told = torch.full((17,), -3, dtype=torch.int32)
    mended(
        call,
        Forward(output, peak, peak, total, None, None, None),
        odd,
        told,
        Searched(counts, peak, total, weights, indices, numbers, constants),
    )
    block = slice(64, T)  # of 64 rows each
    assert sorted(told.tolist()) == [0] * 16 + [1], "one program had a row that is marked; long lists are none"
    # weights are rounded before they meet values, and so is what comes of both
    rounding = float(torch.finfo(torch.float16).eps * v.abs().max())
    torch.testing.assert_close(output[1, 2, block].double(), right.output[1, 2, block], rtol=0.0, atol=rounding)
    output[1, 2, block] = math.nan
    assert output.isnan().all(), "nobody else's"
    largest = first_of_the_largest(right.weights, TOP)
    for place in ((0, 3, 7), (1, 2, 66)):
        torch.testing.assert_close(weights[place].double(), right.top.weights[place], rtol=2e-3, atol=1e-6)
        assert torch.equal(indices[place], largest[place])
        weights[place] = -3.0
    assert (weights == -3).all(), "other lists were not too short"


WIDE: dict[str, Any] = {
    "causal": ch.causal(),
    "window": ch.window(40, 3),
    "Longformer": ch.window(40, 3) | ch.global_tokens([0, 250]),
    "blocks": ch.blocks(torch.arange(5 * 7).reshape(5, 7) % 3 != 0, 60),
}


@pytest.mark.parametrize("name", WIDE)
def test_long_lists_are_searched_in_the_tiles_that_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.kernels.gpu.call import Call, Forward
    from clearhead.kernels.hopper.mend import Searched, mended
    from clearhead.kernels.hopper.top_kernel import HELD

    torch.manual_seed(7)
    queries, keys, mask, scale = 300, 420, WIDE[name], D**-0.5
    q, k = (torch.randn(1, 2, n, D).half() for n in (queries, keys))
    k[:, :, 130:] = k[:, :, 131:132]  # ties, of which the first are wanted, whichever tile they are in
    right = ch.observe(q.double(), k.double(), k.double(), mask=mask, kernel="dense", top=TOP, weights=True)
    peak, total = right.max_score.float(), torch.exp(right.lse - right.max_score).float()
    counts = torch.where(torch.arange(queries) % 7 < 3, HELD + 1, HELD).int().expand(1, 2, queries).contiguous()
    many = counts[0, 0] > HELD
    largest = first_of_the_largest(right.weights, TOP)

    def found(lists_of: Any) -> tuple[torch.Tensor, torch.Tensor]:
        call = Call(pose(q, k, k, mask=mask, want=lambda grid: want(grid, top=TOP)))
        narrow = Call(pose(q, k, k, mask=lists_of, want=lambda grid: want(grid, top=TOP)))
        spanned, span = call.form.program is None, call.mask.span
        monkeypatch.setattr(call, "lists", narrow.lists)
        monkeypatch.setattr(call, "mask", replace(call.mask, span=narrow.mask.span))
        constants = {
            "TOP": TOP, "K": 8, "HEAD_DIM": D, "UPPER": spanned, "LOWER": name == "window",
            "PROGRAM": call.form.program, "SOFTCAP": False, "HELD": HELD,
        }  # fmt: skip
        numbers = (1, *((span.high, span.low) if spanned else (0, 0)), scale, 1.0, scale * math.log2(math.e))
        weights, indices = torch.full((1, 2, queries, TOP), -3.0), torch.full((1, 2, queries, TOP), -3)
        searched = Searched(counts, peak, total, weights, indices, numbers, constants)
        output, odd = torch.zeros(1, 2, queries, D).half(), torch.zeros(1, 2, queries, dtype=torch.int32)
        told = torch.zeros(5, dtype=torch.int32)
        mended(call, Forward(output, peak, peak, total, None, None, None), odd, told, searched)
        return weights, indices

    weights, indices = found(mask)
    torch.testing.assert_close(weights[:, :, many].double(), right.top.weights[:, :, many], rtol=2e-3, atol=1e-6)
    assert torch.equal(indices[:, :, many], largest[:, :, many])
    assert (weights[:, :, ~many] == -3).all()
    # and in no other tile: by the lists of fewer keys nothing behind them is found
    _, nearer = found(mask & ch.prefix(64) if name in ("Longformer", "blocks") else ch.lengths([64]) & mask)
    assert nearer[:, :, many].max() < 64 < indices[:, :, many].max()


@pytest.mark.parametrize("lying", ["heads before positions", "heads between"])
def test_an_output_is_mended_where_it_lies_and_it_is_told_that_there_was_something(lying: str) -> None:
    from clearhead.kernels.gpu.call import Call, Forward
    from clearhead.kernels.gpu.repair import repaired

    torch.manual_seed(6)
    q, k, v = (torch.randn(2, heads, n, D).half() for heads, n in ((4, T), (2, S), (2, S)))
    right = ch.attention(q.double(), k.double(), v.double(), mask=ch.causal(), kernel="dense")
    shape = (2, 4, T, D) if lying == "heads before positions" else (2, T, 4, D)
    output = torch.full(shape, math.nan, dtype=torch.float16)
    output = output if lying == "heads before positions" else output.transpose(1, 2)
    odd, total = torch.zeros(2, 4, T, dtype=torch.int32), torch.ones(2, 4, T)
    call = Call(pose(q, k, v, mask=ch.causal()))
    rows = Forward(output, total, total, total, None, None, None)
    assert not repaired(call, rows, odd).told.any()
    assert output.isnan().all(), "nothing was marked"
    total[0, 3, 2] = 0.0
    assert repaired(call, rows, odd).told.any()
    assert output.isnan().all(), "a row without a sum is told of, and no more"
    total[0, 3, 2], odd[1, 2, 70] = 1.0, 1
    assert repaired(call, rows, odd).told.any()
    rounding = float(torch.finfo(torch.float16).eps * v.abs().max())
    torch.testing.assert_close(output[1, 2, 64:].double(), right[1, 2, 64:], rtol=0.0, atol=rounding)
    output[1, 2, 64:] = math.nan
    assert output.isnan().all(), "nobody else's"


def test_an_output_lies_as_queries_do_where_they_have_no_gaps() -> None:
    from clearhead.kernels.gpu.launcher import Launcher
    from clearhead.kernels.gpu.replay import Recorder
    from clearhead.kernels.hopper.forward import strides_like

    between = torch.zeros(2, 5, 3, 8).transpose(1, 2)
    assert strides_like(between) == between.stride()
    assert strides_like(between[:1]) == between.stride(), "of one batch row any stride will do"
    for other in (between.contiguous(), between[:, :2], between[:, :, :4], between[..., :4], between[:, :, ::2]):
        assert strides_like(other) is None
    assert strides_like(torch.zeros(2, 1, 3, 8).transpose(1, 2)) is None, "one position lies in either order"
    launch = Recorder(Launcher(), ())
    room = launch.room(tuple(between.shape), torch.float32, between.device, strides_like(between))
    assert room.stride() == launch.rooms[0].strides == between.stride()
