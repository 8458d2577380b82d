"""Assembly for one warp, run here one instruction after the other: those that this library writes itself.

What a register holds is an array of 32 numbers, one for each thread: floats, or integers as they are when signed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

LANES = 32


def wrapped(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Integers as registers of that kind hold them, signed; what is compared or shifted as unsigned is small here."""
    if kind.endswith("64"):
        return numbers
    return (numbers & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


BINARY: dict[str, Callable[..., np.ndarray]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "add": np.add,
    "sub": np.subtract,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "max": np.fmax,
    "min": np.fmin,
}
COMPARED = {"ne": np.not_equal, "gt": np.greater}


class Warp:
    """The registers of a warp, by name, and the memory that addresses are places of: 64-bit numbers, 8 bytes each."""

    def __init__(self, given: Mapping[str, np.ndarray], memory: np.ndarray | None = None) -> None:
        self.held = {"%laneid": np.arange(LANES), **given}
        self.memory = memory

    def value(self, word: str) -> np.ndarray:
        if word in self.held:
            return self.held[word]
        return np.full(LANES, wrapped(np.int64(int(word, 0)), "b32"))

    def run(self, text: str) -> dict[str, np.ndarray]:
        parts = [part.strip() for line in text.splitlines() for part in re.split(r";\s*|(?<=:)$", line)]
        lines = [part for part in parts if part and part not in ("{", "}") and not part.startswith(".reg")]
        at = 0
        while at < len(lines):
            line, at = lines[at], at + 1
            jump = re.fullmatch(r"@!(\w+) bra (\w+)", line)
            if jump:  # of all threads or of none
                taken = ~self.held[jump[1]]
                assert taken.all() or not taken.any()
                at = lines.index(f"{jump[2]}:") if taken.all() else at
            elif not line.endswith(":"):
                self.step(*line.split(" ", 1))
        return self.held

    def step(self, name: str, rest: str) -> None:
        into, *operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
        verb, *kinds = name.split(".")
        if verb == "ld":
            address, _, offset = operands[0].strip("[]").partition("+")
            place = (self.value(address) + int(offset or 0)) // 8
            assert self.memory is not None
            for n, word in enumerate(into.strip("{}").split(",")):
                self.held[word.strip()] = self.memory[place + n]
        elif verb == "mov" and into.startswith("{"):
            low, high = (word.strip() for word in into.strip("{}").split(","))
            whole = self.value(operands[0])
            self.held[low], self.held[high] = wrapped(whole, "b32"), whole >> 32
        elif verb == "mov" and operands[0].startswith("{"):
            low, high = (self.value(word.strip()) for word in operands[0].strip("{}").split(","))
            self.held[into] = high << 32 | low & 0xFFFFFFFF
        else:
            self.held[into] = self.result(verb, kinds, [self.value(word) for word in operands])

    def result(self, verb: str, kinds: list[str], given: list[np.ndarray]) -> np.ndarray:
        first, *more = given
        if verb == "mov":
            return first
        if verb == "not":
            return ~first
        if verb == "mad":
            return first * more[0] + more[1]
        if verb == "setp":
            found = COMPARED[kinds[0]](first, more[0])
            return found ^ more[1] if "xor" in kinds else found
        if verb == "selp":
            return np.where(more[1], first, more[0])
        if verb == "vote":
            return np.full(LANES, first.any())
        if verb == "shfl":
            return first[more[0] if "idx" in kinds else np.arange(LANES) ^ more[0]]
        found = BINARY[verb](first, more[0])
        return found if kinds[-1].startswith("f") else wrapped(found, kinds[-1])
