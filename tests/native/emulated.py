"""Stands in for the compiled kernel: calls are handed to a program for another machine, run under emulation.

CLEARHEAD_EMULATE is the command that runs `replay`; CLEARHEAD_TEST_NATIVE names this file; the conformance suite then
holds the other machine's kernel to every case.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import shlex
import struct
import subprocess
from typing import Any

import numpy as np

from clearhead.core.grid import Grid
from clearhead.core.observations import OBSERVATIONS

COMMAND = shlex.split(os.environ.get("CLEARHEAD_EMULATE", ""))
WIDTHS = {0: "<f4", 1: "<f8", 2: "<u2", 3: "<u2", 4: "|u1"}


def instruction_set() -> str:
    """What the other machine chooses by itself."""
    return next(name for name in ("neon_bf16", "neon", "avx2", "portable", "amx", "avx512_bf16") if has(name))


def listed(isa: str, wide: bool) -> str | None:
    """What the program prints of an instruction set; None where it does not have it."""
    command = [*COMMAND, isa, "double" if wide else "float"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout if done.returncode == 0 else None


def has(isa: str) -> bool:
    """True where the other machine has an instruction set."""
    return listed(isa, False) is not None


def observes() -> list[str]:
    """What its kernels gather of the weights: the source is the same for every machine."""
    return ["top", "received", "received_max", "removal", "map", "queries", "weights"]


def sizes(isa: str, wide: bool) -> dict[str, dict[str, int]]:
    """{axis: {name: size}}, as the kernel itself says it."""
    lines = listed(isa, wide)
    if lines is None:
        raise ValueError(f"this machine does not have the instruction set {isa}")
    found: dict[str, dict[str, int]] = {}
    for line in lines.splitlines():
        axis, name, size = line.split(",")
        found.setdefault(axis, {})[name] = int(size)
    return found


class Program:
    """The program that answers calls: started by the first, and anew after one that it did not survive."""

    def __init__(self) -> None:
        self.running: subprocess.Popen[bytes] | None = None

    def ask(self, message: bytes) -> bytes:
        """The answer to one call."""
        if self.running is None or self.running.poll() is not None:
            self.end()
            self.running = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.running.stdin is not None
        assert self.running.stdout is not None
        self.running.stdin.write(message)
        self.running.stdin.flush()
        size = self.running.stdout.read(8)
        if len(size) < 8:
            raise RuntimeError(f"the emulated kernel ended with {self.running.wait()}")
        return self.running.stdout.read(struct.unpack("<q", size)[0])

    def end(self) -> None:
        """Its standard input is closed, upon which it ends."""
        if self.running is not None:
            self.running.communicate()


program = Program()
atexit.register(program.end)


class Memory:
    """Some memory as NumPy sees it."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: str) -> None:
        self.__array_interface__ = {
            "data": (address, False), "shape": shape, "strides": strides, "typestr": kind, "version": 3,
        }  # fmt: skip


