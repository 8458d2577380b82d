"""Which library owns this array, and what it can do."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import array_api_compat
import numpy as np

from clearhead.core.errors import ArgumentError, first_line
from clearhead.core.trees import compiling, introduce

# An array of any library that speaks the array API; the standard has no type for it.
Array: TypeAlias = Any

T = TypeVar("T")
ArrayT_co = TypeVar("ArrayT_co", covariant=True)


class ArrayOf(Protocol[ArrayT_co]):
    """An array as a type checker knows it: by what slicing it gives.

    A slice of NumPy's arrays says nothing of how many axes there are, and a slice of a parameter is a tensor, as
    results are.
    """

    @property
    def shape(self) -> tuple[Any, ...]:
        """How many entries each axis has."""

    @property
    def ndim(self) -> int:
        """How many axes there are."""

    @property
    def dtype(self) -> Any:
        """What its numbers are, in its library's words."""

    def __getitem__(self, index: slice, /) -> ArrayT_co:
        """Some of its rows."""


AnyArray: TypeAlias = ArrayOf[Any]

# The arrays of one call: np.ndarray, torch.Tensor, jax.Array or another. Where it is left open they may be any.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault  # which type checkers know; `typing` has it from 3.13 on

    ArrayT = WithDefault("ArrayT", bound=AnyArray, default=Any)
else:
    ArrayT = TypeVar("ArrayT")

FLOATING = ("float16", "bfloat16", "float32", "float64")
HALF = ("float16", "bfloat16")


def dtype_name(array: Array) -> str:
    """The dtype's name, the same word in every library.

    >>> dtype_name(np.zeros(2, dtype=np.float32))
    'float32'
    """
    dtype = array.dtype
    return _spelt(dtype) if isinstance(dtype, np.dtype) else str(dtype).rsplit(".", 1)[-1]


@cache
def _spelt(dtype: Any) -> str:
    """Spelling a dtype takes NumPy longer than a small attention does; others need no table."""
    return str(dtype)


def is_array(value: object) -> bool:
    """True for an array of any library that speaks the array API."""
    return type(value) is np.ndarray or is_torch(value) or array_api_compat.is_array_api_obj(value)


