"""What was seen as a pandas table: a row for each query of each head, batch row and call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.core.arrays import to_numpy
from clearhead.core.installing import brings
from clearhead.watching.call import Call
from clearhead.watching.record import Record

if TYPE_CHECKING:
    import pandas


def to_pandas(seen: Record) -> pandas.DataFrame:
    """One row for each query: who attended, in which head, how widely, and to what most.

    Columns are call, name, layer, step, batch, head, query, token, entropy, max_score and lse; distance where it was
    observed; and key, key_token and weight, the key with the largest weight, where `top` was.

    >>> import torch, clearhead as ch
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> with ch.watch(model, want={"top": 1}, tokens=["the", "bank", "closed"]) as seen:
    ...     output = model(torch.zeros(1, 3, 16))
    >>> table = seen.to_pandas()
    >>> table.shape, table.groupby(["layer", "head"]).entropy.mean().round(3).tolist()
    ((6, 14), [1.099, 1.099])
    """
    try:
        import pandas
    except ImportError:
        raise ImportError(f"to_pandas needs pandas: {brings('pandas')}") from None
    tables = [pandas.DataFrame(_columns(call)) for call in seen]
    return pandas.concat(tables, ignore_index=True) if tables else pandas.DataFrame()


def _columns(call: Call) -> dict[str, Any]:
    heads = call.shape[-3] if len(call.shape) > 2 else 1
    sizes = (math.prod(call.shape[:-3]), heads, call.shape[-2])
    batch, head, query = (axis.ravel() for axis in np.indices(sizes))
    columns: dict[str, Any] = {"call": call.index, "name": call.name, "layer": call.layer, "step": call.step}
    columns |= {"batch": batch, "head": np.asarray(call.heads or range(heads))[head], "query": query}
    named = call.queries_named
    columns["token"] = None if named is None else [named[b % len(named)][q] for b, q in zip(batch, query, strict=True)]
    for name in ("entropy", "max_score", "lse", "distance"):
        array = getattr(call, name)
        if array is not None:
            columns[name] = to_numpy(array).ravel()
    if call.top is not None:
        place = to_numpy(call.top.indices)[..., 0].ravel()
        columns["key"] = place
        keys = call.keys_named
        columns["key_token"] = (
            None
            if keys is None
            else [keys[b % len(keys)][k] if k >= 0 else None for b, k in zip(batch, place, strict=True)]
        )
        columns["weight"] = to_numpy(call.top.weights)[..., 0].ravel()
    return columns
