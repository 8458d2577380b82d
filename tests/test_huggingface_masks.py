"""No Hugging Face model loses its mask: those that attend without transformers' interface are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import elsewhere
import hf_models as hf
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask
from transformers.models.bloom import modeling_bloom
from transformers.models.llama import modeling_llama
from watched import held

import clearhead as ch
from clearhead.integrations import huggingface, local_models
from clearhead.integrations.promised import Promised, asks

huggingface.register()

OLD = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 37, **hf.NONE}
BART = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 37, "max_position_embeddings": 32, **hf.NONE,
}  # fmt: skip
BIRD = {**hf.ENCODER, "vocab_size": 37, "attention_type": "original_full"}
MODERN = {**hf.ENCODER, **hf.NONE, "vocab_size": 37, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}
PHI = {**hf.DECODER, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# decoders, encoders and both, with rotary, learned and relative positions, windows, experts and shared keys
TAKEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", hf.DECODER),
    "opt": ("OPTForCausalLM", "OPTConfig", {**hf.DECODER, "ffn_dim": 32, "word_embed_proj_dim": 24}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**hf.DECODER, **EXPERTS, "sliding_window": 4}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", hf.DECODER),
    "phi": ("PhiForCausalLM", "PhiConfig", PHI),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**BART, "decoder_start_token_id": 1}),
    "bart_decoder": ("BartForCausalLM", "BartConfig", BART),
    "bigbird_decoder": ("BigBirdPegasusForCausalLM", "BigBirdPegasusConfig", BART),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", {**hf.T5, "decoder_start_token_id": 0}),
    "roberta": ("RobertaModel", "RobertaConfig", {**hf.ENCODER, "vocab_size": 37}),
    "splinter": ("SplinterModel", "SplinterConfig", {**hf.ENCODER, "vocab_size": 37}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", MODERN),
}
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BloomAttention": ("BloomForCausalLM", "BloomConfig", {**OLD, "hidden_size": 24}),
    "MptAttention": ("MptForCausalLM", "MptConfig", {"d_model": 24, "n_layers": 2, "n_heads": 4, "vocab_size": 37}),
    "CodeGenAttention": ("CodeGenForCausalLM", "CodeGenConfig", {**OLD, "rotary_dim": 4}),
    "GPTNeoXJapaneseAttention": ("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseConfig", hf.DECODER),
    "BigBirdSelfAttention": ("BigBirdForCausalLM", "BigBirdConfig", {**BIRD, "is_decoder": True}),
    "RoFormerSelfAttention": ("RoFormerModel", "RoFormerConfig", {**hf.ENCODER, "vocab_size": 37}),
}
DECODERS = ("Bloom", "Mpt", "CodeGen", "GPTNeoX", "BigBird")
TABLES = {
    "falcon": ("FalconForCausalLM", "FalconConfig", {"alibi": True}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {"rotary_dim": 4}),
}


def build(model: str, config: str, options: dict[str, Any], way: str) -> nn.Module:
    torch.manual_seed(7)
    made = getattr(transformers, model)(getattr(transformers, config)(**options, attn_implementation=way)).eval()
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")  # the others have no float64
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def given(model: nn.Module, padding: Tensor | None) -> dict[str, Tensor]:
    mask = {} if padding is None else {"attention_mask": padding}
    both = {"decoder_input_ids": hf.IDS[:, :5]} if model.config.is_encoder_decoder else {}
    return {"input_ids": hf.IDS, **mask, **both}


def real(output: Tensor, padding: Tensor | None) -> Tensor:
    return output if padding is None or output.shape[:2] != padding.shape else output[padding.bool()]


@pytest.mark.parametrize("padding", [None, hf.LEFT, hf.RIGHT], ids=["whole", "left", "right"])
@pytest.mark.parametrize("name", TAKEN)
@torch.no_grad()
def test_models_on_the_interface_attend_as_eager_does(name, padding):
    eager = build(*TAKEN[name], "eager")
    mine = copy.deepcopy(eager)
    mine.set_attn_implementation("clearhead")
    outputs = [real(hf.result(model(**given(model, padding))), padding) for model in (mine, eager)]
    with hf.in_full():
        exact = real(hf.result(hf.precise(eager)(**given(eager, padding))), padding)
    held(*outputs, exact, 9, name)


@pytest.mark.parametrize("padding", [None, hf.LEFT], ids=["whole", "left"])
@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_models_that_attend_by_themselves_are_refused_by_name(name, padding):
    model, eager = (build(*REFUSED[name], way) for way in ("clearhead", "eager"))
    expected = hf.result(eager(**given(eager, padding)))
    if padding is None and not name.startswith(DECODERS):  # which has no mask to lose
        assert torch.equal(hf.result(model(**given(model, padding))), expected)
        return
    words = f"attn_implementation: is 'clearhead', and {name} does not attend through transformers' attention"
    with pytest.raises(ch.ArgumentError, match=words):
        model(**given(model, padding))


@pytest.mark.parametrize("name", TABLES)
def test_models_with_a_table_of_their_own_cannot_be_built(name):
    model, config, options = TABLES[name]
    with pytest.raises(KeyError, match="clearhead"):
        build(model, config, {**OLD, **options}, "clearhead")


class ByHand(transformers.LlamaPreTrainedModel):
    """Somebody's own model: a known configuration, transformers' masks, and a score matrix of its own."""

    def __init__(self, config: Any, add: bool) -> None:
        super().__init__(config)
        self.add = add
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.tokens(ids)
        mask = create_causal_mask(self.config, x, padding, None)
        scores = (x @ x.mT)[:, None]
        if mask is not None:
            scores = scores + mask if self.add else scores.masked_fill(mask.bool(), -torch.inf)
        return (scores.softmax(-1) @ x[:, None])[:, 0]


@pytest.mark.parametrize("padding", [None, hf.LEFT], ids=["whole", "left"])
@pytest.mark.parametrize("add", [True, False])
@torch.no_grad()
def test_a_mask_that_is_computed_with_is_the_one_of_eager_attention(add, padding):
    model = ByHand(transformers.LlamaConfig(**hf.DECODER), add)
    results = []
    for way in ("eager", "clearhead"):
        model.config._attn_implementation = way
        results.append(real(model(hf.IDS, padding), padding))
    assert torch.equal(*results), "no class here calls itself attention: it gets the mask that it would have had"
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(real(compiled(hf.IDS, padding), padding), results[0])


MAKERS = (create_causal_mask, create_sliding_window_causal_mask, create_bidirectional_mask)


@pytest.mark.parametrize("padding", [None, hf.LEFT, hf.RIGHT], ids=["whole", "left", "right"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_promise_is_kept_whatever_is_asked_of_it(maker, padding):
    config = transformers.MistralConfig(**hf.DECODER, sliding_window=4)
    x = torch.zeros(2, 9, 24)
    config._attn_implementation = "eager"
    eager = maker(config, x, padding, None)
    config._attn_implementation = "clearhead"
    promise = maker(config, x, padding, None)
    assert (promise is None) == (eager is None)
    if promise is None:
        return
    assert isinstance(promise, Promised)
    assert (promise.shape, promise.dtype, promise.device) == (eager.shape, eager.dtype, eager.device)
    assert promise[:, :, :, :9] is promise, "models cut masks to the keys there are"
    for same in (promise.to("cpu"), promise.to(device="cpu", dtype=promise.dtype), promise.cpu(), promise.detach()):
        assert same is promise, "hooks move every layer's arguments, and checkpoints detach them"
    assert promise.made is None, "nothing was made to say so"
    scores = torch.randn(2, 4, 9, 9)
    for use in (
        lambda m: scores + m,
        lambda m: m + scores,
        lambda m: scores.clone().add_(m),
        lambda m: scores.masked_fill(m.bool(), 0.0),
        lambda m: scores.masked_fill(m < 0, 0.0),
        lambda m: torch.where(m == 0, scores, 0.0),
        lambda m: torch.baddbmm(m[:, 0], scores[:, 0], scores[:, 1]),
        lambda m: nn.functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=m),
        lambda m: torch.cat([m, m], dim=-1),
        lambda m: m[:, :, -3:, :5],
        lambda m: m.flip(-1),
        lambda m: m.to(torch.float64),
        lambda m: m.clone(),
        lambda m: copy.deepcopy(m),
        lambda m: torch.tensor(m.tolist()),
    ):
        fresh = maker(config, x, padding, None)
        got, expected = use(fresh), use(eager)
        assert not isinstance(got, Promised)
        assert torch.equal(got, expected)


@torch.no_grad()
def test_masks_are_made_for_nobody_where_clearhead_attends():
    model = hf.build("llama")
    model.set_attn_implementation("clearhead")
    made = []
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, a, k: made.append(k["attention_mask"]), with_kwargs=True)
    for padding in (None, hf.LEFT):
        model(**given(model, padding))
    whole, left = made
    assert whole.causal
    assert whole.allowed is None
    assert left.allowed.dtype == torch.bool
    assert whole.made is None
    assert left.made is None
    with torch._C.DisableTorchFunctionSubclass():
        assert whole.untyped_storage().nbytes() == 4, "it takes no memory"


@pytest.mark.parametrize("padding", [None, hf.LEFT], ids=["whole", "left"])
@torch.no_grad()
def test_a_mask_that_was_written_to_is_the_one_that_counts(padding):
    model, written = hf.build("llama"), []

    def hide(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs["attention_mask"]
        mask[:, :, 5:, 4] = torch.finfo(mask.dtype).min
        written.append(mask)

    for layer in model.model.layers:
        layer.register_forward_pre_hook(hide, with_kwargs=True)
    results = []
    for way in ("eager", "clearhead"):
        model.set_attn_implementation(way)
        results.append(real(model(**given(model, padding)).logits, padding))
    assert isinstance(written[-1], Promised)
    torch.testing.assert_close(*results)


@torch.no_grad()
def test_layers_that_are_compiled_take_the_masks_of_a_model_that_is_not():
    model = hf.build("llama")
    model.set_attn_implementation("clearhead")
    plain = [real(model(**given(model, padding)).logits, padding) for padding in (None, hf.LEFT, None)]
    for layer in model.model.layers:
        layer.compile(backend="eager")
    for padding, expected in zip((None, hf.LEFT, None), plain, strict=True):
        torch.testing.assert_close(real(model(**given(model, padding)).logits, padding), expected)


def test_models_compile_in_a_fresh_process():
    code = """
