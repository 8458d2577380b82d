"""The two ways a call is refused: a bad argument, or a kernel that cannot take the problem."""


class ArgumentError(ValueError):
    """An argument is wrong; the message names it, says what it is and what was expected.

    `rows` is the batch that a part of a mask was made for, where that is what does not fit.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4))
    >>> try:
    ...     ch.attention(q, k[..., :3], v)
    ... except ch.ArgumentError as wrong:
    ...     print(wrong.argument, "|", wrong)
    k | k: has 3 features (shape (2, 7, 3)), expected 4 as q has
    """

    def __init__(self, argument: str, problem: str, rows: tuple[int, ...] = ()) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument, self.rows = argument, rows


class KernelRefused(RuntimeError):
    """A kernel asked for by name cannot take this problem; it is never replaced by another in silence.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4))
    >>> try:
    ...     ch.attention(q, k, v, kernel="triton")
    ... except ch.KernelRefused as refused:
    ...     print(refused.kernel, "|", refused.reason)
    triton | it takes PyTorch tensors on a GPU, not numpy arrays
    """

    def __init__(self, kernel: str, reason: str) -> None:
        super().__init__(f"kernel {kernel!r} refused: {reason}")
        self.kernel = kernel
        self.reason = reason


def shown(value: object) -> str:
    """A value as it is printed in a sentence; Python does not print whole numbers of more than 4,300 digits.

    >>> shown("end"), shown(10**9999)
    ("'end'", 'a whole number of thousands of digits')
    """
    try:
        return repr(value)
    except ValueError:
        return "a whole number of thousands of digits"


def first_line(error: Exception) -> str:
    """What an error of another library says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
