"""Writes docs/models.md with `python -m keel.trainer.placement.supported docs`.

Each row shows what `keel check` says about a small model of the family.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from keel.configs.schema import ConfigError
from keel.model.load import check_causal
from keel.model.routing.routers import is_moe
from keel.model.trainable import check_trainable
from keel.trainer.placement.families import (
    EXPERT_PARALLEL,
    NOT_IN_FLOAT16,
    check_sequence_parallel,
)

PAGE = "models.md"
_LAYERS = 4
_QUANTISED = "published in {}; name unquantised weights"


class Family(NamedTuple):
    """A model family, which is a row on the page."""

    models: str
    model_type: str
    architecture: str
    note: str = ""
    changes: Mapping[str, Any] = MappingProxyType({})
    """Changes to the default configuration in transformers, if it does not match any of the
    models."""


FAMILIES = (
    Family("Llama 1 to 3.3, SmolLM 2, R1-Distill-Llama", "llama", "LlamaForCausalLM"),
    Family("Qwen2, Qwen2.5, QwQ, R1-Distill-Qwen", "qwen2", "Qwen2ForCausalLM"),
    Family("Qwen3", "qwen3", "Qwen3ForCausalLM"),
    Family("Mistral 7B, Nemo, Small 24B of 2025-01", "mistral", "MistralForCausalLM"),
    Family("Gemma", "gemma", "GemmaForCausalLM"),
    Family("Gemma 3, 270M and 1B", "gemma3_text", "Gemma3ForCausalLM"),
    Family("Phi-1 to Phi-2", "phi", "PhiForCausalLM"),
    Family("Phi-3, Phi-4", "phi3", "Phi3ForCausalLM"),
    Family("OLMo", "olmo", "OlmoForCausalLM"),
    Family("OLMo 2", "olmo2", "Olmo2ForCausalLM"),
    Family("OLMo 3", "olmo3", "Olmo3ForCausalLM"),
    Family("SmolLM3", "smollm3", "SmolLM3ForCausalLM"),
    Family("GLM-4 9B", "glm", "GlmForCausalLM"),
    Family("GLM-4 and Z1 of 2025-04", "glm4", "Glm4ForCausalLM"),
    Family("Granite 3", "granite", "GraniteForCausalLM"),
    Family("EXAONE 4", "exaone4", "Exaone4ForCausalLM"),
    Family("Seed-OSS", "seed_oss", "SeedOssForCausalLM"),
    Family("Command R", "cohere", "CohereForCausalLM"),
    Family("Command R7B, Command A", "cohere2", "Cohere2ForCausalLM"),
    Family("ERNIE 4.5 0.3B", "ernie4_5", "Ernie4_5ForCausalLM"),
    Family("Apertus", "apertus", "ApertusForCausalLM"),
    Family("StarCoder2", "starcoder2", "Starcoder2ForCausalLM"),
    Family("GPT-2", "gpt2", "GPT2LMHeadModel"),
    Family("Pythia, GPT-NeoX", "gpt_neox", "GPTNeoXForCausalLM"),
    Family("OPT", "opt", "OPTForCausalLM"),
    Family("Mixtral", "mixtral", "MixtralForCausalLM"),
    Family("Qwen1.5-MoE, Qwen2-57B-A14B", "qwen2_moe", "Qwen2MoeForCausalLM"),
    Family("Qwen3-30B-A3B, 235B-A22B, Coder", "qwen3_moe", "Qwen3MoeForCausalLM"),
    Family("OLMoE", "olmoe", "OlmoeForCausalLM"),
    Family("FlexOlmo", "flex_olmo", "FlexOlmoForCausalLM"),
    Family("GLM-4.5, 4.6, 4.7", "glm4_moe", "Glm4MoeForCausalLM"),
    Family("GLM-4.7-Flash", "glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    Family("MiniMax-M2", "minimax_m2", "MiniMaxM2ForCausalLM", _QUANTISED.format("fp8")),
    Family("DeepSeek-V2, Coder-V2", "deepseek_v2", "DeepseekV2ForCausalLM"),
    Family(
        "DeepSeek-V3, V3.1, R1", "deepseek_v3", "DeepseekV3ForCausalLM", _QUANTISED.format("fp8")
    ),
    Family(
        "DeepSeek-V3.2",
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        f"rollouts on GPUs only; {_QUANTISED.format('fp8')}",
    ),
    Family("gpt-oss", "gpt_oss", "GptOssForCausalLM"),
    Family("Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM"),
    Family("Qwen3.5, Qwen3.6", "qwen3_5", "Qwen3_5ForConditionalGeneration"),
    Family("Qwen3.5, Qwen3.6, MoE", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    Family("Llama 4", "llama4", "Llama4ForConditionalGeneration"),
    Family("Gemma 2", "gemma2", "Gemma2ForCausalLM"),
    Family("Gemma 3, 4B and more", "gemma3", "Gemma3ForConditionalGeneration"),
    Family("Gemma 4", "gemma4", "Gemma4ForConditionalGeneration"),
    Family("Mistral Small 3.1 and later", "mistral3", "Mistral3ForConditionalGeneration"),
    Family("Phi-3.5-MoE", "phimoe", "PhimoeForCausalLM"),
    Family("Granite 3 MoE", "granitemoe", "GraniteMoeForCausalLM"),
    Family("ERNIE 4.5 MoE", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    Family("GLM-5", "glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    Family("DeepSeek-V4", "deepseek_v4", "DeepseekV4ForCausalLM"),
    Family("Granite 4", "granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    Family("Nemotron Nano 2 and 3", "nemotron_h", "NemotronHForCausalLM"),
    Family("Kimi Linear", "kimi_linear", "KimiLinearForCausalLM"),
    Family(
        "LFM2", "lfm2", "Lfm2ForCausalLM", changes={"layer_types": ["conv", "full_attention"] * 2}
    ),
    Family("Falcon-H1", "falcon_h1", "FalconH1ForCausalLM"),
    Family("Mamba 2", "mamba2", "Mamba2ForCausalLM"),
    Family("Falcon 7B, 40B", "falcon", "FalconForCausalLM"),
    Family("StableLM 2", "stablelm", "StableLmForCausalLM"),
    Family("Qwen2.5-VL", "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    Family("Qwen3-VL", "qwen3_vl", "Qwen3VLForConditionalGeneration"),
    Family("LLaVA", "llava", "LlavaForConditionalGeneration"),
)

_HEAD = """\
# Supported models

