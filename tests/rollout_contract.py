"""The contract of a recorder, for `tests/e2e` (V1 runner, CPU) and `tests/gpu` (native recorder).

A tiny random mixture of experts is sampled by the engine in a process of its own, and transformers
says in float32 what should have been recorded.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from configs.schema import RolloutConfig, SamplingConfig
from model.weights import pack_buckets
from rl.types import Group, Prompt, Trajectory
from rollout.engine import Engine
from rollout.spec import EngineSpec, environment
from tests import interpreted

DENSE_LAYER = 1
END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
DEADLINE_S = 240
Kind = Literal["", "short", "native", "packed"]
Item = tuple[Prompt, int, SamplingConfig | None, bool]
"""A prompt, its group size, its sampling (None: the engine's) and whether to record."""


def make_model(folder: Path, *, seed: int = 0) -> Qwen3MoeForCausalLM:
    """Four layers, one of them dense, with a byte tokenizer; saved to `folder`.

    Wide initial weights and a scaled-up head make the distributions peaked, as trained ones are.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((END, "<|im_start|>", *alphabet))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(vocab),
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=4,
            mlp_only_layers=[DENSE_LAYER],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=512,
            initializer_range=0.2,
            tie_word_embeddings=False,
            eos_token_id=0,
            dtype="float32",
        )
    ).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(folder)
    return model


def engine_spec(folder: Path, **changes: Any) -> EngineSpec:
    """Chunks of 48 tokens, and a cache that overflows with more than a few sequences."""
    config = {
        "sampling": TRUNCATED,
        "max_concurrent": 16,
        "max_batched_tokens": 48,
        "kv_cache_gib": 20 * 64 / 2**20,  # 20 blocks of 32 tokens, 2 KiB a token
        "deadline_s": DEADLINE_S,
        **changes,
    }
    return EngineSpec(
        model_path=str(folder),
        tokenizer=str(folder),
        config=RolloutConfig(**config),
        dtype="float32",
        max_model_len=256,
        seed=3,
        keep_routing=True,
        keep_sampling_mask=True,
    )


TRUNCATED = SamplingConfig(temperature=0.8, top_p=0.9, top_k=12, max_tokens=40)
OPEN = SamplingConfig(temperature=1.3, max_tokens=24)


def prompts(count: int, *, shared: int, own: int, tag: str = "p") -> list[Prompt]:
    """`shared` characters in common (a prefix for the cache), then `own` different ones."""
    common = ("The quick brown fox jumps over the lazy dog. " * 9)[:shared]
    return [
        Prompt(
            prompt_id=f"{tag}{i}",
            domain="test",
            messages=({"role": "user", "content": common + (f"{tag}{i}:" + "ab cd" * own)[:own]},),
        )
        for i in range(count)
    ]


# In the engine's process.


@dataclass
class Watch:
    """What really happened, so that a test of preemption has preempted something."""

    preempted: int = 0
    cached_tokens: int = 0
    thrown_away: int = 0
    """Tokens drawn from unfinished prefills."""
    steps: int = 0
    short_steps: int = 0
    """Steps that `rollout.scheduler` did by itself, since the engine was started."""


_ENGINE: Any = None
_WATCH = Watch()


def _start(spec: EngineSpec, without: str, blocks: int | None, kind: Kind) -> tuple[str, ...]:
    global _ENGINE
    if kind in ("native", "packed"):
        interpreted.install(kind)
    # vLLM stays out of pytest's process.
    from rollout import sampler, shims  # noqa: PLC0415
    from rollout.scheduler import ShortScheduler  # noqa: PLC0415

    if without:
        setattr(shims, without, lambda: False)

    class Watched(sampler.Sampler):
        def __init__(self, spec: EngineSpec) -> None:
            super().__init__(spec)
            scheduler = self._llm.engine_core.engine_core.scheduler
            preempt, step = scheduler._preempt_request, self._llm.step

            def counted_preempt(*args: Any, **kwargs: Any) -> None:
                _WATCH.preempted += 1
                preempt(*args, **kwargs)

            def counted_step() -> Any:
                outputs = step()
                _WATCH.steps += 1
                _WATCH.short_steps = getattr(scheduler, "short_steps", 0)
                _WATCH.cached_tokens += sum(output.num_cached_tokens or 0 for output in outputs)
                waiting = [r for r in scheduler.running if r.num_computed_tokens < r.num_tokens - 1]
                _WATCH.thrown_away += len(waiting)
                return outputs

            scheduler._preempt_request, self._llm.step = counted_preempt, counted_step

    arguments = sampler._engine_args

    def few_blocks(*args: Any) -> Any:
        built = arguments(*args)
        built.num_gpu_blocks_override = blocks
        if kind == "short":
            built.scheduler_cls = ShortScheduler
        return built

    sampler._engine_args = few_blocks
    _ENGINE = Engine(lambda: Watched(spec), spec.config)
    return shims.install()


def _submitted(items: Sequence[Item]) -> list[Future[Group]]:
    return [
        _ENGINE.submit(prompt, group_size=size, sampling=sampling, record=record)
        for prompt, size, sampling, record in items
    ]


def _sample(items: Sequence[Item]) -> list[Group]:
    return [future.result(timeout=DEADLINE_S) for future in _submitted(items)]


def _cancel(items: Sequence[Item]) -> int:
    return sum(future.cancel() for future in _submitted(items))


def _update(version: int, buckets: Sequence[Any]) -> None:
    _ENGINE.update_weights(version, buckets)


def _sample_across(items: Sequence[Item], version: int, buckets: Sequence[Any]) -> list[Group]:
    """New weights come after some twenty steps."""
    first, futures = _WATCH.steps, _submitted(items)
    until = time.monotonic() + DEADLINE_S
    while _WATCH.steps < first + 20:
        assert time.monotonic() < until
        time.sleep(0.001)
    _update(version, buckets)
    return [future.result(timeout=DEADLINE_S) for future in futures]


def _stats() -> dict[str, float]:
    return _ENGINE.stats()


def _take_watch() -> Watch:
    global _WATCH
    watch, _WATCH = _WATCH, Watch(short_steps=_WATCH.short_steps)
    return watch


# In the test's process.


@dataclass(frozen=True)
class RemoteEngine:
    """An engine in another process."""

    process: ProcessPoolExecutor
    shims: tuple[str, ...]

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int = 1,
        sampling: SamplingConfig | None = None,
        record: bool = True,
    ) -> list[Group]:
        return self.sample_items([(prompt, group_size, sampling, record) for prompt in prompts])

    def sample_items(self, items: Sequence[Item]) -> list[Group]:
        """All at once."""
        return self.process.submit(_sample, items).result(timeout=DEADLINE_S)

    def cancel(self, prompts: Sequence[Prompt], group_size: int) -> int:
        items = [(prompt, group_size, None, True) for prompt in prompts]
        return self.process.submit(_cancel, items).result(timeout=DEADLINE_S)

    def update(self, version: int, tensors: dict[str, torch.Tensor], bucket: int = 40_000) -> None:
        buckets = list(pack_buckets(tensors.items(), bucket))
        self.process.submit(_update, version, buckets).result(timeout=DEADLINE_S)

    def sample_across_update(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        version: int,
        tensors: dict[str, torch.Tensor],
    ) -> list[Group]:
        """New weights come while the answers are being sampled."""
        items = [(prompt, group_size, None, True) for prompt in prompts]
        buckets = list(pack_buckets(tensors.items(), 40_000))
        done = self.process.submit(_sample_across, items, version, buckets)
        return done.result(timeout=DEADLINE_S)

    def stats(self) -> dict[str, float]:
        return self.process.submit(_stats).result(timeout=DEADLINE_S)

    def watch(self) -> Watch:
        """What happened since the last call."""
        return self.process.submit(_take_watch).result(timeout=DEADLINE_S)


@contextmanager
def running_engine(
    spec: EngineSpec,
    *,
    gpu: bool,
    without: str = "",
    blocks: int | None = None,
    variables: Mapping[str, str] | None = None,
    kind: Kind = "",
) -> Iterator[RemoteEngine]:
    """An engine in a process of its own.

    `without` names a shim to leave out, `blocks` bounds the KV cache (on a GPU), `variables` are
    added to the environment. On a CPU, `kind` may be "short" (the V1 recorder with the scheduler
    of the packed one) or the name of a recorder for GPUs, whose kernels are then interpreted.
    """
    saved = dict(os.environ)
    # Read by torch and vLLM when they are imported there.
    special = interpreted.ENVIRONMENT if kind in ("native", "packed") else {}
    os.environ.update(environment(spec.config, gpu=gpu) | dict(variables or {}) | special)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as process:
        started = process.submit(_start, spec, without, blocks, kind)
        os.environ.clear()
        os.environ.update(saved)
        yield RemoteEngine(process, started.result(timeout=DEADLINE_S))


@dataclass(frozen=True)
class Tolerance:
    logp: float = 1e-4
    tie: float = 1e-5
    """Scores or probabilities this near to each other may be ordered either way."""
    rare: float = 2e-3
    """Largest share of decisions that may be such ties."""


@dataclass
class Report:
    """Decisions compared, and those that were ties."""

    routes: int = 0
    route_ties: int = 0
    kept: int = 0
    kept_ties: int = 0
    tokens: int = 0
    kept_sizes: list[int] = field(default_factory=list)

    def assert_rare(self, tolerance: Tolerance) -> None:
        assert self.tokens > 0
        assert self.route_ties <= tolerance.rare * self.routes, self
        assert self.kept_ties <= max(1, tolerance.rare * self.kept), self


class Reference:
    """transformers in float32, one trajectory at a time."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self.model = model
        self.older: dict[int, Qwen3MoeForCausalLM] = {}
        """Earlier versions of the model, oldest first."""
        self.scores: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(model.model.layers):
            if index != DENSE_LAYER:
                layer.mlp.gate.register_forward_hook(
                    lambda gate, args, output, index=index: self._routed(index, gate, args)
                )

    def _routed(self, layer: int, gate: Any, args: Any) -> None:
        hidden = args[0].detach().reshape(-1, gate.weight.shape[1])
        self.scores[layer] = (hidden @ gate.weight.T).softmax(-1)

    @torch.no_grad()
    def check(
        self,
        trajectory: Trajectory,
        sampling: SamplingConfig,
        report: Report,
        tolerance: Tolerance,
    ) -> None:
        """Every token's kept set and log-probability, under the weights that sampled it, and the
        routes of every token under those that sampled the next (in the prompt: the first)."""
        (segment,) = trajectory.segments
        ids = torch.from_numpy(segment.token_ids_T).long()
        first = int(np.argmax(segment.trainable_T))
        versions = segment.version_T[first:]
        used = {v: self.older.get(v, self.model) for v in sorted(set(versions.tolist()))}
        by_version: dict[int, torch.Tensor] = {}
        assert segment.routes_TLK is not None and (segment.routes_TLK[-1] == -1).all()
        next_version = np.append(segment.version_T[1:], -1)
        next_version[: first - 1] = versions[0]
        for version, model in used.items():
            by_version[version] = model(ids[None]).logits[0].float()
            rows = np.flatnonzero(next_version == version)
            self._check_routes(segment.routes_TLK, rows, report, tolerance)
        scaled = torch.stack(
            [
                by_version[int(v)][first - 1 + i] / sampling.temperature
                for i, v in enumerate(versions)
            ]
        )
        for token, row in enumerate(scaled, start=first):
            kept = None
            if sampling.truncated:
                assert segment.kept is not None
                kept = torch.from_numpy(segment.kept[token]).long()
                self._check_kept(row, kept, sampling, report, tolerance)
            support = row if kept is None else row[kept]
            expected = float(row[ids[token]] - support.logsumexp(-1))
            assert abs(expected - segment.logp_old_T[token]) < tolerance.logp, (token, expected)
            report.tokens += 1
        if not sampling.truncated:
            assert segment.kept is None

    def _check_routes(
        self, routes: np.ndarray, rows: np.ndarray, report: Report, tolerance: Tolerance
    ) -> None:
        """`rows` of the routes, against the model that ran last."""
        assert routes.shape[1] == len(self.scores)
        for row, layer in enumerate(sorted(self.scores)):
            scores = self.scores[layer][torch.from_numpy(rows)]
            recorded = torch.from_numpy(routes[rows, row].astype(np.int64))
            assert (recorded >= 0).all()
            width = recorded.shape[1]
            ranked = scores.topk(width + 1)
            same = (recorded.sort(-1).values == ranked.indices[:, :width].sort(-1).values).all(-1)
            tied = ranked.values[:, width - 1] - ranked.values[:, width] < tolerance.tie
            assert (same | tied).all(), f"layer {layer}: {int((~same & ~tied).sum())} wrong routes"
            report.routes += len(same)
            report.route_ties += int((~same).sum())

    @staticmethod
    def _check_kept(
        row: torch.Tensor,
        kept: torch.Tensor,
        sampling: SamplingConfig,
        report: Report,
        tolerance: Tolerance,
    ) -> None:
        report.kept += 1
        report.kept_sizes.append(len(kept))
        exact = _truncate(row, sampling.top_k, sampling.top_p, 0.0)
        recorded = torch.zeros_like(exact)
        recorded[kept] = True
        if (recorded != exact).any():
            report.kept_ties += 1
            least = _truncate(row, sampling.top_k, sampling.top_p, -tolerance.tie)
            most = _truncate(row, sampling.top_k, sampling.top_p, tolerance.tie)
            assert (recorded | ~least).all() and (most | ~recorded).all(), "wrong kept set"


def _truncate(row: torch.Tensor, top_k: int, top_p: float, slack: float) -> torch.Tensor:
    """Which ids survive top-k and then top-p; `slack` widens (or narrows) both borders."""
    if top_k:
        row = row.masked_fill(row < row.topk(top_k).values[-1] - slack, -torch.inf)
    if top_p == 1:
        return row.isfinite()
    ranked, order = row.sort(descending=True)
    share = ranked.softmax(-1)
    before = share.cumsum(-1) - share
    kept = torch.zeros_like(row, dtype=torch.bool)
    kept[order] = (before < top_p + slack) & ranked.isfinite()
    return kept


def check_groups(
    groups: Sequence[Group],
    reference: Reference,
    sampling: SamplingConfig,
    tolerance: Tolerance,
) -> Report:
    """Every trajectory of every group; ties must be rare."""
    report = Report()
    for group in groups:
        assert not group.dropped
        for trajectory in group.trajectories:
            reference.check(trajectory, sampling, report, tolerance)
    report.assert_rare(tolerance)
    return report


def perturbed(model: Qwen3MoeForCausalLM, *, seed: int) -> dict[str, torch.Tensor]:
    """New weights under checkpoint names; `model` takes them on as well."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * parameter.std() * noise)
    return checkpoint_tensors(model)


def checkpoint_tensors(model: Qwen3MoeForCausalLM) -> dict[str, torch.Tensor]:
    """One tensor for each expert, as `save_pretrained` names them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        stem, _, leaf = name.rpartition(".experts.")
        if not stem:
            tensors[name] = parameter.detach().clone()
            continue
        for expert, weight in enumerate(parameter.detach().clone()):
            if leaf == "down_proj":
                tensors[f"{stem}.experts.{expert}.down_proj.weight"] = weight
            else:
                gate, up = weight.chunk(2)
                tensors[f"{stem}.experts.{expert}.gate_proj.weight"] = gate
                tensors[f"{stem}.experts.{expert}.up_proj.weight"] = up
    return tensors


class RecorderContract:
    """The tests themselves, of an engine that keeps sampling masks.

    A subclass brings the fixtures `reference`, `engine`, `tolerance` and `open_engine` (for
    untruncated sampling). The updates of the weights come last, and the last one breaks the engine.
    """

    def check(
        self,
        groups: Sequence[Group],
        reference: Reference,
        tolerance: Tolerance,
        sampling: SamplingConfig = TRUNCATED,
    ) -> Report:
        report = check_groups(groups, reference, sampling, tolerance)
        lengths = [t.sampled_tokens for group in groups for t in group.trajectories]
        assert max(lengths) > 4, f"answers too short to show anything: {lengths}"
        return report

    def test_truncated_sampling(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        groups = engine.sample(prompts(3, shared=10, own=7, tag="t"), group_size=4)
        report = self.check(groups, reference, tolerance)
        assert 1 < np.mean(report.kept_sizes) < TRUNCATED.top_k
        answers = [trajectory.messages[0]["raw"] for trajectory in groups[0].trajectories]
        assert len(set(answers)) > 1, "siblings share a seed"
        assert [t.sibling for t in groups[0].trajectories] == [0, 1, 2, 3]
        assert {v for t in groups[0].trajectories for v in t.segments[0].version_T} == {-1, 0}

    def test_untruncated_sampling(
        self, open_engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        groups = open_engine.sample(prompts(2, shared=0, own=9, tag="o"), 3, OPEN)
        self.check(groups, reference, tolerance, OPEN)

    def test_chunked_prefill(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        engine.watch()
        groups = engine.sample(prompts(4, shared=0, own=120, tag="c"), group_size=1)
        self.check(groups, reference, tolerance)
        assert engine.watch().thrown_away > 0, "no prompt was prefilled in chunks"

    def test_prefix_cache_hits(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        engine.sample(prompts(1, shared=70, own=5, tag="h"))
        engine.watch()
        groups = engine.sample(prompts(3, shared=70, own=9, tag="i"), group_size=2)
        self.check(groups, reference, tolerance)
        assert engine.watch().cached_tokens >= 3 * 64, "nothing came from the prefix cache"

    def test_preemption(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        engine.watch()
        groups = engine.sample(prompts(6, shared=0, own=60, tag="x"), group_size=4)
        self.check(groups, reference, tolerance)
        assert engine.watch().preempted > 0, "nothing was preempted"

    def test_stop_strings(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        heard = engine.sample(prompts(2, shared=0, own=12, tag="s"), group_size=4)
        texts = [t.messages[0]["raw"] for group in heard for t in group.trajectories]
        pairs = (text[i : i + 2] for text in texts for i in range(4, len(text) - 1))
        word = next(pair for pair in pairs if pair.isascii() and pair.isprintable())
        sampling = SamplingConfig(temperature=0.8, top_p=0.9, top_k=12, max_tokens=40, stop=(word,))
        groups = engine.sample(prompts(2, shared=0, own=12, tag="s"), 4, sampling)
        self.check(groups, reference, tolerance)
        stopped = [
            trajectory.messages[0]["raw"]
            for group in groups
            for trajectory in group.trajectories
            if trajectory.messages[0]["raw"].endswith(word)
        ]
        assert stopped, "no answer was stopped"
        assert all(word not in text[: -len(word)] for text in stopped)

    def test_the_same_seeds_give_the_same_answers_however_prompts_are_batched(
        self, engine: RemoteEngine
    ) -> None:
        asked = prompts(3, shared=0, own=100, tag="d")
        together = engine.sample(asked, group_size=2)
        alone = [engine.sample([prompt], group_size=2)[0] for prompt in asked]
        same = [
            np.array_equal(a.segments[0].token_ids_T, b.segments[0].token_ids_T)
            for one, other in zip(together, alone, strict=True)
            for a, b in zip(one.trajectories, other.trajectories, strict=True)
        ]
        assert np.mean(same) > 0.8  # float noise may turn a draw

    def test_evaluation_records_log_probabilities_alone(self, engine: RemoteEngine) -> None:
        (group,) = engine.sample(prompts(1, shared=0, own=9, tag="e"), 2, OPEN, record=False)
        for trajectory in group.trajectories:
            (segment,) = trajectory.segments
            assert segment.routes_TLK is None and segment.kept is None
            assert (segment.logp_old_T[segment.trainable_T] < 0).any()

    def test_nothing_is_left_behind(self, engine: RemoteEngine) -> None:
        engine.sample(prompts(2, shared=0, own=9, tag="l"), group_size=2)
        assert engine.cancel(prompts(4, shared=0, own=60, tag="m"), group_size=4) > 0
        engine.sample(prompts(1, shared=0, own=9, tag="n"))
        stats = engine.stats()
        assert stats["groups"] == 0 and stats["recordings"] == 0

    def test_a_prompt_that_does_not_fit_is_named(self, engine: RemoteEngine) -> None:
        with pytest.raises(
            ValueError, match=r"prompt long0: .* exceed the engine's context of 256"
        ):
            engine.sample(prompts(1, shared=0, own=240, tag="long"))

    def test_weights_change_while_answers_are_sampled(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        asked = prompts(5, shared=40, own=9, tag="f")
        reference.older[0] = copy.deepcopy(reference.model)
        tensors = perturbed(reference.model, seed=2)
        engine.watch()
        groups = engine.sample_across_update(asked, 3, 4, tensors)
        self.check(groups, reference, tolerance)
        spans = [set(t.segments[0].version_T.tolist()) for g in groups for t in g.trajectories]
        assert sum(span == {-1, 0, 4} for span in spans) > len(spans) // 3, spans
        assert engine.watch().preempted > 0, "no keys and values were computed again"
        stats = engine.stats()
        assert stats["groups"] == 0 and stats["recordings"] == 0

    def test_weight_update(
        self, engine: RemoteEngine, reference: Reference, tolerance: Tolerance
    ) -> None:
        asked = prompts(3, shared=70, own=9, tag="u")
        before = engine.sample(asked, group_size=2)
        self.check(before, reference, tolerance)
        engine.update(5, perturbed(reference.model, seed=1))
        engine.watch()
        groups = engine.sample(asked, group_size=2)
        self.check(groups, reference, tolerance)
        assert {t.segments[0].version_T[-1] for group in groups for t in group.trajectories} == {5}

    def test_wrong_weights_are_refused_by_name(
        self, engine: RemoteEngine, reference: Reference
    ) -> None:
        tensors = checkpoint_tensors(reference.model)
        name = "model.layers.2.mlp.experts.3.up_proj.weight"
        with pytest.raises(ValueError, match=f"no tensor '{name}x'"):
            engine.update(6, {**tensors, f"{name}x": tensors[name]})
        with pytest.raises(RuntimeError, match=r"prompt w0: .* weights"):
            engine.sample(prompts(1, shared=0, own=9, tag="w"))
