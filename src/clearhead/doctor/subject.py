"""Somebody's function, called: its parameters, what is handed over for each, and what comes back."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clearhead.core.arrays import is_array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.doctor import roles, speech
from clearhead.doctor.answers import Failed, Got, Hung, read
from clearhead.doctor.probes import Probe
from clearhead.doctor.quiet import LIMIT, Late, quiet, told
from clearhead.doctor.ways import Way

# Seconds after which all calls together are enough
BUDGET = 60.0


@dataclass(eq=False)
class Subject:
    """A function, or a module in evaluation mode: a copy, so that nobody's own is changed."""

    function: Any
    name: str
    parameters: dict[str, Any]
    library: str | None
    inputs: roles.Roles
    built: dict[str, Any] = field(default_factory=dict)  # what its class was called with, where that is known
    copies: dict[str, Any] = field(default_factory=dict)
    given: dict[str, np.ndarray] = field(default_factory=dict)  # projections that are handed over
    spent: float = 0.0  # seconds in calls so far

    @classmethod
    def of(cls, function: Any, built: dict[str, Any] | None = None) -> Subject:
        """Read a callable's name, parameters and library."""
        torch = sys.modules.get("torch")
        if not callable(function):
            function = function.forward
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        built = built or {}
        if torch is not None and isinstance(function, torch.nn.Module):
            try:
                module = copy.deepcopy(function).to("cpu").eval()
            except Exception as error:
                raise ArgumentError("function", f"is a module that cannot be copied: {error}") from None
            parameters = _parameters(module.forward)
            return cls(module, name, parameters, "torch", roles.roles_of(parameters), built)
        parameters = _parameters(function)
        return cls(function, name, parameters, speech.spoken(function), roles.roles_of(parameters), built)

    @property
    def is_module(self) -> bool:
        """True for a PyTorch module."""
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(self.function, torch.nn.Module)

    @property
    def owner(self) -> Any:
        """The object whose attributes say how it was built: itself, or the one whose method it is."""
        return getattr(self.function, "__self__", self.function)

    def masks(self) -> list[str]:
        """The parameters that may be a mask, the likeliest first: those for padding come last."""
        taken = (*self.inputs.names, *self.inputs.weights.values())
        return [name for name in roles.masks_of(self.parameters) if name not in taken]

    def required_mask(self) -> str | None:
        """The mask that has to be given, if there is one."""
        empty = inspect.Parameter.empty
        return next((name for name in self.masks() if self.parameters[name].default is empty), None)

    def causal(self) -> str | None:
        """The parameter that is a causal flag, if there is one."""
        return roles.causal_of(self.parameters)

    def heads(self) -> str | None:
        """The parameter that says how many heads a packed input has, if there is one."""
        return roles.heads_of(self.parameters)

    def documentation(self) -> str:
        """What the function says of itself."""
        function = self.function.forward if self.is_module else self.function
        parts = (getattr(function, "__doc__", None), None if function is self.function else self.function.__doc__)
        return " ".join(part for part in parts if part)

    def source(self) -> str:
        """What it says of itself, its comments among it; the documentation where there is no source."""
        function = self.function.forward if self.is_module else self.function
        try:
            return inspect.getsource(function)
        except (OSError, TypeError):
            return self.documentation()

    def call(self, way: Way, probe: Probe, dtype: str = "float32", *, strided: bool = False) -> Got:
        """Call it on one problem; whatever goes wrong is `Failed`."""
        arrays = [make(way.library, array, dtype, strided=strided) for array in way.form.give(probe)]
        if way.order is not None:
            arrays = [arrays[i] for i in way.order]
        values = dict(zip(self.inputs.names, arrays, strict=False))
        held = {f"input {i + 1}": array for i, array in enumerate(arrays)}
        values |= self._arguments(way, probe, dtype)
        if way.mask is not None and way.mask.parameter in values:
            held["the mask"] = values[way.mask.parameter]
        before = {name: np.array(to_numpy(array)) for name, array in held.items() if is_array(array)}
        result = self._answer(self._at(dtype), way.library, *self._placed(values))
        written = tuple(
            name for name, array in before.items() if not np.array_equal(array, to_numpy(held[name]), equal_nan=True)
        )
        return read(result, way, probe, written)

    def _answer(self, function: Any, library: str, placed: list[Any], named: dict[str, Any]) -> Any:
        if self.spent > BUDGET:
            raise Hung(f"its calls have taken {self.spent:.0f} seconds so far, and that is enough")
        began = time.perf_counter()
        with quiet(library):
            try:
                return function(*placed, **named)
            except KeyboardInterrupt:
                raise
            except Late as error:
                raise Hung(f"it had not answered after {LIMIT} seconds") from error
            except BaseException as error:  # SystemExit and the like: somebody's function must not end the check
                raise Failed(told(error)) from error
            finally:
                self.spent += time.perf_counter() - began

    def _placed(self, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments by place as long as the parameters before them are given too, and by name from there on."""
        placed: list[Any] = []
        for name, parameter in self.parameters.items():
            if name not in values or parameter.kind not in roles.PLACED:
                break
            placed.append(values[name])
        taken = list(self.parameters)[: len(placed)]
        return placed, {name: value for name, value in values.items() if name not in taken}

    def _at(self, dtype: str) -> Any:
        if not self.is_module:
            return self.function
        if dtype not in self.copies:
            self.copies[dtype] = copy.deepcopy(self.function).to(getattr(sys.modules["torch"], dtype))
        return self.copies[dtype]

    def _arguments(self, way: Way, probe: Probe, dtype: str) -> dict[str, Any]:
        sizes = way.form.inner(probe.sizes)
        arguments: dict[str, Any] = {
            name: make(way.library, self.given[role], dtype) for role, name in self.inputs.weights.items()
        }
        for name, parameter in self.parameters.items():
            if name in self.inputs.names or name in arguments:
                continue
            if name == self.heads() and (way.form.packed or parameter.default is parameter.empty):
                arguments[name] = sizes.heads
            elif name == "need_weights":
                arguments[name] = False  # with weights PyTorch's module takes another path
            elif sizes.groups > 1 and name in (*roles.KEY_HEADS, *roles.REPEATS):
                arguments[name] = roles.filled(name, sizes)
            elif sizes.groups > 1 and roles.GROUPED.search(name):
                arguments[name] = True
            elif parameter.default is parameter.empty and parameter.kind in roles.NAMED:
                arguments[name] = _made(way.library, roles.filled(name, sizes), dtype)
        self._mask(way, probe, dtype, arguments)
        return arguments

    def _mask(self, way: Way, probe: Probe, dtype: str, arguments: dict[str, Any]) -> None:
        sizes, allowed = probe.sizes, probe.allowed
        if allowed is None and way.mask is not None and way.mask.parameter == self.required_mask():
            allowed = np.ones((sizes.batch, 1, sizes.queries, sizes.keys), bool)
        if allowed is not None and way.mask is not None:
            mask = way.mask.build(allowed, way.form.inner(sizes).heads)
            floating = mask.dtype.kind == "f"
            arguments[way.mask.parameter] = make(way.library, mask, dtype if floating else str(mask.dtype))
        if probe.causal and way.causal is not None:
            arguments[way.causal] = True
            torch_module = self.is_module and type(self.function).__module__.startswith("torch.")
            if torch_module and way.mask is not None:  # is_causal there is only a hint beside a mask
                hidden = ~np.tri(sizes.queries, sizes.keys, dtype=bool)
                arguments[way.mask.parameter] = make(way.library, hidden, "bool")


def make(library: str, array: np.ndarray, dtype: str, *, strided: bool = False) -> Any:
    """A fresh array of a library; `strided` lays its memory out in another order, as a transpose does."""
    if strided and array.ndim > 1:
        one, two = (-3, -2) if array.ndim > 2 else (-2, -1)
        swapped = make(library, np.ascontiguousarray(array.swapaxes(one, two)), dtype)
        return swapped.transpose(one, two) if library == "torch" else swapped.swapaxes(one, two)
    if library == "torch":
        torch = importlib.import_module("torch")
        return torch.tensor(array).to(getattr(torch, dtype))
    if library == "jax":
        return importlib.import_module("jax.numpy").asarray(array, dtype=dtype)
    return np.array(array, dtype=dtype)


def _made(library: str, value: Any, dtype: str) -> Any:
    """The same with NumPy's arrays, inside a tuple too, made into the library's."""
    if isinstance(value, tuple):
        return tuple(_made(library, part, dtype) for part in value)
    if not isinstance(value, np.ndarray):
        return value
    return make(library, value, dtype if value.dtype.kind == "f" else str(value.dtype))


def _parameters(function: Any) -> dict[str, Any]:
    """The parameters by name; those of a built-in are read from its documentation, and *args are q, k and v."""
    kind = inspect.Parameter
    try:
        found = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return _documented(function)
    open_ended = any(parameter.kind is kind.VAR_POSITIONAL for parameter in found.values())
    named = {n: p for n, p in found.items() if p.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)}
    required = [p for p in named.values() if p.default is p.empty and p.kind is not kind.KEYWORD_ONLY]
    if open_ended and not required:
        return {name: kind(name, kind.POSITIONAL_ONLY) for name in "qkv"} | named
    return named


def _documented(function: Any) -> dict[str, Any]:
    match = re.match(r"\s*\w+\((.*?)\)", getattr(function, "__doc__", None) or "", re.DOTALL)
    found = {}
    for part in (match.group(1) if match else "q, k, v").split(","):
        name, _, default = part.strip().lstrip("*").partition("=")
        if name.isidentifier():
            empty = inspect.Parameter.empty if not default else None
            found[name] = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=empty)
    return found
