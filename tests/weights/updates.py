"""Updates of a real engine by copies: equal to vLLM's loader, with matching log-probabilities."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from keel.model.load import checkpoint_tensors, load_policy
from keel.rl.types import Group
from tests.rollout.remote_engine import OPEN, RemoteEngine, engine_spec, prompts, running_engine
from tests.rollout.tiny_model import make_model

UPDATES = 3
Model = Literal["experts", "dense", "latent", "gpt2"]
CACHE_GIB = 1.0
"""GiB; an engine uses at most 640 blocks of 16 tokens, for 16 answers of 256 tokens."""
BLOCKS = 16 * 256 / 32, 641
OFF = "rollout.copy_weights is false"


def make(folder: Path, of: Model) -> Any:
    """The recorders' model; a dense one with a tied head; one with latent attention, whose absorbed
    products vLLM derives; or one like GPT-2's. The engine pads all vocabularies."""
    model = make_model(folder)
    if of == "experts":
        return model
    common: dict[str, Any] = {
        "vocab_size": model.config.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "eos_token_id": 0,
        "dtype": "float32",
    }
    torch.manual_seed(1)
    if of == "gpt2":
        heads = {"num_attention_heads": 2, "initializer_range": 0.2}
        config = AutoConfig.for_model(of, **{**common, **heads})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        file = folder / "model.safetensors"
        tensors = {n.removeprefix("transformer."): t for n, t in load_file(file).items()}
        mask = torch.ones(1, 1, 512, 512, dtype=torch.bool).tril()
        masks = {f"h.{n}.attn.bias": mask.clone() for n in range(3)}
        save_file(tensors | masks, file, metadata={"format": "pt"})
        return load_policy(str(folder), torch.float32).eval()
    if of == "dense":
        dense: dict[str, Any] = {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "initializer_range": 0.2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        }
        model = Qwen3ForCausalLM(Qwen3Config(**common, **dense))
    else:
        latent: dict[str, Any] = {
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "num_nextn_predict_layers": 0,
            "initializer_range": 0.1,
            "tie_word_embeddings": False,
        }
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**common, **latent))
    model.eval().save_pretrained(folder)
    return model


@torch.no_grad()
def change(model: Any, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            tensor.normal_()
        elif "rotary" not in name:
            tensor.add_(0.1 * tensor.std() * torch.randn_like(tensor))
    return {name: tensor.clone() for name, tensor in checkpoint_tensors(model)}


def check(folder: Path, of: Model, *, sleeps: bool, shared: bool = False, **how: Any) -> None:
    """Update three times by copies, then by vLLM's loader in an engine that must not copy. shared:
    send GPU memory of the same device. how: as for `running_engine`."""
    model = make(folder, of)
    options: dict[str, Any] = {
        "gpu_memory_utilization": 0.1,
        "sampling": OPEN,
        "time_share": sleeps,
        "kv_cache_gib": CACHE_GIB,
    }
    came: list[dict[str, torch.Tensor]] = []
    held: list[dict[str, str]] = []
    with running_engine(engine_spec(folder, **options), **how) as engine:
        assert BLOCKS[0] <= engine.blocks() <= BLOCKS[1]
        for version in range(1, UPDATES + 1):
            if sleeps and version > 1:
                engine.sleep()
            assert engine.updates() == ([""] if version == 1 else ["copies"])
            came.append(change(model, version))
            # Blocks end within a layer; the last update uses other blocks.
            update = engine.update_in_place if shared else engine.update
            update(version, came[-1], bucket=60_000 if version == UPDATES else 40_000)
            held.append(engine.fingerprint())
            groups = engine.sample(prompts(3, shared=30, own=9, tag=f"u{version}"), group_size=2)
            check_probabilities(model, groups, version)
        assert engine.updates() == ["copies"]
        assert held[0] != held[1] != held[2]
    options |= {"copy_weights": False, "enforce_eager": True}  # compares weights only
    with running_engine(engine_spec(folder, **options), **how) as engine:
        assert BLOCKS[0] <= engine.blocks() <= BLOCKS[1]
        check_against_loader(engine, came, held)


def check_against_loader(
    engine: RemoteEngine, came: Sequence[dict[str, torch.Tensor]], held: Sequence[dict[str, str]]
) -> None:
    """Check that vLLM's loader produces the same weights, update by update."""
    for version, (tensors, fingerprint) in enumerate(zip(came, held, strict=True), UPDATES + 1):
        engine.update(version, tensors)
        assert engine.updates() == [OFF]
        right = engine.fingerprint()
        assert fingerprint.keys() == right.keys()
        wrong = [name for name in right if right[name] != fingerprint[name]]
        assert not wrong, wrong


@torch.no_grad()
def check_probabilities(model: Any, groups: Sequence[Group], version: int) -> None:
    """Check versions and log-probabilities of all sampled tokens against `model`."""
    for group in groups:
        for trajectory in group.trajectories:
            (segment,) = trajectory.segments
            assert set(segment.version_T[segment.trainable_T]) == {version}
            ids = torch.from_numpy(segment.token_ids_T).long()
            logits = model(ids[None]).logits[0].float() / OPEN.temperature
            logp = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            sampled = torch.from_numpy(segment.trainable_T)[1:]
            recorded = torch.from_numpy(segment.logp_old_T).float()[1:]
            assert int(sampled.sum()) > 0
            assert float((logp - recorded)[sampled].abs().max()) < 1e-3
