"""Decoders cut into stages, which generate what transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from multiworld.errors import SpecError
from multiworld.serve import Module, TensorSpec
from multiworld.serve.engine.compute.kv_cache import KvCache, Rows
from multiworld.serve.engine.models import (
    decoder,
    decoder_stage,
    folder_facts,
    huggingface,
)
from multiworld.serve.engine.models.factory import build_model
from multiworld.serve.engine.models.integer_linear import IntegerLinear
from multiworld.serve.engine.models.packed_linear import pack_linears
from multiworld.serve.engine.models.partition import Span
from multiworld.serve.spec.schema import GenerationSpec, ModelSpec, StageSpec
from multiworld.serve.spec.stage import Model, StageContext
from tests.tiny_decoder import (
    KINDS,
    VOCABULARY,
    greedy,
    save_decoder,
    save_tokenizer,
)

PROMPTS = [[3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41], [9, 8, 7]]
COUNT = 20


class Chain:
    """Stages in one process, whose steps the test computes."""

    def __init__(self, functions: list[Any]) -> None:
        self.functions = functions
        self.caches = [KvCache(block_size=4) for _ in functions]

    def logits(self, ids: list[int]) -> torch.Tensor:
        x, at = torch.tensor(ids), torch.arange(len(ids))
        with torch.inference_mode():
            for function, cache in zip(self.functions, self.caches, strict=True):
                x = function(x, at, cache.step([Rows("new", 0, len(ids))]), at)
        return x

    def step(self, parts: list[tuple[int, int, list[int]]]) -> list[int]:
        """Compute tokens of sequences; return the most likely next token of each."""
        rows = [Rows(number, begin, len(ids)) for number, begin, ids in parts]
        x = torch.tensor([token for *_, ids in parts for token in ids])
        positions = torch.cat([torch.arange(r.begin, r.begin + r.count) for r in rows])
        wanted = torch.tensor([r.count for r in rows]).cumsum(0) - 1
        with torch.inference_mode():
            for function, cache in zip(self.functions, self.caches, strict=True):
                x = function(x, positions, cache.step(rows), wanted)
        found: list[int] = x.argmax(-1).tolist()
        return found


def chain_of(folder: Path, cuts: list[tuple[int, int]]) -> Chain:
    spans = [Span(begin, end, 4) for begin, end in cuts]
    stages = [decoder_stage.load(folder, s, "float32", "cpu") for s in spans]
    for stage in stages:
        pack_linears(stage)
    return Chain(stages)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_generate_what_transformers_does(kind: str, tmp_path: Path) -> None:
    folder = save_decoder(tmp_path, kind)
    wanted = [greedy(folder, prompt, COUNT) for prompt in PROMPTS]
    chain = chain_of(folder, [(0, 2), (2, 3), (3, 4)])
    texts = [list(prompt) for prompt in PROMPTS]
    done = [0, 0]
    for _ in range(COUNT):
        parts = [(n, done[n], text[done[n] :]) for n, text in enumerate(texts)]
        done = [len(text) for text in texts]
        for text, token in zip(texts, chain.step(parts), strict=True):
            text.append(token)
    made = [t[len(p) :] for t, p in zip(texts, PROMPTS, strict=True)]
    assert made == wanted


# With these weights, mixtral's choice of experts depends on less than the error.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixtral"])
def test_logits_in_int8_are_close_to_those_of_floats(kind: str, tmp_path: Path) -> None:
    """Weights have 8 bits, and activations 14."""
    folder = save_decoder(tmp_path, kind)
    found = []
    for quantization in (None, "int8"):
        spec = ModelSpec.model_validate(
            {
                "path": str(folder),
                "generation": {"quantization": quantization, "dtype": "float32"},
                "stages": [{}, {}, {}],
            }
        )
        model = build_model(spec)
        chain = Chain([stage.load(StageContext()) for stage in model.stages])
        is_quantized = [
            any(isinstance(m, IntegerLinear) for m in function.modules())
            for function in chain.functions
        ]
        assert is_quantized == [quantization == "int8"] * 3
        found.append(chain.logits(PROMPTS[0]))
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert error < 0.05


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_prompt_in_parts_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    folder = save_decoder(tmp_path, kind)
    prompt = PROMPTS[0]
    chain = chain_of(folder, [(0, 4)])
    chain.step([(0, 0, [1, 2, 3, 4, 5])])  # dropped when the sequence begins anew
    begin = 0
    found = []
    for end in (1, 4, 9, len(prompt)):
        found = chain.step([(0, begin, prompt[begin:end])])
        begin = end
    assert found == greedy(folder, prompt, 1)
    used = chain.caches[0].nbytes
    chain.caches[0].free(0)
    assert used > 0 == chain.caches[0].nbytes


def test_model_of_a_spec_knows_its_ends_and_sizes(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path)
    spec = ModelSpec.model_validate(
        {"path": str(folder), "generation": {}, "stages": [{}, {}], "cut": [1]}
    )
    model = build_model(spec)
    assert model.generation is not None
    assert model.generation.vocabulary == 300
    assert model.generation.max_tokens == 256
    # Key and value of 2 heads of 16 numbers of 4 bytes, for 1 and for 3 layers.
    assert list(model.generation.kv_bytes) == [256, 768]
    loaded: Any = model.stages[1].load(StageContext())
    assert isinstance(loaded, decoder_stage.DecoderStage)


def test_encoder_generates_nothing_and_says_so(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2)
    config.num_attention_heads, config.intermediate_size = 2, 32
    BertModel(config).save_pretrained(tmp_path)
    span = Span(0, 2, 2)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"bert"', '"vit"')
    )
    with pytest.raises(SpecError, match="no language model for vit"):
        decoder_stage.load(tmp_path, span, "float32", "cpu")


def test_rotary_frequencies_are_not_rounded_in_int8(tmp_path: Path) -> None:
    folder, span = save_decoder(tmp_path), Span(0, 4, 4)

    def frequencies(how: str | None = None) -> torch.Tensor:
        stage = decoder_stage.load(folder, span, "bfloat16", "cpu", how)
        (found,) = (b for n, b in stage.named_buffers() if n.endswith(".inv_freq"))
        return found

    assert frequencies("int8").dtype is torch.float32
    assert torch.equal(frequencies("int8"), frequencies())


def test_layers_with_another_state_are_refused(tmp_path: Path) -> None:
    """They would mix sequences of a batch, and forget earlier steps."""
    folder = save_decoder(tmp_path, "lfm2")
    with pytest.raises(SpecError, match=r"of kind conv are not supported.*vllm"):
        decoder.model(str(folder))
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]  # transformers then uses its default
    (folder / "config.json").write_text(json.dumps({**config, "full_attn_idxs": [1]}))
    with pytest.raises(SpecError, match="of kind conv are not supported"):
        decoder_stage.load(folder, Span(0, 4, 4), "float32", "cpu")


def test_layers_with_an_attention_of_their_own_are_refused(tmp_path: Path) -> None:
    """Such a layer would not see the tokens of earlier steps."""
    folder = save_decoder(tmp_path, "codegen")
    with pytest.raises(
        SpecError, match="0 of 4 layers use transformers' attention interface"
    ):
        decoder_stage.load(folder, Span(0, 4, 4), "float32", "cpu")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("qwen2_moe", "define their attention window only in a mask"),
        ("doge", "a layer-specific mask"),
        ("gptj", "0 of 4 layers use transformers' attention interface"),
    ],
)
def test_attention_that_ours_leaves_a_part_of_out_is_refused(
    kind: str, why: str, tmp_path: Path
) -> None:
    """Otherwise the model would generate wrong text."""
    folder = save_decoder(tmp_path, kind)
    with pytest.raises(SpecError, match=why):
        decoder_stage.load(folder, Span(0, 4, 4), "float32", "cpu")
    if kind == "gptj":  # also in stages, which cannot be tried
        with pytest.raises(SpecError, match="a trial could not show that gptj"):
            decoder_stage.load(folder, Span(0, 2, 4), "float32", "cpu")


def test_cut_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """In one stage the model is correct; in two, later layers lack an input."""
    folder = save_decoder(tmp_path, "gemma3n")
    decoder_stage.load(folder, Span(0, 4, 4), "float32", "cpu")
    for span in (Span(0, 2, 4), Span(2, 4, 4)):
        with pytest.raises(SpecError, match="a trial could not show that gemma3n"):
            decoder_stage.load(folder, span, "float32", "cpu")


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    """A step has only the tokens so far."""
    folder = save_decoder(tmp_path, "bert_both_ways")
    with pytest.raises(SpecError, match="non-causal attention"):
        decoder_stage.load(folder, Span(0, 4, 4), "float32", "cpu")


def test_positions_that_begin_elsewhere_are_refused(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path, "roberta")
    with pytest.raises(SpecError, match="counts positions from its padding token"):
        decoder.model(str(folder), stages=1)


def test_memory_of_latent_attention_is_that_of_its_expanded_keys(
    tmp_path: Path,
) -> None:
    """``head_dim`` is the size of the rotary part only."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    config = DeepseekV3Config(vocab_size=VOCABULARY, **sizes)
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    generation = decoder.model(str(tmp_path), dtype="float32").generation
    assert generation is not None
    assert list(generation.kv_bytes) == [4 * 4 * (32 + 16 + 24) * 4]
    chain = chain_of(tmp_path, [(0, 4)])
    chain.step([(0, 0, [*range(1, 33)])])
    tokens, rest = divmod(chain.caches[0].nbytes, generation.kv_bytes[0])
    assert (32 <= tokens <= 36, rest) == (True, 0)  # in blocks of 4


