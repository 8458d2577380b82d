"""Somebody's function, called: which library it speaks, what its parameters are, and what comes back."""

from __future__ import annotations

import contextlib
import copy
import dis
import importlib
import inspect
import io
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clearhead.core.arrays import Library, dtype_name, is_array, to_numpy
from clearhead.core.errors import ArgumentError
from clearhead.doctor.forms import Form, Module
from clearhead.doctor.probes import Probe
from clearhead.doctor.projections import HEADS

LIBRARIES = ("numpy", "torch", "jax")
MASK = re.compile(r"mask|bias$", re.IGNORECASE)
CAUSAL = re.compile(r"^(is_|use_)?(causal|autoregressive)(_mask|_masking|_attention)?$", re.IGNORECASE)
FLAGS = re.compile(r"train|dropout|causal|return|need|weights|verbose|determin|inference", re.IGNORECASE)

# What a mask may be handed over as; True and 1 mean "may attend" or "hide", additive masks are added to the scores
ENCODINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "attend": lambda allowed: allowed,
    "hide": lambda allowed: ~allowed,
    "additive": lambda allowed: np.where(allowed, 0.0, -np.inf),
    "additive -1e9": lambda allowed: np.where(allowed, 0.0, -1e9),
    "attend 1/0": lambda allowed: allowed.astype(np.int64),
    "hide 1/0": lambda allowed: (~allowed).astype(np.int64),
    "attend 1.0/0.0": lambda allowed: allowed.astype(np.float64),
}
SHAPES = ("TS", "B1TS", "BTS", "BHTS", "B11S", "BS")


class Failed(Exception):
    """A call that raised, or gave something that is no answer; the words say which."""


@dataclass(frozen=True)
class MaskWay:
    """How a mask is handed over: by which parameter, meaning what, in which shape."""

    parameter: str
    encoding: str
    shape: str

    def build(self, allowed: np.ndarray, heads: int) -> np.ndarray:
        """The array for (B, 1, T, S), True where a query may attend."""
        shaped = {
            "TS": allowed[0, 0],
            "B1TS": allowed,
            "BTS": allowed[:, 0],
            "BHTS": np.broadcast_to(allowed, (allowed.shape[0], heads, *allowed.shape[2:])),
            "B11S": allowed[:, :, :1],
            "BS": allowed[:, 0, 0],
        }[self.shape]
        return ENCODINGS[self.encoding](np.ascontiguousarray(shaped))

    @property
    def only_keys(self) -> bool:
        """True where the mask has no axis for queries: padding."""
        return self.shape in ("BS", "B11S")

    @property
    def by_batch(self) -> bool:
        """True where batch rows may have different masks."""
        return self.shape != "TS"


@dataclass(frozen=True)
class Way:
    """How a function is called: library, form, which of the things it returns is the output, mask, causal flag."""

    library: str
    form: Form
    output: int | None = None
    weights: int | None = None
    mask: MaskWay | None = None
    causal: str | None = None


@dataclass(frozen=True, eq=False)
class Got:
    """What a call gave, in the form's own axes and in float64."""

    output: np.ndarray
    weights: np.ndarray | None
    dtype: str
    written: tuple[str, ...]
    way: Way