class View:
    """Address and strides of (batch, heads, rows, columns), as the kernel takes them."""

    def __init__(self, address: int, kind: int, batch: np.ndarray, head: int, row: int, col: int) -> None:
        self.address, self.kind, self.batch, self.strides = address, kind, batch.copy(), (head, row, col)

    def rows(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        return [np.asarray(Memory(self.address + int(b), shape, self.strides, WIDTHS[self.kind])) for b in self.batch]


class MaskNode:
    """One node of a mask, with its fields: (entries of a batch row, numbers, flags)."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers  # kind, left, right, constant
        self.fields: list[tuple[int, np.ndarray, np.ndarray]] = []
        self.array: View | None = None

    def add_number(self, value: int) -> None:
        self.add_numbers(np.array([value]), 0)

    def add_numbers(self, values: np.ndarray, each: int) -> None:
        self.fields.append((each, values, np.zeros(0, np.uint8)))

    def add_flags(self, values: np.ndarray, each: int) -> None:
        self.fields.append((each, np.zeros(0, np.int64), values))


def number(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def many(array: np.ndarray | bytes) -> bytes:
    data = array if isinstance(array, bytes) else np.ascontiguousarray(array).tobytes()
    return number(len(array)) + data


class Call:
    """One call; `forward` and `backward` run it elsewhere and bring the results home."""

    def __init__(self) -> None:
        self.scale, self.softcap, self.wide, self.panels, self.bytes = 1.0, 0.0, False, False, 0
        self.q = self.k = self.v = self.out = self.dout = self.dq = self.dk = self.dv = None
        self.lse = self.peak = self.total = self.dsinks = self.dlse = 0
        self.mask: list[MaskNode] = []
        self.bias_array: View | None = None
        self.by_distance = (np.zeros(0), 0, 0, np.zeros(0, np.int64))
        self.sinks = np.zeros(0)
        self.each = (0, 0)
        self.of_weights: list[tuple[str, tuple[int, ...], list[int]]] = []

    def set_sizes(self, *sizes: int) -> None:
        self.sizes = sizes

    def set_mask(self, nodes: list[MaskNode]) -> None:
        self.mask = nodes

    def set_bias_array(self, view: View) -> None:
        self.bias_array = view

    def set_bias_by_distance(self, *table: Any) -> None:
        self.by_distance = table

    def set_sinks(self, sinks: np.ndarray) -> None:
        self.sinks = sinks

    def want_rows(self, *pointers: int) -> None:
        self.each = pointers

    def want(self, name: str, numbers: tuple[int, ...], arrays: list[int]) -> None:
        self.of_weights.append((name, numbers, arrays))

    def forward(self, isa: str, threads: int) -> None:
        self.run(isa, False)

    def backward(self, isa: str, threads: int) -> None:
        self.run(isa, True)

    def views(self) -> list[tuple[View | None, tuple[int, ...]]]:
        _, heads, key_heads, queries, keys, features, width = self.sizes
        q, k, v = (heads, queries, features), (key_heads, keys, features), (key_heads, keys, width)
        out, pairs = (heads, queries, width), (heads, queries, keys)
        given = (self.q, self.k, self.v, self.out, self.dout, self.dq, self.dk, self.dv, self.bias_array)
        return list(zip(given, (q, k, v, out, out, q, k, v, pairs), strict=True))

    def array(self, view: View | None, shape: tuple[int, ...]) -> bytes:
        if view is None:
            return number(0)
        data = b"".join(row.tobytes() for row in view.rows(shape))
        return number(1, view.kind, len(view.batch), *shape) + many(data)

    def flat(self) -> list[tuple[int, int]]:
        """Addresses and bytes of the results that are not views."""
        batch, heads, _, queries, keys, _, _ = self.sizes
        item, all_heads = 8 if self.wide else 4, batch * heads
        rows = all_heads * queries * item
        sizes = [
            (self.lse, rows), (self.peak, rows), (self.total, rows), (self.dsinks, all_heads * item),
            (self.each[0], rows), (self.each[1], rows), (self.dlse, rows),
        ]  # fmt: skip
        grid = Grid((batch,), heads, queries, keys)
        for name, numbers, arrays in self.of_weights:
            one = OBSERVATIONS[name]
            wanted = numbers if name in ("map", "queries") else numbers[0]
            own = {} if one.sizes is None else one.sizes(wanted, grid)
            axes = {"queries": queries, "keys": keys, **own}
            parts = [part for part in one.parts if part.led]
            for address, part in zip(arrays[: len(parts)], parts, strict=True):
                size = all_heads * math.prod(axes[axis] for axis in part.axes)
                sizes.append((address, size * (item if part.positions is None else 8)))
            sizes += [(address, rows) for address in arrays[len(parts) :]]  # how much each query counts
        return [(address, size if address else 0) for address, size in sizes]

    def run(self, isa: str, back: bool) -> None:
        _, heads, _, queries, keys, _, _ = self.sizes
        message = [
            many(isa.encode()),
            number(back, self.wide, self.panels, *self.sizes),
            struct.pack("<2d", self.scale, self.softcap),
        ]
        message += [self.array(view, shape) for view, shape in self.views()]
        table, length, centre, offset = self.by_distance
        message += [
            many(table.reshape(-1)),
            number(length, centre),
            many(offset),
            many(self.sinks),
            number(len(self.mask)),
        ]
        for node in self.mask:
            message.append(number(*node.numbers, len(node.fields)))
            for each, numbers, flags in node.fields:
                message += [number(each), many(numbers.reshape(-1)), many(flags.reshape(-1))]
            message.append(self.array(node.array, (heads, queries, keys)))
        message.append(number(len(self.of_weights)))
        for name, numbers, arrays in self.of_weights:
            message += [many(name.encode()), many(np.array(numbers, np.int64)), number(len(arrays))]
        message += [many(ctypes.string_at(address, size) if size else b"") for address, size in self.flat()]
        self.bring_home(program.ask(b"".join(message)))

    def bring_home(self, answer: bytes) -> None:
        views, place = self.views(), 0
        for index in (3, 5, 6, 7):
            view, shape = views[index]
            if view is None:
                continue
            rows = view.rows(shape)
            for row in rows:
                row[...] = np.frombuffer(answer, row.dtype, row.size, place).reshape(shape)
                place += row.nbytes
            place += not sum(row.nbytes for row in rows)  # an empty array is sent as one byte
        for address, size in self.flat():
            if size:
                ctypes.memmove(address, answer[place : place + size], size)
            place += size or 8
        assert place == len(answer), (place, len(answer))


def surroundings() -> int:
    """Nothing is known of them here: they are looked at each time."""
    return 0


def tell_crew(*told: Any) -> None:
    """How many threads there are does not matter here."""


def meet(*functions: Any) -> None:
    """PyTorch is not asked by itself."""


def remember(*call: Any) -> None:
    """No call is known at a glance."""


def attend(*call: Any) -> None:
    """As above."""
