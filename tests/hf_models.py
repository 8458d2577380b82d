"""Tiny Hugging Face models with random weights, built here: nothing is downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()

NONE = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
DECODER = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6,
    "num_key_value_heads": 2, "vocab_size": 37, "max_position_embeddings": 64, **NONE,
}  # fmt: skip
ENCODER = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WHISPER = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 37, "num_mel_bins": 8, "max_source_positions": 10,
    "max_target_positions": 20, "decoder_start_token_id": 1, "begin_suppress_tokens": None, **NONE,
}  # fmt: skip
T5 = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 37, "eos_token_id": None}

# what each is here for, its classes, and its configuration
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 4}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**DECODER, "sliding_window": 4, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 3},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 37, **NONE}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**DECODER, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "bert": ("BertModel", "BertConfig", {**ENCODER, "vocab_size": 37}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}),
    "vit": ("ViTModel", "ViTConfig", {**ENCODER, "image_size": 16, "patch_size": 4}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
}
DECODERS = ("llama", "mistral", "gemma2", "gpt2", "gpt_oss")
KINDS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")

IDS = torch.randint(1, 37, (2, 9), generator=torch.Generator().manual_seed(5))
# decoders are padded on the left, encoders on the right
LEFT = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
RIGHT = LEFT.flip(1)


def build(name: str) -> nn.Module:
    model, config, options = MODELS[name]
    torch.manual_seed(7)
    made = getattr(transformers, model)(getattr(transformers, config)(**options)).eval()
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")  # the others have no float64
    for parameter in made.parameters():  # as they are initialised, scores are nearly 0 and hide every mistake
        nn.init.normal_(parameter, std=0.3)
    return made


def inputs(name: str) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))}
    if name == "whisper":
        features = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(3))
        return {"input_features": features, "decoder_input_ids": IDS[:, :5]}
    if name == "t5":
        return {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": IDS[:, :5]}
    return {"input_ids": IDS, "attention_mask": RIGHT if name == "bert" else LEFT}


def real(name: str) -> Tensor:
    """The queries that are no padding: what is computed for the others nobody reads."""
    mask = inputs(name).get("attention_mask")
    return torch.ones(2, 1, dtype=torch.bool) if name == "t5" or mask is None else mask.bool()


def result(output: Any) -> Tensor:
    return output.logits if "logits" in output else output.last_hidden_state


def precise(model: nn.Module) -> nn.Module:
    """The same in float64, by eager attention; `in_full` has its softmax in float64 too."""
    other = copy.deepcopy(model).double()
    other.set_attn_implementation("eager")
    return other


@contextmanager
def in_full() -> Iterator[None]:
    """Eager attention takes its softmax in float32, whatever the model is in: here it does not."""
    softmax = nn.functional.softmax
    nn.functional.softmax = lambda x, dim=-1, dtype=None, **_: softmax(x, dim=dim)
    try:
        yield
    finally:
        nn.functional.softmax = softmax


def doubles(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
