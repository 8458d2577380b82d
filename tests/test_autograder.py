"""The autograder in examples/: right modules have all points, wrong ones lose those of what is wrong, with its name."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent.parent / "examples" / "autograder.py"

IN_NUMPY = """
import numpy as np

def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)

def scaled_dot_product_attention(Q, K, V, mask=None):
    scores = Q @ K.swapaxes(-1, -2) / np.sqrt(Q.shape[-1])
    if mask is not None:
        scores = np.where(np.asarray(mask) == 0, -1e9, scores)
    weights = softmax(scores)
    return weights @ V, weights

def create_causal_mask(n):
    return np.tril(np.ones((n, n)))

def create_padding_mask(lengths, max_length):
    return (np.arange(max_length) < np.asarray(lengths)[:, None]).astype(float)[:, None, None]

class Linear:
    def __init__(self, size, rng):
        self.weight, self.bias = rng.standard_normal((size, size)) / size**0.5, rng.standard_normal(size)
    def __call__(self, x):
        return x @ self.weight.T + self.bias

class MultiHeadAttention:
    def __init__(self, embed_dim, num_heads):
        rng = np.random.default_rng(0)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (Linear(embed_dim, rng) for _ in range(4))
    def split(self, x):
        return x.reshape(len(x), -1, self.num_heads, self.head_dim).swapaxes(1, 2)
    def __call__(self, query, key, value, mask=None):
        q, k, v = self.split(self.q_proj(query)), self.split(self.k_proj(key)), self.split(self.v_proj(value))
        output, weights = scaled_dot_product_attention(q, k, v, mask)
        return self.out_proj(output.swapaxes(1, 2).reshape(len(query), -1, self.embed_dim)), weights
"""
IN_TORCH = """
import torch
from torch import nn

def scaled_dot_product_attention(Q, K, V, mask=None):
    scores = Q @ K.transpose(-2, -1) / Q.size(-1) ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = scores.softmax(-1)
    return weights @ V, weights

def create_causal_mask(n):
    return torch.tril(torch.ones(n, n))

def create_padding_mask(lengths, max_length):
    return (torch.arange(max_length) < torch.as_tensor(lengths)[:, None]).float()[:, None, None]

class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
    def forward(self, x, mask=None):
        b, n, e = x.shape
        q, k, v = (p(x).view(b, n, self.num_heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        output, _ = scaled_dot_product_attention(q, k, v, mask)
        return self.out_proj(output.transpose(1, 2).reshape(b, n, e))
"""


def run(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), str(file), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def item(tmp_path: Path, code: str, name: str) -> dict[str, Any]:
    file = tmp_path / "student.py"
    file.write_text(code, encoding="utf-8")
    told: dict[str, Any] = runpy.run_path(str(PROGRAM))["grade_one"](file, name)
    return told


def test_a_right_module_has_all_points(tmp_path: Path) -> None:
    file, answer = tmp_path / "student.py", tmp_path / "results.json"
    file.write_text(IN_NUMPY, encoding="utf-8")
    done = run(file, "--json", str(answer))
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].split() == ["all", "100", "/", "100"]
    told = json.loads(answer.read_text(encoding="utf-8"))
    assert (told["score"], told["max_score"]) == (100, 100)
    assert sum(test["max_score"] for test in told["tests"]) == 100
    assert {test["output"] for test in told["tests"]} == {""}


@pytest.mark.parametrize("code", [IN_NUMPY, IN_TORCH])
def test_right_items_have_their_points(tmp_path: Path, code: str) -> None:
    for one in runpy.run_path(str(PROGRAM))["ITEMS"]:
        told = item(tmp_path, code, one.name)
        assert told == {"got": one.points, "words": []}, told


WRONG = {
    "no scale": ("scaled_dot_product_attention", " / np.sqrt(Q.shape[-1])", "", 0, "no-scale"),
    "mask ignored": ("scaled_dot_product_attention", "scores = np.where", "_ = np.where", 35, "mask-ignored"),
    "mask inverted": ("scaled_dot_product_attention", "== 0", "== 1", 35, "mask-inverted"),
    "overflow": ("scaled_dot_product_attention", " - x.max(-1, keepdims=True)", "", 40, "no-maximum-subtracted"),
    "projection": ("MultiHeadAttention", "self.out_proj(output", "(output", 0, "output-projection-forgotten"),
    "merged": ("MultiHeadAttention", "output.swapaxes(1, 2)", "output", 0, "heads-merged-without-transpose"),
    "strict": ("create_causal_mask", "np.ones((n, n))", "np.ones((n, n)), -1", 0, "causal-excludes-itself"),
    "one more": ("create_padding_mask", "max_length) <", "max_length) <=", 0, "lengths-off-by-one"),
    "missing": ("create_padding_mask", "def create_padding_mask", "def padding", 0, "the file defines no create"),
    "raises": ("create_causal_mask", "return np.tril", "return np.trill", 0, "raises"),
    "no Python": ("create_causal_mask", "import numpy", "import import numpy", 0, "could not be loaded: SyntaxError"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_items_lose_points_by_name(tmp_path: Path, name: str) -> None:
    which, before, after, score, words = WRONG[name]
    assert before in IN_NUMPY
    told = item(tmp_path, IN_NUMPY.replace(before, after), which)
    assert words in told["words"][0], told
    assert sum(told["got"].values()) == score, told


def test_a_wrong_module_is_told_and_one_that_hangs_is_given_up(tmp_path: Path) -> None:
    file, answer = tmp_path / "student.py", tmp_path / "results.json"
    wrong = IN_NUMPY.replace("return np.tril", "while True: pass\n    return np.tril").replace(
        "self.head_dim =", "self.d ="
    )
    file.write_text(wrong, encoding="utf-8")
    done = run(file, "--json", str(answer), "--seconds", "12")
    assert done.returncode == 1
    assert "it had not answered after 12 seconds" in done.stdout
    told = json.loads(answer.read_text(encoding="utf-8"))
    assert told["score"] == 55, done.stdout
    assert run(tmp_path / "nowhere.py").returncode == 2