@dataclass(eq=False)
class Subject:
    """A function, or a module in evaluation mode: a copy, so that nobody's own is changed."""

    function: Any
    name: str
    parameters: dict[str, Any]
    library: str | None
    copies: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Any) -> Subject:
        """Read a callable's name, parameters and library."""
        torch = sys.modules.get("torch")
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        if torch is not None and isinstance(function, torch.nn.Module):
            try:
                module = copy.deepcopy(function).to("cpu").eval()
            except Exception as error:
                raise ArgumentError("function", f"is a module that cannot be copied: {error}") from None
            return cls(module, name, _parameters(module.forward), "torch")
        return cls(function, name, _parameters(function), _spoken(function))

    @property
    def is_module(self) -> bool:
        """True for a PyTorch module."""
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(self.function, torch.nn.Module)

    def masks(self) -> list[str]:
        """The parameters that may be a mask, the likeliest first: those for padding come last."""
        names = [name for name in self.parameters if MASK.search(name) and not CAUSAL.match(name)]
        return sorted(names, key=lambda name: ("pad" in name.lower(), name.lower().endswith("bias")))

    def causal(self) -> str | None:
        """The parameter that is a causal flag, if there is one."""
        return next((name for name in self.parameters if CAUSAL.match(name)), None)

    def heads(self) -> str | None:
        """The parameter that says how many heads a packed input has, if there is one."""
        return next((name for name in self.parameters if name in HEADS and name not in ("h",)), None)

    def documentation(self) -> str:
        """What the function says of itself."""
        function = self.function.forward if self.is_module else self.function
        parts = (getattr(function, "__doc__", None), None if function is self.function else self.function.__doc__)
        return " ".join(part for part in parts if part)

    def call(self, way: Way, probe: Probe, dtype: str = "float32") -> Got:
        """Call it on one problem; whatever goes wrong is `Failed`."""
        given = [make(way.library, array, dtype) for array in way.form.give(probe)]
        arguments = self._arguments(way, probe, dtype)
        held = {f"input {i + 1}": array for i, array in enumerate(given)}
        if way.mask is not None and way.mask.parameter in arguments:
            held["the mask"] = arguments[way.mask.parameter]
        before = {name: np.array(to_numpy(array)) for name, array in held.items() if is_array(array)}
        with _quiet(way.library):
            try:
                result = self._at(dtype)(*given, **arguments)
            except Exception as error:
                raise Failed(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        written = tuple(
            name for name, array in before.items() if not np.array_equal(array, to_numpy(held[name]), equal_nan=True)
        )
        return _answer(result, way, probe, written)

    def _at(self, dtype: str) -> Any:
        if not self.is_module:
            return self.function
        if dtype not in self.copies:
            self.copies[dtype] = copy.deepcopy(self.function).to(getattr(sys.modules["torch"], dtype))
        return self.copies[dtype]

    def _arguments(self, way: Way, probe: Probe, dtype: str) -> dict[str, Any]:
        sizes, arguments = probe.sizes, {}
        places = 1 if isinstance(way.form, Module) and way.form.single else 3
        for name, parameter in list(self.parameters.items())[places:]:
            if way.form.packed and not isinstance(way.form, Module) and name == self.heads():
                arguments[name] = sizes.heads
            elif name == "need_weights":
                arguments[name] = False  # with weights PyTorch's module takes another path
            elif parameter.default is parameter.empty and parameter.kind in _NAMED:
                arguments[name] = _required(name, sizes)
        if probe.allowed is not None and way.mask is not None:
            mask = way.mask.build(probe.allowed, sizes.heads)
            floating = mask.dtype.kind == "f"
            arguments[way.mask.parameter] = make(way.library, mask, dtype if floating else str(mask.dtype))
        if probe.causal and way.causal is not None:
            arguments[way.causal] = True
            torch_module = self.is_module and type(self.function).__module__.startswith("torch.")
            if torch_module and way.mask is not None:  # is_causal there is only a hint beside a mask
                hidden = ~np.tri(sizes.queries, sizes.keys, dtype=bool)
                arguments[way.mask.parameter] = make(way.library, hidden, "bool")
        return arguments


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _required(name: str, sizes: Any) -> Any:
    """What to give for a parameter that has no default, by its name."""
    plain = name.lower()
    if plain in HEADS:
        return sizes.heads
    if plain in ("d_k", "dk", "d", "dim", "head_dim", "d_head", "dim_head"):
        return sizes.features
    if "scale" in plain:
        return sizes.features**-0.5
    if plain in ("p", "dropout_p", "p_drop"):
        return 0.0
    return False if FLAGS.search(plain) else None


def make(library: str, array: np.ndarray, dtype: str) -> Any:
    """A fresh array of a library; jax and torch are there because the function's own module imported them."""
    if library == "torch":
        torch = importlib.import_module("torch")
        return torch.tensor(array).to(getattr(torch, dtype))
    if library == "jax":
        return importlib.import_module("jax.numpy").asarray(array, dtype=dtype)
    return np.array(array, dtype=dtype)


@contextlib.contextmanager
def _quiet(library: str) -> Iterator[None]:
    """Nothing that somebody's function prints or warns of belongs into a report."""
    torch = sys.modules.get("torch")
    grad = torch.no_grad() if torch is not None and library == "torch" else contextlib.nullcontext()
    with warnings.catch_warnings(), np.errstate(all="ignore"), grad:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield


def _answer(result: Any, way: Way, probe: Probe, written: tuple[str, ...]) -> Got:
    parts = list(result) if isinstance(result, tuple | list) else [result]
    arrays = {i: part for i, part in enumerate(parts) if is_array(part) and dtype_name(part).startswith(("float", "b"))}
    sizes = probe.sizes
    outputs, rows = {}, {}
    for i, array in arrays.items():
        if way.output is not None and i not in (way.output, way.weights):
            continue
        plain = to_numpy(array).astype(np.float64)
        taken, seen = way.form.take(plain, probe), way.form.take_weights(plain, probe)
        lead = (sizes.batch, sizes.heads, sizes.queries)
        if taken is not None and taken.shape[:3] == lead and taken.shape[3] in (sizes.width, sizes.features):
            outputs[i] = taken
        if seen is not None and seen.shape[2:] == (sizes.queries, sizes.keys):
            rows[i] = seen
    index = way.output if way.output in outputs else next(iter(outputs), None)
    if index is None:
        shapes = ", ".join(str(tuple(array.shape)) for array in arrays.values()) or type(result).__name__
        raise Failed(f"it gave {shapes}, which is not the shape of an output")
    other = way.weights if way.output is not None else next((i for i in rows if i != index), None)
    found = Way(way.library, way.form, index, other, way.mask, way.causal)
    weights = None if other is None else rows.get(other)
    owner = Library.of(arrays[index]).name
    if owner != way.library:
        raise Failed(f"it gave a {owner} array for {way.library} arrays")
    return Got(outputs[index], weights, dtype_name(arrays[index]), written, found)


def _parameters(function: Any) -> dict[str, Any]:
    """The parameters by name; those of a built-in are read from its documentation."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        pass
    match = re.match(r"\s*\w+\((.*?)\)", function.__doc__ or "", re.DOTALL)
    found = {}
    for part in (match.group(1) if match else "").split(","):
        name, _, default = part.strip().lstrip("*").partition("=")
        if name.isidentifier():
            empty = inspect.Parameter.empty if not default else None
            found[name] = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=empty)
    return found


def _spoken(function: Any) -> str | None:
    """The library that a function's code names; None where it names none or several."""
    root = (getattr(function, "__module__", None) or "").partition(".")[0]
    if root in LIBRARIES:
        return root
    target = function if isinstance(function, types.FunctionType) else getattr(function, "__func__", None)
    if target is None:
        target = type(function).__call__
    found = _roots(target, 3) & set(LIBRARIES)
    for library in ("jax", "torch", "numpy"):  # code for the first two often has a little NumPy beside it
        if library in found:
            return library
    return None


def _named(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """The globals that a function's code loads, and that of functions inside it; attributes are not among them."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield names.get(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant, names)


def _roots(function: Any, depth: int) -> set[str]:
    function = inspect.unwrap(function) if callable(function) else function
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or depth == 0:
        return set()
    found: set[str] = set()
    for value in _named(code, names):
        if isinstance(value, types.ModuleType):
            found.add(value.__name__.partition(".")[0])
        elif callable(value):
            module = (getattr(value, "__module__", None) or "").partition(".")[0]
            found |= {module} if module in LIBRARIES else _roots(value, depth - 1)
    return found
