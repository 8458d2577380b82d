"""Which words of a long prompt an answer leaned on: attention of every generated token, summed over layers and heads.

    python examples/leaned_on.py --html leaned_on.html            # a tiny GPT of random weights, offline
    python examples/leaned_on.py --model FOLDER --prompt FILE     # a Hugging Face model in a folder of this machine

Each token of the answer is computed by one query. What the keys received of these queries is all that is asked for, so
that memory grows with the length of the prompt and not with its square.
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clearhead as ch

PROMPT = (
    "The bridge over the river was closed in March because its cables had rusted . The town asked for money to repair "
    "it , and the ferry took the people across until the winter . Why was the bridge closed ?"
)


def leaned_on(model: Any, run: Any, length: int) -> np.ndarray:
    """How much of their attention the tokens that `run` generates gave each of `length` tokens of the prompt.

    The mean over heads, layers and generated tokens: what is missing to 1 went to the answer itself.
    """
    with (
        torch.no_grad(),
        ch.watch(model, want={"received": 1}) as seen,
    ):  # of the last query, which gives the next token
        run()
    calls = [call.received[..., :length].float() for call in seen]  # each (1, heads, prompt)
    if not calls:
        raise SystemExit(f"no attention was seen: {seen.missed}")
    return torch.cat([call.flatten(0, -2) for call in calls]).mean(0).numpy()


def tiny(words: list[str]) -> tuple[Any, Any, list[str]]:
    """A GPT of random weights, and what makes it answer."""
    torch.manual_seed(0)
    known = sorted(set(words))
    config = ch.nn.GPTConfig(vocabulary=len(known), context=len(words) + 16, layers=4, heads=4, width=64)
    model = ch.nn.GPT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.tensor([[known.index(word) for word in words]])
    return model, lambda: model.generate(tokens, 8), words


def hugging_face(folder: Path, text: str) -> tuple[Any, Any, list[str]]:
    """A model that lies on this machine."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa").eval()
    tokens = tokenizer(text, return_tensors="pt")
    words = [tokenizer.decode([token]).strip() for token in tokens["input_ids"][0].tolist()]
    return model, lambda: model.generate(**tokens, max_new_tokens=32, do_sample=False), words


def table(words: list[str], shares: np.ndarray, most: int = 12) -> str:
    """The words that got most, as lines of text."""
    order = np.argsort(-shares)[:most]
    widest = max(len(words[place]) for place in order)
    lines = [f"{'word':<{widest}}  place  share", *(
        f"{words[place]:<{widest}}  {place:5d}  {shares[place]:6.2%} {'█' * round(40 * shares[place] / shares.max())}"
        for place in order
    )]  # fmt: skip
    return "\n".join([*lines, f"{shares.sum():.1%} of all attention went to the prompt, the rest to the answer"])


def page(words: list[str], shares: np.ndarray) -> str:
    """The prompt with each word as dark as it was leaned on, as one HTML file."""
    spans = " ".join(
        f'<span title="{share:.3%}" style="background: rgba(0, 32, 96, {0.85 * share / shares.max():.3f}); '
        f'color: {"white" if share > 0.6 * shares.max() else "inherit"}">{html.escape(word)}</span>'
        for word, share in zip(words, shares, strict=True)
    )
    return (
        '<!doctype html><meta charset="utf-8"><title>What an answer leaned on</title>'
        '<body style="font: 16px/1.8 sans-serif; max-width: 44em; margin: 2em auto">'
        f"<h1>What an answer leaned on</h1><p>{spans}</p>"
    )


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face model; without it, a tiny random one")
    parser.add_argument("--prompt", type=Path, help="file with the prompt")
    parser.add_argument("--html", type=Path, help="write the prompt there, shaded")
    given = parser.parse_args()
    text = given.prompt.read_text(encoding="utf-8") if given.prompt else PROMPT
    model, run, words = tiny(text.split()) if given.model is None else hugging_face(given.model, text)
    shares = leaned_on(model, run, len(words))
    print(table(words, shares))
    if given.html:
        given.html.write_text(page(words, shares), encoding="utf-8")


if __name__ == "__main__":
    main()