import sys
sys.path.insert(0, "tests")
import hf_models as hf, torch
from clearhead.integrations import huggingface, local_models
huggingface.register()
model = hf.build("llama")
del model.model.layers[1:]  # one is traced as the next is
model.set_attn_implementation("clearhead")
compiled = torch.compile(model, backend="eager", fullgraph=True)
with torch.no_grad():
    padded, expected = compiled(**hf.inputs("llama")).logits, model(**hf.inputs("llama")).logits
real = hf.real("llama")
torch.testing.assert_close(padded[real], expected[real])
"""
    done = elsewhere.python("-c", code)
    assert done.returncode == 0, done.stderr


def test_what_is_compiled_and_attends_by_itself_has_the_mask_of_eager_attention():
    model = build(*REFUSED["CodeGenAttention"], "eager")
    with torch.no_grad():
        expected = model(hf.IDS).logits
        model.config._attn_implementation = "clearhead"
        torch.testing.assert_close(torch.compile(model, backend="eager")(hf.IDS).logits, expected)


@torch.no_grad()
def test_a_folder_with_a_model_that_attends_by_itself_is_loaded_on_its_own_attention(tmp_path, monkeypatch):
    build(*REFUSED["BloomAttention"], "eager").save_pretrained(tmp_path)
    found = type("Tokenizer", (), {"__call__": lambda self, text: {"input_ids": [1, 2]}})()
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: found)
    loaded = local_models.load(str(tmp_path))
    assert loaded.model(hf.IDS).last_hidden_state.isfinite().all()


def test_which_classes_ask_the_interface():
    assert asks(modeling_llama.LlamaAttention)
    assert not asks(modeling_llama.LlamaMLP)
    assert not asks(modeling_llama.LlamaModel)
    assert not asks(modeling_bloom.BloomAttention)
