"""Sinks far above and far below all scores, head by head: output, log-sum-exp, entropy and the sink's own gradient."""

from __future__ import annotations

import numpy as np
import pytest
import row_by_row
import torch
from budget import Expected, by_formula, check
from conformance import built

import clearhead as ch

RNG = np.random.default_rng(3)
Q, K, V = (RNG.standard_normal((1, n, 16)) for n in (19, 23, 23))
DOUT = RNG.standard_normal(Q.shape)
MASK = np.tri(19, 23, 2, dtype=bool)
LOGITS = (-np.inf, -1e30, -1e4, -95.0, 0.3, 30.0, 59.0, 61.0, 87.0, 95.0, 720.0, 1e4, 1e30, np.inf)
KERNELS = ["dense", "tiled", pytest.param("compiled", marks=built)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("logit", LOGITS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sink_of_any_size(kernel: str, logit: float, options: dict[str, float], dtype: torch.dtype) -> None:
    given = {"scale": 0.25, "mask": MASK, **options}
    exact = row_by_row.attend(Q, K, V, DOUT, sinks=np.array([[logit]]), **given)
    plain = by_formula(
        *(a.astype(str(dtype)[6:]) for a in (Q, K, V, DOUT)), sinks=np.full((1, 1), logit, str(dtype)[6:]), **given
    )
    q, k, v, dout = (torch.tensor(a, dtype=dtype) for a in (Q, K, V, DOUT))
    sinks = torch.tensor([logit], dtype=dtype, requires_grad=True)
    tensors = [a.requires_grad_() for a in (q, k, v)]
    mask = torch.tensor(MASK)
    output = ch.attention(*tensors, mask=mask, scale=0.25, sinks=sinks, kernel=kernel, **options)
    dq, dk, dv, dsinks = torch.autograd.grad(output, (*tensors, sinks), dout)
    with torch.no_grad():
        seen = ch.observe(*tensors, mask=mask, scale=0.25, sinks=sinks, kernel=kernel, received=True, **options)
    # below the smallest number of full precision there are no digits to hold anyone to
    eps, least = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    found = {"output": output, "dq": dq, "dk": dk, "dv": dv, "lse": seen.lse, "entropy": seen.entropy}
    for name, value in found.items():
        size = max(float(np.abs(exact[name][np.isfinite(exact[name])]).max(initial=0.0)), least / eps)
        # an exponent of the size of the logit is rounded, and weights are as exact as it is
        size *= 1 + (abs(logit) if np.isfinite(logit) and least < size < 1e-6 else 0)
        check(value.detach(), Expected(exact[name], plain[name], eps, size), 23, name)
    # a sum over 19 rows, each of a product over 16 features, of which the sink's share is as exact as its exponent
    size = max(np.abs(exact["dsinks"]).sum(), least / eps) * (1 + min(abs(logit), 1e4))
    assert abs(float(dsinks) - exact["dsinks"].sum()) <= np.sqrt(19 * 16) * eps * size


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sink_of_nan_spoils_its_head_alone(kernel: str) -> None:
    sinks = np.array([np.nan, 0.5])
    output = ch.attention(*(np.repeat(a, 2, 0) for a in (Q, K, V)), sinks=sinks, kernel=kernel)
    assert np.isnan(output[0]).all()
    np.testing.assert_allclose(
        output[1], ch.attention(Q, K, V, sinks=sinks[1:], kernel="dense")[0], rtol=1e-6, atol=1e-12
    )
