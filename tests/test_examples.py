"""The programs in examples/: they run offline, and what they say is so."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch

EXAMPLES = Path(__file__).parent.parent / "examples"


def names_of(program: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / program))


def test_what_an_answer_leaned_on_is_the_mean_of_all_weights(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    mine = names_of("leaned_on.py")
    words = mine["PROMPT"].split()
    model, run, named = mine["tiny"](words)
    assert named == words
    torch.manual_seed(1)
    shares = mine["leaned_on"](model, run, len(words))
    torch.manual_seed(1)
    with torch.no_grad(), ch.watch(model, want={"weights": True}) as seen:
        run()
    whole = [call.weights[0, :, -1, : len(words)] for call in seen]
    np.testing.assert_allclose(shares, torch.stack(whole).mean((0, 1)), rtol=1e-5)
    file = tmp_path / "leaned_on.html"
    monkeypatch.setattr(sys, "argv", ["leaned_on.py", "--html", str(file)])
    mine["main"]()
    shown = capsys.readouterr().out
    assert shown.startswith("word")
    assert "of all attention went to the prompt" in shown
    page = file.read_text(encoding="utf-8")
    assert page.count("<span") == len(words)
    assert "http" not in page


@pytest.mark.parametrize("key_heads", [4, 2])
def test_logits_are_clipped_to_the_limit(key_heads: int) -> None:
    mine = names_of("clip_logits.py")
    torch.manual_seed(2)
    attend = ch.nn.MultiHeadAttention(16, 4, kv_heads=key_heads, causal=True, positions=ch.rotary()).eval()
    for parameter in attend.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    x = torch.randn(2, 9, 16)

    def largest() -> torch.Tensor:
        with torch.no_grad():
            return attend(x, observe={})[1].max_score.amax((0, -1))

    before = largest()
    limit = float(before.median())
    assert mine["clip"](attend, before, limit) == int((before > limit).sum()) > 0
    after = largest()
    torch.testing.assert_close(after, before.clamp(max=limit), rtol=1e-4, atol=1e-4)


def test_training_with_clipped_logits_runs(capsys: Any, monkeypatch: Any) -> None:
    mine = names_of("clip_logits.py")
    mine["main"].__globals__["STEPS"] = 11
    mine["main"]()
    assert capsys.readouterr().out.count("largest logit") == 3