Generated by `python -m keel.trainer.placement.supported docs` from the checks of `keel check` on a
small model of each family. Models with the same `model_type` in `config.json` behave alike. Other
families may work; run `keel check`. vLLM must support the family, too.

All weights are trained, in bfloat16, float16 or float32. Quantised weights (GPTQ, AWQ,
bitsandbytes, fp8, mxfp4, compressed-tensors, GGUF), adapters (LoRA), image or audio models, and
models with custom code are refused.
See [Adding a model family](adding-a-model-family.md) for other families.

## Trained

*Keep Routing* replays the experts that the engine chose ([concept](concepts/keep-routing.md));
*sequence* and *expert* say whether `trainer.sequence_parallel` and `trainer.expert_parallel` may be
above 1.

| models | model_type | kind | Keep Routing | sequence | expert | notes |
|---|---|---|---|---|---|---|
"""
_REFUSED = """
## Refused

| models | model_type | kind | reason |
|---|---|---|---|
"""


def config_of(family: Family) -> PreTrainedConfig:
    """Return the configuration for a small model of the family."""
    config = CONFIG_MAPPING[family.model_type]()
    config.architectures = [family.architecture]
    text = config.get_text_config()
    text.num_hidden_layers = _LAYERS
    for name, value in family.changes.items():
        setattr(text, name, value)
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(text, name, None):
            with suppress(AttributeError):  # a computed property of some
                setattr(text, name, kinds[:_LAYERS])
    return config


def refusals(family: Family, config: PreTrainedConfig) -> Iterator[str]:
    """Yield the reasons why `keel check` refuses the model."""
    try:
        check_causal(config, family.model_type)
    except ConfigError:
        yield "takes more than text"
    if type(config.get_text_config()) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    try:
        check_trainable(family.model_type, config)
    except ConfigError as error:
        yield str(error).partition("': ")[2].partition(". ")[0]


def page() -> str:
    """Return the page as Markdown."""
    trained, refused = list[str](), list[str]()
    for family in FAMILIES:
        config = config_of(family)
        moe = is_moe(config)
        first = f"| {family.models} | `{family.model_type}` | {'MoE' if moe else 'dense'} |"
        if why := "; ".join(refusals(family, config)):
            refused.append(f"{first} {why} |")
            continue
        notes = [family.note] * bool(family.note)
        notes += ["engines not in float16"] * (family.model_type in NOT_IN_FLOAT16)
        cells = (
            "yes" if moe else "–",
            "yes" if _sequence_parallel(family.architecture) else "no",
            "–" if not moe else "yes" if family.architecture in EXPERT_PARALLEL else "no",
            "; ".join(notes),
        )
        trained.append(f"{first} {' | '.join(cells)} |")
    return _HEAD + "\n".join(trained) + "\n" + _REFUSED + "\n".join(refused) + "\n"


def _sequence_parallel(architecture: str) -> bool:
    try:
        check_sequence_parallel(2, architecture=architecture, heads=2)
    except ConfigError:
        return False
    return True


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"{__doc__}\nThe folder must exist.")
    (Path(sys.argv[1]) / PAGE).write_text(page(), encoding="utf-8")