def is_torch(value: object) -> bool:
    """True for a PyTorch tensor; PyTorch is not imported to find out."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # another thread may still be importing it
    # PyTorch's own answer to isinstance takes a µs
    return value is not None and tensor is not None and (type(value) is tensor or isinstance(value, tensor))


def all_jax(*values: object) -> bool:
    """True for JAX arrays that hold their numbers; by the name of their class, which nobody has to import for it."""
    kind = type(values[0])
    return kind.__name__ == "ArrayImpl" and all(type(value) is kind for value in values)


def is_traced(value: object) -> bool:
    """True for an array that holds no numbers yet: one that JAX or PyTorch is tracing, or that stands for others."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return is_abstract(value)
    jax = None if compiling() else sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def is_abstract(tensor: Array) -> bool:
    """True for a PyTorch tensor whose numbers cannot be read: compiled, exported, fake, on "meta" or in torch.func."""
    torch = sys.modules["torch"]
    return torch.compiler.is_compiling() or stands_in(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def stands_in(tensor: Array) -> bool:
    """True for a tensor on "meta" or of a class with operators of its own, such as a fake one."""
    torch, kind = sys.modules["torch"], type(tensor)
    if tensor.is_meta:
        return True
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    return getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


def jax_platform(array: Array) -> str:
    """Where an array of JAX lies: "cpu", "gpu", …; a traced one where JAX puts things, unless it is told otherwise."""
    jax = sys.modules["jax"]
    if is_traced(array):
        return getattr(jax.config.jax_default_device, "platform", None) or jax.default_backend()
    return next(iter(array.devices())).platform


def truth(value: Array) -> bool | None:
    """An array of one truth value as a bool; None where it is not known yet, or only after waiting for a device."""
    if is_traced(value) or (is_torch(value) and value.device.type != "cpu"):
        return None
    return bool(value)


def to_numpy(array: Array) -> np.ndarray:
    """The same numbers as a NumPy array, without a copy where the library allows it.

    bfloat16 tensors of PyTorch come back as float32, which holds every bfloat16 exactly.
    """
    if isinstance(array, np.ndarray):
        return array
    if is_torch(array):
        if stands_in(array):
            raise ArgumentError(
                "array", f"is a {type(array).__name__} on {array.device}, which holds no numbers to read"
            )
        # what is not wrapped by torch.func has its numbers, though inside of it every operation wraps the result
        with sys.modules["torch"]._C._DisableFuncTorch():
            array = array.detach().cpu().resolve_neg()
            return (array.float() if dtype_name(array) == "bfloat16" else array).numpy()
    if array_api_compat.is_jax_array(array):
        return np.asarray(array)
    try:
        return np.from_dlpack(array)
    except (AttributeError, BufferError, RuntimeError, TypeError):
        return np.asarray(array)


def plain_numbers(argument: str, array: Array) -> np.ndarray:
    """The numbers of an array that somebody gave by hand; what has none, or not one for each place, is refused."""
    try:
        return to_numpy(array)
    except (TypeError, RuntimeError) as error:  # a sparse or a nested tensor, in PyTorch's words
        raise ArgumentError(argument, f"cannot be read as a plain array: {first_line(error)}") from None


def settled(value: Array) -> Array:
    """A NumPy view of an array where its numbers can be read at once; the array itself where they cannot.

    Arrays on an accelerator stay there, and traced arrays have no numbers to read.
    """
    if isinstance(value, np.ndarray) or is_traced(value):
        return value
    if is_torch(value):
        readable = value.device.type == "cpu" and type(value).__module__ == "torch"
        return to_numpy(value) if readable and not value.requires_grad else value
    if is_array(value):
        return to_numpy(value)
    return np.asarray(value)


def alike(left: Array, right: Array) -> tuple[Array, Array]:
    """Two arrays in one library: a NumPy one moves to the other's."""
    if isinstance(left, np.ndarray) and not isinstance(right, np.ndarray):
        return Library.of(right).asarray(left), right
    if isinstance(right, np.ndarray) and not isinstance(left, np.ndarray):
        return left, Library.of(left).asarray(right)
    return left, right


def summed_like(gradient: Array, like: Array) -> Array:
    """The sum over axes that were broadcast from `like`; NumPy's and PyTorch's arrays.

    >>> summed_like(np.ones((3, 2)), np.ones((1, 2)))
    array([[3., 3.]])
    """
    for axis, (have, want) in enumerate(zip(gradient.shape, like.shape, strict=True)):
        if have != want:
            gradient = gradient.sum(axis, keepdims=True)
    return gradient


def without_gradient(array: Array) -> Array:
    """The same array, out of PyTorch's autograd."""
    return array.detach() if is_torch(array) else array


def made(kind: type[T], **fields: Any) -> T:
    """An object of a dataclass as its constructor makes it, without its checks and, if frozen, in a third of the time.

    Fields that are left out have their defaults, which are the class's own.
    """
    one = object.__new__(kind)
    one.__dict__.update(fields)
    return one


@dataclass(frozen=True)
class Library:
    """An array library and a device in it: the namespace `xp`, and the few things the standard leaves out."""

    name: str
    xp: Any
    device: Any

    @classmethod
    def of(cls, array: Array) -> Library:
        """The library that owns `array`."""
        if type(array) is np.ndarray:
            return _numpy()
        if is_torch(array):
            return _torch_on(array.device)
        introduce()  # it may be JAX's
        xp = array_api_compat.array_namespace(array)
        name = xp.__name__.removeprefix("array_api_compat.").split(".")[0]
        device = None if is_traced(array) else array_api_compat.device(array)
        return cls(name, xp, device)

    def owns(self, array: object) -> bool:
        """True for an array of this library, on any device."""
        return is_array(array) and Library.of(array).name == self.name

    def asarray(self, value: Array, dtype: Any = None) -> Array:
        """`value`, from any library, as an array here."""
        if not (self.owns(value) and (is_traced(value) or Library.of(value).device == self.device)):
            if self.name == "torch" and is_torch(value):
                value = value.to(self.device)
            else:
                value = to_numpy(value) if is_array(value) else np.asarray(value)
                # PyTorch takes neither negative strides nor read-only memory without complaint
                value = np.array(value) if self.name == "torch" else np.ascontiguousarray(value)
                value = self.xp.asarray(value, device=self.device)
        return value if dtype is None or value.dtype == dtype else self.xp.astype(value, dtype)

    def computing(self, array: Array) -> Array:
        """The array in the precision that sums are taken in: half precisions go to float32, others stay."""
        if dtype_name(array) in HALF:
            return self.xp.astype(array, self.xp.float32)
        return array

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of zeros on this device."""
        return self.xp.zeros(shape, dtype=dtype, device=self.device)

    def exp_over(self, x: Array) -> Array:
        """The exponential, written over `x` where the library can: a tile is then walked through once less."""
        if self.name == "numpy":
            return np.exp(x, out=x)
        if self.name == "torch" and not x.requires_grad:
            return x.exp_()
        return self.xp.exp(x)

    def largest(self, values: Array, count: int) -> tuple[Array, Array]:
        """The `count` largest along the last axis, in descending order, and where they are."""
        if self.name == "torch":
            top = values.topk(count, dim=-1)
            return top.values, top.indices
        if self.name == "jax":
            # which sorts a NaN by its sign, and x86 computes negative ones
            values = self.xp.where(values != values, self.xp.nan, values)
            top_values, places = sys.modules["jax"].lax.top_k(values, count)
            return top_values, places
        xp = self.xp
        if self.name == "numpy" and count < values.shape[-1]:
            some = np.argpartition(values, -count, axis=-1)[..., -count:]
            order = np.argsort(-np.take_along_axis(values, some, -1), axis=-1, stable=True)
            places = np.take_along_axis(some, order, -1)
        else:
            places = xp.argsort(values, axis=-1, descending=True)[..., :count]
        return xp.take_along_axis(values, places, axis=-1), places


@cache
def _numpy() -> Library:
    """NumPy, looked up at the first call: its standard namespace takes a tenth of a second to import."""
    return Library("numpy", array_api_compat.array_namespace(np.empty(0)), "cpu")


@cache
def _torch_on(device: Any) -> Library:
    """PyTorch on a device; a tensor's namespace is looked up once and not for each call."""
    return Library("torch", array_api_compat.array_namespace(sys.modules["torch"].empty(0)), device)


def require_array(argument: str, value: object) -> None:
    """Refuse anything that is not an array, in words."""
    refuse_masked(argument, value)
    if not is_array(value):
        raise ArgumentError(argument, f"is a {type(value).__name__}, expected a NumPy, PyTorch, JAX or array-API array")


def refuse_masked(argument: str, value: object) -> None:
    """Refuse NumPy's masked arrays: the numbers that they hide would be read."""
    masked = None if compiling() else getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)  # as above
    if masked is not None and isinstance(value, masked):
        raise ArgumentError(
            argument, "is a masked array, expected a plain one: give its numbers, .data, and mask= what it hides"
        )


def require_floating(argument: str, value: Array) -> None:
    """Refuse every dtype that attention has no meaning for."""
    if dtype_name(value) not in FLOATING:
        raise ArgumentError(argument, f"has dtype {dtype_name(value)}, expected one of {', '.join(FLOATING)}")
