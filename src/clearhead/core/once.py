"""A property that is computed when it is first asked for, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class once(Generic[T]):
    """`functools.cached_property` as it is from Python 3.12 on: nothing is held while the value is computed.

    Before, one lock for all objects of a class was. A child forked while another thread held it would wait for that
    thread forever, and has no such thread. Threads that ask at the same time may each compute the value; it is the
    same one.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> once[T]: ...

    @overload
    def __get__(self, owner: object, kind: type) -> T: ...

    def __get__(self, owner: object | None, kind: type) -> once[T] | T:
        if owner is None:
            return self
        return owner.__dict__.setdefault(self.name, self.compute(owner))
