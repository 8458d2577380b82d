"""The texts' own code, run as written: each face by its text's names, arguments, orders, masks and printed numbers."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest
import torch
from texts import NUMBERS, SENTENCE, by_hand, near, published, random, refused, tensors

import clearhead
from clearhead import textbook
from clearhead.core.arrays import to_numpy
from clearhead.textbook import (
    CONVENTIONS,
    algebra,
    chapter,
    chapter_torch,
    convert_mask,
    course,
    course_torch,
    exercises,
    lesson,
    tutorial,
)

TORCH = {"chapter_torch": chapter_torch, "lesson": lesson, "tutorial": tutorial}


# The chapter, in NumPy


def test_the_chapter_as_written() -> None:
    Q = np.array([[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]])  # whole numbers, as printed
    K = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]])
    V = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]])
    attention = chapter.ScaledDotProductAttention(d_k=4)
    assert (attention.d_k, attention.scale) == (4, 2.0)
    scores = attention.compute_scores(Q, K)
    scaled = attention.scale_scores(scores)
    weights = attention.compute_weights(scaled)
    assert scores.tolist() == NUMBERS["raw_scores"]
    assert scaled.tolist() == NUMBERS["scaled_scores"]
    published(weights, NUMBERS["weights"])
    published(attention._softmax(scaled), NUMBERS["weights"])
    published(attention.compute_output(weights, V), NUMBERS["output"])
    weights, output = attention.forward(Q, K, V)
    published(weights, NUMBERS["weights"])
    published(output, NUMBERS["output"])
    near(output, clearhead.attention(SENTENCE.q, SENTENCE.k, SENTENCE.v))


def test_the_chapter_prints_every_step_and_returns_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    attention = chapter.ScaledDotProductAttention(4)
    tokens = ["The", "cat", "sat", "on", "mat"]
    result = attention.explain(SENTENCE.q, SENTENCE.k, SENTENCE.v, tokens, query_idx=1)
    assert result is None
    text = capsys.readouterr().out
    assert text.startswith("Attention for 'cat' (row 1)\nQ[1] = [0.0, 2.0, 0.0, 1.0]\n")
    assert "/ sqrt(4) = / 2.0" in text
    assert "  The  0.4026 |################|\n  cat  0.0898 |###|\n" in text
    assert "[0.4602, 0.1475, 0.3018, 0.2058]" in text
    assert text.endswith("Sum of weights = 1.000000\n")


def test_the_chapters_bars_are_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    chapter.ScaledDotProductAttention(4).explain(SENTENCE.q, SENTENCE.k, SENTENCE.v, SENTENCE.tokens)
    text = capsys.readouterr().out
    assert [len(bar) for bar in re.findall(r"\|(#*)\|", text)] == [4, 11, 7, 7, 9]


def test_a_step_that_is_overridden_changes_the_chapters_result() -> None:
    class Unscaled(chapter.ScaledDotProductAttention):
        def scale_scores(self, scores: Any) -> Any:
            return scores

    weights, _ = Unscaled(4).forward(SENTENCE.q, SENTENCE.k, SENTENCE.v)
    near(weights[0], exercises.unscaled("The"))


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor, strict.asarray], ids=["numpy", "torch", "strict"])
def test_the_chapter_takes_batches_of_any_library(convert: Any) -> None:
    q, k, v = (convert(a.astype(np.float32)) for a in (random(2, 5, 4), random(2, 7, 4, seed=1), random(2, 7, 3)))
    weights, output = chapter.ScaledDotProductAttention(4)(q, k, v)
    expected = by_hand(*(to_numpy(a).astype(np.float64) for a in (q, k, v)))
    for found, exact in ((output, expected[0]), (weights, expected[1])):
        np.testing.assert_allclose(to_numpy(found), exact, rtol=0, atol=1e-6)


# The chapter, the lesson and the tutorial, in PyTorch


@pytest.mark.parametrize("name", TORCH)
def test_a_torch_text_as_written(name: str) -> None:
    q, k, v = tensors(SENTENCE.q, SENTENCE.k, SENTENCE.v)
    attention = TORCH[name].ScaledDotProductAttention(d_k=4)
    assert isinstance(attention, torch.nn.Module)
    assert attention.d_k == 4
    if name == "chapter_torch":
        assert attention.scale == 2.0
        weights, output = attention(q, k, v)
        masked_weights, masked = attention(q, k, v, torch.triu(torch.ones(5, 5), diagonal=1).bool())
    else:
        output, weights = attention(q, k, v)
        masked, masked_weights = attention(q, k, v, mask=torch.tril(torch.ones(5, 5)))
    published(weights, NUMBERS["weights"])
    published(output, NUMBERS["output"])
    published(masked_weights, NUMBERS["causal_weights"])
    published(masked, NUMBERS["causal_output"])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("name", TORCH)
def test_torch_masks_mean_what_the_text_means(name: str, dtype: Any) -> None:
    q, k, v = tensors(random(2, 3, 5, 4), random(2, 3, 7, 4, seed=1), random(2, 3, 7, 6, seed=2))
    allowed = np.random.default_rng(3).random((2, 1, 5, 7)) < 0.6
    allowed[..., 0] = True
    mask = torch.tensor(~allowed if name == "chapter_torch" else allowed).to(dtype)
    found = TORCH[name].ScaledDotProductAttention(4)(q, k, v, mask)
    output, weights = CONVENTIONS[name].output_and_weights(found)
    exact = by_hand(*(a.numpy() for a in (q, k, v)), allowed)
    near(output, exact[0])
    near(weights, exact[1])


@pytest.mark.parametrize("name", TORCH)
def test_gradients_flow_through_output_and_weights(name: str) -> None:
    q, k, v = (a.requires_grad_() for a in tensors(random(2, 5, 4), random(2, 7, 4, seed=1), random(2, 7, 6, seed=2)))
    output, weights = CONVENTIONS[name].output_and_weights(TORCH[name].ScaledDotProductAttention(4)(q, k, v))
    towards = torch.tensor(random(2, 5, 7, seed=3))
    (output.sum() + (weights * towards).sum()).backward()
    found = [a.grad.clone() for a in (q, k, v)]
    for a in (q, k, v):
        a.grad = None
    plain = torch.softmax(q @ k.transpose(-2, -1) / 2, dim=-1)
    ((plain @ v).sum() + (plain * towards).sum()).backward()
    for gradient, a in zip(found, (q, k, v), strict=True):
        near(gradient, a.grad)


@pytest.mark.parametrize("name", TORCH)
def test_a_query_without_keys_has_zeros_and_finite_gradients(name: str) -> None:
    q, k, v = (a.requires_grad_() for a in tensors(random(5, 4), random(5, 4, seed=1), random(5, 4, seed=2)))
    allowed = np.tri(5, dtype=bool)
    allowed[2] = False
    mask = CONVENTIONS[name].mask_from_clearhead(torch.tensor(allowed))
    output, weights = CONVENTIONS[name].output_and_weights(TORCH[name].ScaledDotProductAttention(4)(q, k, v, mask))
    assert not output[2].any()
    assert not weights[2].any()
    (output.sum() + (weights**2).sum()).backward()
    assert all(torch.isfinite(a.grad).all() for a in (q, k, v))
    assert not q.grad[2].any()
    # what the texts' own formula makes of it, as their tables say
    hidden = torch.full((4,), -1e9 if name == "tutorial" else -torch.inf).softmax(-1)
    assert hidden.tolist() == [0.25] * 4 if name == "tutorial" else hidden.isnan().all()


def test_half_precision_stays_half() -> None:
    q, k, v = (torch.tensor(a, dtype=torch.float16) for a in random(3, 2, 5, 4))
    output, weights = tutorial.ScaledDotProductAttention(4)(q, k, v, mask=torch.tril(torch.ones(5, 5)))
    assert (output.dtype, weights.dtype) == (torch.float16, torch.float16)


# The linear-algebra example


@pytest.mark.parametrize("dtype", [bool, int, float])
def test_linear_algebra_as_written(dtype: Any) -> None:
    Q, K, V = random(5, 4), random(5, 4, seed=1), random(5, 3, seed=2)
    mask = np.triu(np.ones((5, 5)), 1).astype(dtype)
    A, O = algebra.attend(Q, K, V, mask)  # noqa: E741 - the text's own name
    output, weights = by_hand(Q, K, V, np.tri(5, dtype=bool))
    near(O, output)
    near(A, weights)
    pushed = Q @ K.T / np.sqrt(4) - 1e9 * np.triu(np.ones((5, 5)), 1)
    near(A, textbook.softmax(pushed))


def test_the_mirror_image_of_causal_is_taken_as_the_text_means_it() -> None:
    Q, K, V = random(3, 1, 5, 4)
    exact = by_hand(Q, K, V, np.tri(5, dtype=bool).T)
    near(algebra.attend(Q, K, V, np.tri(5, k=-1))[1], exact[0])
    near(course.scaled_dot_product_attention(Q, K, V, np.tri(5).T)[0], exact[0])
    near(course.scaled_dot_product_attention_loops(Q, K, V, np.tri(5).T)[0], exact[0])
    near(lesson.ScaledDotProductAttention(4)(*tensors(Q, K, V), torch.ones(5, 5).triu())[0], exact[0])


# What they share


@pytest.mark.parametrize(
    "face",
    [
        course.scaled_dot_product_attention,
        course.scaled_dot_product_attention_loops,
        algebra.attend,
        chapter.ScaledDotProductAttention(4),
        chapter_torch.ScaledDotProductAttention(4),
        lesson.ScaledDotProductAttention(4),
        tutorial.ScaledDotProductAttention(4),
        course.MultiHeadAttention(12, 3),
        course_torch.MultiHeadAttention(12, 3),
    ],
    ids=lambda face: getattr(face, "__name__", type(face).__module__.rpartition(".")[2]),
)
def test_the_doctor_finds_the_faces_right(face: Any) -> None:
    report = clearhead.check(face)
    assert report.right, str(report)
    first = face is algebra.attend or isinstance(
        face, chapter.ScaledDotProductAttention | chapter_torch.ScaledDotProductAttention
    )
    assert report.conventions["returns"] == ("(weights, output)" if first else "(output, weights)")


def test_watch_sees_the_faces() -> None:
    mha = course_torch.MultiHeadAttention(12, 2)
    x = torch.tensor(random(2, 5, 12).astype(np.float32))
    with clearhead.watch(mha, want={"queries": [-1]}) as seen:
        _, weights = mha(x, x, x, mask=course_torch.create_causal_mask(5))
    assert seen.missed == {}
    np.testing.assert_allclose(seen[0].queries.weights, weights[..., -1:, :].detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_each_module_opens_with_the_table_of_its_conventions(name: str) -> None:
    module = importlib.import_module(f"clearhead.textbook.{name}")
    assert module.CONVENTION is CONVENTIONS[name]
    assert CONVENTIONS[name].table() in (module.__doc__ or "").split(">>>")[0]


@pytest.mark.parametrize("target", [name for name in CONVENTIONS if name != "chapter"])
@pytest.mark.parametrize("source", [name for name in CONVENTIONS if name != "chapter"])
def test_a_mask_goes_from_text_to_text_and_back(source: str, target: str) -> None:
    allowed = np.random.default_rng(0).random((3, 4)) < 0.5
    mask = CONVENTIONS[source].mask_from_clearhead(allowed)
    assert mask.dtype == CONVENTIONS[source].dtype
    there = convert_mask(mask, source, target)
    assert (CONVENTIONS[target].mask_to_clearhead(there) == allowed).all()
    back = convert_mask(there, target, source)
    assert (back == mask).all()
    assert back.dtype == mask.dtype


@pytest.mark.parametrize("name", [name for name in CONVENTIONS if name != "chapter"])
def test_mask_values_are_understood_by_every_text(name: str) -> None:
    dense = CONVENTIONS[name].mask_from_clearhead(clearhead.causal(), 4)
    assert (CONVENTIONS[name].mask_to_clearhead(dense) == np.tri(4, dtype=bool)).all()
    padded = CONVENTIONS[name].mask_from_clearhead(clearhead.lengths([4, 2]), 4, batch=(2,))
    assert padded.shape == (2, 1, 4, 4)
    mask = clearhead.causal()
    assert CONVENTIONS[name].mask_to_clearhead(mask) is mask
    q, k, v = tensors(*random(3, 2, 4, 6))
    module = importlib.import_module(f"clearhead.textbook.{name}")
    if name.startswith("course"):
        output, _ = module.scaled_dot_product_attention(q, k, v, mask)
    elif name == "algebra":
        _, output = module.attend(q, k, v, mask)
    else:
        output, _ = CONVENTIONS[name].output_and_weights(module.ScaledDotProductAttention(6)(q, k, v, mask))
    near(output, clearhead.attention(q, k, v, mask=mask))


def test_batches_that_do_not_match_are_no_grouped_heads() -> None:
    q, k = random(4, 5, 3), random(2, 5, 3)
    with pytest.raises(clearhead.ArgumentError, match="expected the same batch"):
        course.scaled_dot_product_attention(q, k, k)
    near(course.scaled_dot_product_attention(q, k[:1], k[:1])[0], by_hand(q, k[:1], k[:1])[0])
    near(course.scaled_dot_product_attention(q[:1], k, k)[0], by_hand(q[:1], k, k)[0])


def test_numpy_faces_do_without_torch_and_without_a_second_import() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import clearhead as ch\n"
        "t = ch.textbook\n"
        "assert 'textbook' in dir(ch) and {'chapter', 'lesson', 'slips'} <= set(dir(t))\n"
        "q = t.EXAMPLES['cat_sat'].q\n"
        "t.chapter.ScaledDotProductAttention(4)(q, q, q)\n"
        "t.course.MultiHeadAttention(4, 2)(q); t.algebra.attend(q, q, q)\n"
        "t.softmax(q); t.softmax_jacobian(q); t.exercises.row('sat'); t.slips.page()\n"
        "assert not hasattr(t, 'lesson')\n"
        "try:\n    t.lesson\n"
        "except AttributeError as error:\n    print(error)\n"
        "try:\n    from clearhead.textbook import lesson\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    said = "this way of writing attention needs PyTorch, which is not installed: pip install torch;"
    assert [line[: len(said)] for line in done.stdout.splitlines()] == [said, said]


X = random(5, 6)
REFUSED = {
    "mask: has numbers other than 0 and 1, expected 1 where a key may be attended to": lambda: (
        course.scaled_dot_product_attention(X[None], X[None], X[None], np.where(np.tri(5), 0.0, -np.inf))
    ),
    "expected 1 where a key is hidden": lambda: algebra.attend(X, X, X, np.full((5, 5), 2)),
    "mask: is a list": lambda: algebra.attend(X, X, X, [[1]]),
    "mask: has shape (2, 3, 5, 5), expected 1 head": lambda: course.scaled_dot_product_attention(
        *random(3, 2, 5, 4), np.ones((2, 3, 5, 5))
    ),
    "mask: has shape (4, 4)": lambda: algebra.attend(X, X, X, np.zeros((4, 4))),
    "mask: is given, but this text has no masks": lambda: CONVENTIONS["chapter"].mask_to_clearhead(np.ones((2, 2))),
    "queries: is not given": lambda: CONVENTIONS["course"].mask_from_clearhead(clearhead.causal()),
    "mask: has dtype float64, expected bool": lambda: CONVENTIONS["course"].mask_from_clearhead(np.ones((2, 2))),
    "scale: is 0.0": lambda: CONVENTIONS["chapter"].scale_to_clearhead(0.0),
    "source: is 'novel', expected one of chapter": lambda: convert_mask(X, "novel", "course"),
    "Q: has shape (5, 6), expected (…, positions, d_k = 4)": lambda: chapter.ScaledDotProductAttention(4)(X, X, X),
    "d_k: is 0": lambda: chapter_torch.ScaledDotProductAttention(0),
    "tokens: has 2 names": lambda: chapter.ScaledDotProductAttention(6).explain(X, X, X, ["a", "b"]),
    "query_idx: is 7": lambda: chapter.ScaledDotProductAttention(6).explain(X, X, X, list("abcde"), 7),
    "num_heads: is 4, which does not divide embed_dim 6": lambda: course_torch.MultiheadAttention(6, 4),
    "value: is not given": lambda: course.MultiHeadAttention(6, 2)(X, X, mask=np.ones((5, 5))),
    "key, value: are not both given": lambda: course_torch.MultiHeadAttention(6, 2)(*tensors(X, X), mask=torch.ones(5)),
    "v: has 4 positions": lambda: course.scaled_dot_product_attention_loops(X[None], X[None], X[None, :4]),
    "mask: has shape (3, 5, 5)": lambda: course.scaled_dot_product_attention_loops(
        *random(3, 2, 5, 4), np.ones((3, 5, 5))
    ),
    "Q: has shape (5, 6), expected (batch, n, d)": lambda: course.scaled_dot_product_attention_loops(X, X, X),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(message: str) -> None:
    refused(message, REFUSED[message])