def config_of(kind: str, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {"model_type": kind, "head_dim": 16, **sizes, **more}


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        (config_of("llama"), [64, 64]),
        (config_of("jetmoe", num_experts_per_tok=3), [192, 192]),
        (config_of("gpt_bigcode", num_key_value_heads=None), [32, 32]),
        (config_of("gpt_bigcode", multi_query=False), [64, 64]),
        (config_of("gemma4_text", per_layer_config={"1": {"head_dim": 32}}), [64, 128]),
        (
            config_of(
                "gemma4_text",
                layer_types=["sliding_attention", "full_attention"],
                global_head_dim=64,
            ),
            [64, 256],
        ),
    ],
)
def test_memory_of_keys_and_values_is_that_of_each_layer(
    tmp_path: Path, config: dict[str, Any], numbers: list[int]
) -> None:
    facts = {**config, "num_hidden_layers": 2, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    save_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").touch()
    generation = decoder.model(str(tmp_path), 2, dtype="float32").generation
    assert generation is not None
    assert list(generation.kv_bytes) == [4 * number for number in numbers]


def test_layers_that_keep_more_than_was_booked_are_refused(tmp_path: Path) -> None:
    """Otherwise a replica could exceed its memory."""
    folder = save_decoder(tmp_path)
    span = Span(0, 4, 4)
    assert decoder_stage.load(folder, span, "float32", "cpu", kv_numbers=4 * 64)
    with pytest.raises(SpecError, match=r"cache 256 numbers per token, but .* 255"):
        decoder_stage.load(folder, span, "float32", "cpu", kv_numbers=255)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, 64),
        ({"type": "su", "original_max_position_embeddings": 64}, 64),
        ({"full_attention": {"rope_type": "longrope"}}, 99),
        ({"rope_type": "dynamic", "factor": 2.0}, 500),
        ({"rope_type": "llama3", "original_max_position_embeddings": 64}, 500),
        (None, 500),
    ],
)
def test_sequences_end_before_their_length_changes_others(
    rope: dict[str, Any] | None, longest: int
) -> None:
    """Such rotary embeddings depend on the longest sequence of a step."""
    config = {"max_position_embeddings": 500, "rope_scaling": rope}
    if longest == 99:
        config["original_max_position_embeddings"] = 99
    assert huggingface.longest_of(config, 7) == longest
    # External engines take the whole length.
    assert huggingface.configured_length(config, folder_facts.MAX_TOKENS) == 500


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path)
    with pytest.raises(SpecError, match="'int8' is not one of float32"):
        decoder.model(str(folder), dtype="int8")


