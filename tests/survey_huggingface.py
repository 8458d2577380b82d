"""Every model family of the installed transformers, made tiny: attn_implementation="clearhead" against "eager".

    python tests/survey_huggingface.py                 # all families, a few minutes
    python tests/survey_huggingface.py bloom mpt git   # some

A family passes where its outputs are those of eager attention, or where it is refused in words that name it. It fails
where the outputs differ or where anything else is raised that eager attention does not raise. Families that cannot be
made small, or that want inputs other than tokens or pixels, are listed as skipped, with the reason.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import contextlib
import copy
import signal
import sys
import time
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from clearhead import ArgumentError
from clearhead.integrations import huggingface

LARGEST = 30_000_000  # parameters of a model that is still built
LONGEST = 60  # seconds for one family
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "emb_dim": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "n_inner": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "max_seq_len": 64, "seq_length": 64, "embedding_size": 32, "projection_dim": 32, "image_size": 32, "patch_size": 8,
    "ffn_hidden_size": 48, "feed_forward_hidden_size": 48, "sliding_window": 4, "attention_window": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_encoder_layers": 2, "window_size": 4,
    "num_layers_encoder": 2, "rotary_dim": 4, "d_inner": 48, "hidden_dim": 48, "ffn_config_hidden": 48,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {  # what a family needs besides
    "falcon": {"alibi": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "longformer": {"attention_window": [4, 4]},
    "big_bird": {"attention_type": "original_full"},
}


class Slow(Exception):
    """A family took too long."""


def shrink(config: Any, depth: int = 0) -> Any:
    """The same configuration with every size that is known by name made small, those of its parts too."""
    for name, small in SIZES.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            try:
                setattr(config, name, small)
            except Exception:  # a size that follows from others
                continue
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list) and kinds:
        different = list(dict.fromkeys(kinds))
        with contextlib.suppress(Exception):
            config.layer_types = (different * 2)[:2] if len(different) < 2 else different[:2]
    if hasattr(config, "kv_lora_rank"):  # latents have keys for every head
        config.num_key_value_heads = 4
    if depth < 3:
        for part in getattr(config, "sub_configs", {}):
            inner = getattr(config, part, None)
            if inner is not None and not isinstance(inner, dict):
                shrink(inner, depth + 1)
    return config


def families() -> dict[str, tuple[type, type]]:
    """(configuration, model) by name: a causal language model where there is one, and the bare model beside it."""
    found: dict[str, tuple[type, type]] = {}
    configs = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    mappings = {"": modeling_auto.MODEL_MAPPING_NAMES, ":lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    for suffix, mapping in mappings.items():
        for name, classes in mapping.items():
            for one in (classes,) if isinstance(classes, str) else classes[:1]:
                model = getattr(transformers, one, None)
                if model is not None and name in configs:
                    found[name + suffix] = (configs[name], model)
    return dict(sorted(found.items()))


def inputs(model: nn.Module, padding: str | None) -> list[dict[str, Tensor]]:
    """Ways in which such a model may be called; the first that eager attention takes is used."""
    torch.manual_seed(3)
    ids = torch.randint(3, 90, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.int64)
    if padding == "left":
        mask[1, :3] = 0
    if padding == "right":
        mask[1, 6:] = 0
    for row, last in enumerate((mask * torch.arange(9)).argmax(-1)):
        ids[row, last] = 2  # the token that ends a text, which some models pool at
    tokens = {"input_ids": ids, "attention_mask": mask}
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32)}
    return [
        {**tokens, "decoder_input_ids": ids[:, :5], "decoder_attention_mask": mask[:, :5]},
        tokens,
        {**tokens, **pixels},
        pixels,
        {"input_features": torch.randn(2, 80, 20), "decoder_input_ids": ids[:, :5]},
        {"input_values": torch.randn(2, 800)},
    ]


def outputs(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(5)  # for models that draw as they run
    with torch.no_grad():
        result = model(**given)
    values = result.to_tuple() if hasattr(result, "to_tuple") else tuple(result)
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()][:2]


def real(output: Tensor, given: dict[str, Tensor]) -> Tensor:
    """What belongs to tokens that are no padding."""
    masks = [mask for name, mask in given.items() if name.endswith("attention_mask")]
    mask = next((mask for mask in masks if mask.shape == output.shape[:2]), None)
    return output if mask is None else output[mask.bool()]


def build(config_class: type, model_class: type, name: str, way: str) -> nn.Module:
    config = shrink(config_class())
    for key, value in OPTIONS.get(name.removesuffix(":lm"), {}).items():
        setattr(config, key, value)
    config._attn_implementation = way
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise Slow(f"has {size:,} parameters when shrunk")
    torch.manual_seed(7)
    model = model_class(config).eval()
    for parameter in model.parameters():  # as they are initialised, scores are nearly 0 and hide every mistake
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def examine(name: str, config_class: type, model_class: type) -> tuple[str, str]:
    """(verdict, why) of one family: ok, refused, skipped or WRONG."""
    try:
        eager = build(config_class, model_class, name, "eager")
    except Slow:
        raise
    except Exception as error:
        return "skipped", f"cannot be built small: {said(error)}"
    try:
        mine = build(config_class, model_class, name, "clearhead")
    except Slow:
        raise
    except KeyError as error:  # the model has a table of its own, and looks up in it what it was asked for
        return ("refused" if error.args == ("clearhead",) else "WRONG"), f"building: {said(error)}"
    except Exception as error:
        return "WRONG", f"building: {said(error)}"
    mine.load_state_dict(eager.state_dict(), strict=False)
    worst, compared, refused, untaken = 0.0, 0, "", ""
    for padding in (None, "left", "right"):
        for given in inputs(eager, padding):
            try:
                expected = outputs(eager, given)
                again = outputs(eager, given)
            except Slow:
                raise
            except Exception as error:
                if set(given) == {"input_ids", "attention_mask"}:
                    untaken = said(error)
                continue
            try:
                got = outputs(mine, given)
            except Slow:
                raise
            except ArgumentError as error:
                refused = str(error)
                break
            except Exception as error:
                return "WRONG", f"{padding}: {said(error)}"
            for theirs, twice, ours in zip(expected, again, got, strict=False):
                if ours.shape != theirs.shape:
                    return "WRONG", f"{padding}: shape {tuple(ours.shape)} for {tuple(theirs.shape)}"
                a, b, c = (real(t, given).double() for t in (theirs, twice, ours))
                if not torch.equal(a, b) or not a.isfinite().all():
                    continue  # it draws, or has nothing to compare
                compared += 1
                worst = max(worst, float((a - c).abs().max() / a.abs().max().clamp(min=1e-30)))
            break
        if refused:
            break
    if refused:
        return "refused", refused
    if not compared:
        return "skipped", f"eager attention gives nothing to compare: {untaken}"
    return ("ok" if worst < 1e-3 else "WRONG"), f"off by {worst:.1e}, {compared} compared"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families, as transformers calls them")
    chosen = parser.parse_args().names
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    huggingface.register()

    def too_long(*_: Any) -> None:
        raise Slow(f"took more than {LONGEST} s")

    signal.signal(signal.SIGALRM, too_long)
    count: dict[str, int] = {}
    for name, (config_class, model_class) in families().items():
        if chosen and name.removesuffix(":lm") not in chosen:
            continue
        begun = time.time()
        signal.alarm(LONGEST)
        try:
            verdict, why = examine(name, config_class, model_class)
        except Slow as error:
            verdict, why = "skipped", str(error)
        finally:
            signal.alarm(0)
        count[verdict] = count.get(verdict, 0) + 1
        print(f"{verdict:8}{name:32}{model_class.__name__:40}{why}  ({time.time() - begun:.1f} s)", flush=True)
    print(", ".join(f"{number} {verdict}" for verdict, number in sorted(count.items())))
    return 1 if count.get("WRONG") else 0


if __name__ == "__main__":
    sys.exit(main())
