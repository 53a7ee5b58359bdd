"""Small decoders with random weights, saved as Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
WINDOWED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 6,
}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _llama(**other: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SIZES, **other}
    config = LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True)
    return LlamaForCausalLM(config)


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16))


def _mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7)
    return MistralForCausalLM(config)


def _gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **WINDOWED))


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **WINDOWED, layer_types=kinds))


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    return MixtralForCausalLM(config)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3}
    heads: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(**SIZES, **heads, **experts, moe_intermediate_size=32)
    return Qwen3MoeForCausalLM(config)


def _gpt_neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 256,
    }
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


def _lfm2() -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = ["conv", "full_attention"] * 2
    config = Lfm2Config(**SIZES, num_key_value_heads=2, layer_types=kinds)
    return Lfm2ForCausalLM(config)


def _codegen() -> Any:
    from transformers import CodeGenConfig, CodeGenForCausalLM

    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_ctx": 256}
    return CodeGenForCausalLM(
        CodeGenConfig(vocab_size=VOCABULARY, rotary_dim=8, n_positions=256, **sizes)
    )


def _qwen2_moe() -> Any:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6}
    experts: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 32}
    config = Qwen2MoeConfig(**SIZES, **windows, **experts, max_window_layers=1)
    return Qwen2MoeForCausalLM(config)


def _doge() -> Any:
    from transformers import DogeConfig, DogeForCausalLM

    return DogeForCausalLM(DogeConfig(**SIZES, num_key_value_heads=2))


def _gptj() -> Any:
    from transformers import GPTJConfig, GPTJForCausalLM

    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 99}
    return GPTJForCausalLM(GPTJConfig(vocab_size=VOCABULARY, rotary_dim=8, **sizes))


def _opt_350m() -> Any:
    """OPT whose embeddings are narrower than its layers, between two projections."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {k: v for k, v in SIZES.items() if k != "intermediate_size"}
    narrow: dict[str, Any] = {"word_embed_proj_dim": 32, "ffn_dim": 128}
    return OPTForCausalLM(OPTConfig(**sizes, **narrow, do_layer_norm_before=False))


def _modernbert_decoder() -> Any:
    from transformers import ModernBertDecoderConfig, ModernBertDecoderForCausalLM

    window: dict[str, Any] = {"local_attention": 8, "global_attn_every_n_layers": 2}
    window |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    window |= {"cls_token_id": 1, "sep_token_id": 2}
    return ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**SIZES, **window))


def _gemma3n() -> Any:
    """A model whose layers get an input of their own for each token."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3nTextConfig(
        **SIZES,
        **WINDOWED,
        layer_types=kinds,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0] * 4,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
    )
    return Gemma3nForCausalLM(config)


def _roberta() -> Any:
    from transformers import RobertaConfig, RobertaForCausalLM

    return RobertaForCausalLM(RobertaConfig(**SIZES, is_decoder=True))


def _bert_both_ways() -> Any:
    """BERT, which attends to later tokens as well."""
    from transformers import BertConfig, BertLMHeadModel

    return BertLMHeadModel(BertConfig(**SIZES, is_decoder=False))


KINDS: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    "opt_350m": _opt_350m,
    "modernbert_decoder": _modernbert_decoder,
}
"""Makers of the architectures, by name."""

REFUSED: dict[str, Callable[..., Any]] = {
    "lfm2": _lfm2,
    "codegen": _codegen,
    "qwen2_moe": _qwen2_moe,
    "doge": _doge,
    "gptj": _gptj,
    "gemma3n": _gemma3n,
    "roberta": _roberta,
    "bert_both_ways": _bert_both_ways,
}
"""Makers of the architectures that are not served."""


def save_decoder(
    folder: Path,
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> Path:
    """Save a decoder with random weights and a tokenizer; return the folder."""
    torch.manual_seed(7)
    model = {**KINDS, **REFUSED}[kind](**sizes).eval()
    for weight in model.parameters():
        if weight.dim() > 1:  # larger than by default, so that tokens differ
            weight.data = torch.randn_like(weight) * 0.2
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, *special: str, template: str = TEMPLATE) -> None:
    """Save a tokenizer whose tokens are bytes; ``special`` are more control tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {letter: n for n, letter in enumerate(letters, 1)}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    kind: Any = PreTrainedTokenizerFast
    made = kind(tokenizer_object=fast, eos_token="<end>")
    made.add_special_tokens({"additional_special_tokens": [*special]})
    made.chat_template = template
    made.save_pretrained(folder)


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return what transformers itself generates in float32, without sampling."""
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    made: list[int] = found[0, len(prompt) :].tolist()
    return made
