"""ablate() and patch(): a model run with the outputs of some heads taken away, or put in from another run.

What is changed is what a head gives, (queries, features), after its weights have mixed the values and before the
projection that joins the heads: everything else is the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, Self

try:
    import torch
    from torch import Tensor, nn
except ImportError:
    from clearhead.core.installing import brings

    raise ImportError(f"ablate and patch need PyTorch: {brings('torch')}") from None

from clearhead.core.errors import ArgumentError
from clearhead.watching.call import Call, whole_numbers
from clearhead.watching.opening import watch
from clearhead.watching.record import Record


class Edit(watch):
    """A watch that looks at nothing, and changes what some heads of some layers give."""

    def __init__(
        self,
        model: nn.Module,
        layer: int | str | Iterable[int | str],
        head: int | Iterable[int],
        queries: int | Iterable[int] | None,
    ) -> None:
        super().__init__(model, layers=layer, heads=head, want={})
        self.queries = queries
        self.changed: set[str] = set()
        self.recorder.edit = self._edit

    def __enter__(self) -> Self:  # type: ignore[override]  # there is nothing to read
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and not self.changed:  # an experiment that changed nothing must not pass for one that did
            made = ", ".join(sorted(self.recorder.made_calls)[:6])
            why = next(iter(self.recorder.seen.missed.values()), "")
            raise ArgumentError("layer", f"names no call that was made; calls were made by {made}" if made else why)

    def new(self, mine: Tensor, head: int) -> Tensor:
        """What a head gives, (…, queries, features), in place of what it gave."""
        raise NotImplementedError

    def _edit(self, output: Tensor) -> Tensor:
        """The output (…, heads, queries, features) of the call that is being made, changed."""
        count = output.shape[-3] if output.ndim > 2 else 0
        result = output.clone()
        rows: Any = slice(None)
        if self.queries is not None:
            rows = [at % output.shape[-2] for at in whole_numbers("queries", self.queries, output.shape[-2])]
        for head in self.recorder.heads or ():
            if head >= count:
                raise ArgumentError("head", f"has {head}, and {self.recorder.running!r} has {count or 'no'} heads")
            result[..., head, rows, :] = self.new(output[..., head, :, :], head)[..., rows, :].to(output)
        self.changed.add(self.recorder.running)
        return result


class ablate(Edit):
    """Run a model without some heads: what they give is 0, or by="mean" its own mean over queries.

    >>> import torch, clearhead as ch
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> x = torch.randn(1, 7, 16)
    >>> with ch.ablate(model, layer=0, head=1):
    ...     without = model(x)
    >>> bool((without - model(x)).abs().max() > 0)
    True

    - layer: numbers, or names of modules in which * stands for anything, as `watch` takes them.
    - head: one head, or several.
    - queries: only at these positions; everywhere unless given.

    Every call that `watch` sees can be changed, `nn.MultiheadAttention` and Hugging Face models on "sdpa", "eager" or
    "clearhead" among them, gradients included. Where no call was changed, leaving the block raises.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layer: int | str | Iterable[int | str],
        head: int | Iterable[int],
        by: Literal["zero", "mean"] = "zero",
        queries: int | Iterable[int] | None = None,
    ) -> None:
        if by not in ("zero", "mean"):
            raise ArgumentError("by", f"is {by!r}, expected 'zero' or 'mean'")
        super().__init__(model, layer, head, queries)
        self.by = by

    def new(self, mine: Tensor, head: int) -> Tensor:
        if self.by == "zero":
            return torch.zeros_like(mine)
        if mine.shape[-2] == 1:
            who = self.recorder.running
            raise ArgumentError(
                "by", f"is 'mean', and {who!r} has one query, whose mean is itself: by='zero' changes it"
            )
        return mine.mean(-2, keepdim=True).expand_as(mine)


class patch(Edit):
    """Run a model with what some heads gave in another run, which `watch` saw with want={"output": True}.

    >>> import torch, clearhead as ch
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> clean, corrupted = torch.randn(1, 7, 16), torch.randn(1, 7, 16)
    >>> with ch.watch(model, want={"output": True}) as seen:
    ...     output = model(clean)
    >>> with ch.patch(model, seen, layer=0, head=1):
    ...     patched = model(corrupted)
    >>> bool((patched - model(corrupted)).abs().max() > 0)
    True

    `layer`, `head` and `queries` are those of `ablate`. Both runs have the same lengths, and step for step the calls of
    one are put in the place of the other's.
    """

    def __init__(
        self,
        model: nn.Module,
        seen: Record,
        *,
        layer: int | str | Iterable[int | str],
        head: int | Iterable[int],
        queries: int | Iterable[int] | None = None,
    ) -> None:
        if not isinstance(seen, Record):
            raise ArgumentError("seen", f"is a {type(seen).__name__}, expected what watch saw of another run")
        super().__init__(model, layer, head, queries)
        self.others: dict[tuple[str, int], list[Call]] = {}
        for call in seen:
            self.others.setdefault((call.name, call.step), []).append(call)
        self.taken: dict[tuple[str, int, int], int] = {}

    def new(self, mine: Tensor, head: int) -> Tensor:
        name, step = self.recorder.running, self.recorder.here.step
        place = self.taken.get((name, step, head), 0)  # a module may be called several times in a step
        self.taken[name, step, head] = place + 1
        there = self.others.get((name, step), [])
        if place >= len(there):
            raise ArgumentError("seen", f"has no call {place} of {name!r} in step {step}, whose output could be put in")
        call = there[place]
        if call.observed.output.shape[-1] != mine.shape[-1]:
            raise ArgumentError("seen", f"has no output of {name!r}: watch(model, want={{'output': True}}) keeps it")
        theirs = torch.as_tensor(call.observed.output)[..., call.place_of(head), :, :]
        if theirs.shape != mine.shape:
            raise ArgumentError("seen", f"has {tuple(theirs.shape)} for {name!r}, and this run {tuple(mine.shape)}")
        return theirs
