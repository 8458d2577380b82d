"""A class, made into an object: with the arguments that were given, or with sizes that its parameters ask for."""

from __future__ import annotations

import inspect
from typing import Any

from clearhead.core.errors import ArgumentError
from clearhead.doctor.roles import FEATURES, HEADS, KEY_HEADS, MODEL, WIDTHS

# Sizes for a class that is handed over without any: no two that could be taken for one another
SIZES: tuple[tuple[tuple[str, ...], Any], ...] = (
    (HEADS, 3),
    (KEY_HEADS, 3),
    (FEATURES, 4),
    (WIDTHS, 4),
    (("d", "dim"), 12),
    (MODEL, 12),
    (("d_in", "d_out", "in_features", "out_features", "input_dim", "output_dim", "in_dim", "out_dim"), 12),
    (("block_size", "max_len", "max_seq_len", "context_length", "seq_len", "n_ctx", "max_position_embeddings"), 1024),
    (("dropout", "dropout_rate", "attn_dropout", "p", "attn_pdrop", "resid_pdrop", "drop"), 0.0),
    (("bias", "qkv_bias"), True),
    (("temperature",), 2.0),
)


def build(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What to call, and what its class was called with: a class is made into an object, everything else stays."""
    if not inspect.isclass(function):
        if arguments or options:
            given = ", ".join([*map(repr, arguments), *options])
            raise ArgumentError("arguments", f"are {given}, and only a class is built with arguments")
        if not callable(function) and not callable(getattr(function, "forward", None)):
            raise ArgumentError("function", f"is a {type(function).__name__}, expected something to call")
        return function, {}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return _made(function, arguments, options), {}
    if not arguments and not options:
        options = _guessed(function, signature)
    try:
        bound = dict(signature.bind(*arguments, **options).arguments)
    except TypeError as error:
        raise ArgumentError("arguments", f"do not build {_spelled(function, signature)}: {error}") from None
    made = _made(function, arguments, options)
    if not callable(made) and not callable(getattr(made, "forward", None)):
        raise ArgumentError(
            "function", f"is a class whose objects have neither __call__ nor forward: {function.__name__}"
        )
    return made, {name: value for name, value in bound.items() if isinstance(value, int | float | str | bool)}


def _spelled(function: Any, signature: inspect.Signature) -> str:
    """A class with what builds it, as one would write it: no quotes, nothing that comes back."""
    return f"{function.__qualname__}{signature.replace(return_annotation=signature.empty)}".replace("'", "")


def _made(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        return function(*arguments, **options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        words = f"could not be built: {type(error).__name__}: {error}"
        raise ArgumentError("function", f"is the class {function.__qualname__}, which {words}"[:300]) from None


def _guessed(function: Any, signature: inspect.Signature) -> dict[str, Any]:
    """Sizes by the names of parameters that have no default; refused where a name says nothing."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = {}
    for name, parameter in signature.parameters.items():
        if parameter.default is not parameter.empty or parameter.kind not in named:
            continue
        value = next((size for names, size in SIZES if name.lower() in names), None)
        if value is None:
            words = f"is the class {_spelled(function, signature)}: give what builds it, check(Class, …)"
            raise ArgumentError("function", f"{words}; {name} has no default")
        found[name] = value
    return found