def unquantized() -> Model:
    """Stand in for a factory without a parameter ``quantization``."""
    raise AssertionError("it must not be called")


@pytest.mark.parametrize(
    ("name", "value"), [("quantization", "int8"), ("dtype", "bfloat16")]
)
def test_factory_that_cannot_do_what_is_asked_is_refused(name: str, value: str) -> None:
    """If the option were ignored, users would take floats for integers."""
    spec = ModelSpec.model_validate(
        {
            "factory": f"{__name__}:unquantized",
            "generation": {name: value},
            "stages": [{}],
        }
    )
    with pytest.raises(SpecError, match=f"has no parameter '{name}'"):
        build_model(spec)


def tensors_only() -> Module:
    return Module(
        make=lambda: torch.nn.Linear(4, 4),
        inputs=[TensorSpec("x", "FP32", (-1, 4))],
        outputs=[TensorSpec("y", "FP32", (-1, 4))],
    )


def test_module_that_generates_no_text_is_refused_as_one_that_does() -> None:
    factory = f"{__name__}:tensors_only"
    spec = ModelSpec.model_validate(
        {"factory": factory, "generation": {}, "stages": [{}]}
    )
    with pytest.raises(SpecError, match="remove `generation:`"):
        build_model(spec)


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """Otherwise every request would fail."""
    folder = save_decoder(tmp_path)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(SpecError, match=r"there is no tokenizer\.json"):
        decoder.model(str(folder))


def test_longer_sequences_than_the_model_takes_are_refused(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path)
    most = decoder.model(str(folder)).generation
    assert most is not None

    def built(tokens: int) -> Model:
        generation = GenerationSpec(max_model_len=tokens)
        stages = [StageSpec(name="all")]
        spec = ModelSpec(path=str(folder), generation=generation, stages=stages)
        return build_model(spec)

    built(most.max_tokens)
    with pytest.raises(SpecError, match=f"maximum, {most.max_tokens} tokens"):
        built(most.max_tokens + 1)


def test_model_that_caps_its_scores_is_not_deterministic(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path, "gemma2")
    with pytest.raises(SpecError, match="softcapped attention logits"):
        decoder.model(str(folder), deterministic=True)
    decoder.model(str(folder))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_bfloat16_chooses_what_transformers_does(kind: str, tmp_path: Path) -> None:
    """Rounding may change a token, but only to one that is about as likely."""
    from transformers import AutoModelForCausalLM

    folder = save_decoder(tmp_path, kind)
    spans = [Span(0, 2, 4), Span(2, 4, 4)]
    chain = Chain([decoder_stage.load(folder, s, "bfloat16", "cpu") for s in spans])
    text = list(PROMPTS[0])
    done = 0
    for _ in range(COUNT):
        (token,) = chain.step([(0, done, text[done:])])
        done = len(text)
        text.append(token)
    maker: Any = AutoModelForCausalLM
    model = maker.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([text])).logits[0].float()
    for place in range(len(PROMPTS[0]) - 1, len(text) - 1):
        row = logits[place]
        assert row[text[place + 1]] >= row.max() - 0.05 * row.std()
