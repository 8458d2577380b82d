"""Every exercise: right solutions are right, wrong ones are named, and nothing that is said contains a solution."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import solutions
import solutions_more

import clearhead as ch
from clearhead.learning.contents import EXERCISES
from clearhead.learning.hints import hint_for
from clearhead.learning.tasks import walks

RIGHT = solutions.RIGHT | solutions_more.RIGHT
WRONG = solutions.WRONG | solutions_more.WRONG
HEAD = "import itertools\nimport math\n"
LIBRARIES = {"np": "import numpy as np", "torch": "import torch", "jnp": "import jax.numpy as jnp"}


def whole(code: str) -> str:
    """A solution as a file has it, with the libraries that it names."""
    named = [line for name, line in LIBRARIES.items() if re.search(rf"\b{name}\.", code)]
    return HEAD + "\n".join([*named, code]) + "\n"


def functions(number: int, code: str) -> list[Any]:
    space: dict[str, Any] = {"__name__": "solution"}
    exec(compile(whole(code), "solution", "exec"), space)
    return [space[one.name] for one in EXERCISES[number].functions]


def solved(number: int, code: str) -> Any:
    return ch.learn(number, *functions(number, code), keep=False)


def messages(outcome: Any) -> str:
    return " ".join([outcome.mistake, outcome.seen, outcome.why, outcome.hint, outcome.note])


def test_there_are_thirty_and_each_has_solutions() -> None:
    assert list(EXERCISES) == list(range(1, 31))
    assert RIGHT.keys() | solutions_more.TYPED_RIGHT.keys() == EXERCISES.keys()
    for number, exercise in EXERCISES.items():
        right, wrong = (solutions_more.TYPED_RIGHT, solutions_more.TYPED_WRONG) if exercise.typed else (RIGHT, WRONG)
        assert len(right[number]) >= 2
        assert len(wrong[number]) >= 3
        assert exercise.task
        assert exercise.hint


@pytest.mark.parametrize(("number", "code"), [(n, code) for n, codes in RIGHT.items() for code in codes])
def test_a_right_solution_is_right(number: int, code: str) -> None:
    outcome = solved(number, code)
    assert outcome.right, str(outcome)
    assert outcome.name == ""


@pytest.mark.parametrize(("number", "name"), [(number, name) for number, wrong in WRONG.items() for name in wrong])
def test_a_wrong_solution_is_named(number: int, name: str) -> None:
    outcome = solved(number, WRONG[number][name])
    assert not outcome.right
    assert outcome.name == name, str(outcome)
    assert outcome.hint
    assert outcome.explained == ""
    if name not in ("matrix-built",):
        assert [line for line in outcome.example if line.startswith("expected")]
        assert [line for line in outcome.example if line.startswith("got")]
    said = re.sub(r"\s", "", messages(outcome))
    for code in RIGHT[number]:
        for line in code.splitlines():
            written = re.sub(r"\s|return", "", line)
            assert len(written) < 12 or written not in said


@pytest.mark.parametrize(
    ("number", "typed"), [(n, one) for n, all_ in solutions_more.TYPED_RIGHT.items() for one in all_]
)
def test_a_right_answer_is_right_and_explained(number: int, typed: str) -> None:
    for given in ((typed,), tuple(typed.replace(",", " ").split())):
        outcome = ch.learn(number, *given, keep=False)
        assert outcome.right, str(outcome)
        assert outcome.explained


@pytest.mark.parametrize(
    ("number", "name"), [(number, name) for number, wrong in solutions_more.TYPED_WRONG.items() for name in wrong]
)
def test_a_wrong_answer_is_named_and_not_given_away(number: int, name: str) -> None:
    typed = solutions_more.TYPED_WRONG[number][name]
    outcome = ch.learn(number, typed, keep=False)
    assert (outcome.right, outcome.name) == (False, name), str(outcome)
    given = set(typed.replace(",", " ").split())
    for right in solutions_more.TYPED_RIGHT[number][0].split():
        long = len(right) > 3 and right not in given and number != 6
        assert not long or right not in messages(outcome), "the answer is given away"


def test_no_hint_is_a_solution() -> None:
    """All texts of all mistakes of exercises with functions, whether a solution above meets them or not."""
    for number, exercise in EXERCISES.items():
        for asked in exercise.functions:
            texts = [exercise.hint]
            for slip in asked.slips():
                texts += [slip.mistake.title, slip.mistake.why, hint_for(slip.mistake)]
            said = re.sub(r"\s", "", " ".join(texts))
            for code in RIGHT[number]:
                for line in code.splitlines():
                    written = re.sub(r"\s|return", "", line)
                    assert len(written) < 12 or written not in said, (number, line)


CODE = re.compile(r"\w\.\w+\(|\w+\([^)]*[=:]|@|\*\*|\w\[|\w = \w+\(|np\.|torch\.")


def test_no_hint_is_a_line_of_code() -> None:
    from clearhead.doctor.mistakes import CATALOGUE
    from clearhead.learning.hints import HINTS
    from clearhead.learning.troubles import TROUBLES

    assert CODE.search("use x.max(-1)")
    assert HINTS.keys() <= CATALOGUE.keys()
    mistakes = [*CATALOGUE.values(), *TROUBLES.values()]
    for exercise in EXERCISES.values():
        assert not CODE.search(exercise.hint), exercise.hint
        mistakes += [guess.mistake for guess in exercise.guesses]
        mistakes += [slip.mistake for asked in exercise.functions for slip in asked.slips()]
    for mistake in mistakes:
        assert not CODE.search(hint_for(mistake)), hint_for(mistake)


def test_formulas_are_those_of_the_library() -> None:
    """Where an exercise computes what is right by itself, the library computes the same."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 4, 6))
    v = rng.standard_normal((4, 3))
    weights = ch.observe(q, k, v, weights=True, kernel="dense").weights
    np.testing.assert_allclose(walks.SHUFFLE.functions[0].right(weights, v), ch.shuffle_weights(q, k, v).expected)
    x, *projections = rng.standard_normal((5, 6, 6))
    layer = EXERCISES[11].functions[0].right(x, *projections, 2)
    heads = [(x @ w).reshape(6, 2, 3).swapaxes(0, 1) for w in projections[:3]]
    expected = ch.attention(*heads, mask=ch.causal()).swapaxes(0, 1).reshape(6, 6) @ projections[3]
    np.testing.assert_allclose(layer, expected)
    np.testing.assert_array_equal(EXERCISES[7].functions[0].right(5), ch.causal().dense(5, 5)[0])
    np.testing.assert_array_equal(EXERCISES[21].functions[0].right(7, 2), ch.window(2).dense(7, 7)[0])
    bias = EXERCISES[14].functions[0].right(5, 4)
    q, k, v = rng.standard_normal((3, 4, 5, 3))
    np.testing.assert_allclose(ch.attention(q, k, v, bias=bias), ch.attention(q, k, v, bias=ch.alibi(4)))


def test_every_slip_differs_from_what_is_right() -> None:
    """A mistake that gives the right answer everywhere could never be named."""
    by_the_doctor = (5, 11, 18, 20)  # whose formulas are for several heads, too
    for exercise in (one for number, one in EXERCISES.items() if number not in by_the_doctor):
        for asked in exercise.functions:
            cases = asked.cases()
            assert cases
            for slip in asked.slips():
                assert not all(same(asked.right, slip.formula, case) for case in cases), (
                    exercise.number,
                    slip.mistake.name,
                )


def same(right: Any, other: Any, case: dict[str, Any]) -> bool:
    from clearhead.learning.judging import _computed

    one, two = _computed(right, case), _computed(other, case)
    if one is None or two is None or len(one) != len(two):
        return False
    return all(
        a.shape == b.shape and np.allclose(a.astype(float), b.astype(float), 1e-4, 1e-6, equal_nan=True)
        for a, b in zip(one, two, strict=True)
    )
