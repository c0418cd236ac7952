"""One rank: float16 loss scales, LoRA against peft, and teachers of on-policy distillation."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch import Tensor
from transformers import AutoModelForCausalLM

from keel.configs.schema import Config, DataConfig, LoraConfig, SourceConfig
from keel.model import torch_internals
from keel.model.layers import flash4
from keel.rl.futures import done
from keel.rl.metrics import values
from keel.rl.packing import TrainBatch
from keel.rl.types import ScoredGroup
from keel.trainer.engine.deepspeed_internals import check_libraries, loss_scale, set_loss_scale
from keel.trainer.engine.engine import TrainerEngine
from keel.trainer.learner import Learner, TrainerWorker, plan_batches
from keel.trainer.placement.elastic import OomRecovery
from keel.trainer.placement.layouts import _CACHE_FILE
from keel.trainer.rank_calls import RankCalls
from keel.trainer.run.errors import UpdateOutOfMemory
from tests.rl.packed import pack
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.scenarios import (
    TIGHT,
    Ranks,
    Scenario,
    make_config,
    run_all,
    same,
    with_nan,
)

pytestmark = pytest.mark.e2e

DOUBLED = (1, 3)
WINDOW = 3


def test_unknown_libraries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "rebuild_cuda_tensor", lambda device: None)
    with pytest.raises(RuntimeError, match="PyTorch"):
        check_libraries()
    monkeypatch.undo()
    monkeypatch.setattr(deepspeed, "__version__", "1")
    with pytest.raises(RuntimeError, match="DeepSpeed 1 is installed"):
        check_libraries()


@contextmanager
def computing(dtype: torch.dtype) -> Iterator[pytest.MonkeyPatch]:
    """Compute in `dtype`, as on a GPU; DeepSpeed refuses float16 on most CPUs."""
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415

    from keel.trainer.engine import zero  # noqa: PLC0415  (loads DeepSpeed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        patch.setattr(zero, "compute_dtype", lambda *_: dtype)
        yield patch


def one_batch(ranks: Ranks, step: int, config: Config) -> TrainBatch:
    return ranks.batch(Rollouts(step).groups(2, 3), config)


def scaled(ranks: Ranks, scale: float, *, stage: int, lr: float) -> tuple[Any, TrainBatch]:
    config = make_config(
        1,
        stage,
        dtype="float16",
        warmup_steps=0,
        lr=lr,
        weight_decay=0.0,
        beta1=0.0,  # Adam's first moment is the gradient
        grad_clip=100.0,
        offload_optimizer=stage == 2,
    )
    engine: Any = ranks.engine(replace(config, run=replace(config.run, steps=100)))
    engine._engine.optimizer.loss_scaler.cur_scale = scale
    return engine, one_batch(ranks, 0, config)


def at_the_end(ranks: Ranks) -> dict[str, Any]:
    """A bad step between good ones, then bad ones until the run gives up."""
    engine, good = scaled(ranks, 4096.0, stage=2, lr=1e-2)
    bad = with_nan(good)
    first = [values(engine.step([batch])) for batch in (good, bad, good)]
    later: list[dict[str, float]] = []
    while not engine.gave_up and len(later) < 30:
        later.append(values(engine.step([bad])))
    findings = [str(values_) for values_ in engine.findings]
    return {"first": first, "later": later, "gave up": engine.gave_up, "findings": findings}


def doubled(ranks: Ranks, stage: int) -> list[dict[str, float]]:
    """Scale after each step, the reported norm, and the norm of Adam's gradient."""
    engine, batch = scaled(ranks, 256.0, stage=stage, lr=1e-12)
    values_: list[dict[str, float]] = []
    for _ in range(8):
        metrics = values(engine.step([batch]))
        moments = [state["exp_avg"] for state in engine._adam.state.values()]
        taken = sum(float((one**2).sum()) for one in moments) ** 0.5
        scale, norm = metrics["train/loss_scale"], metrics["grad_norm"]
        values_.append({"scale": scale, "norm": norm, "taken": taken})
    return values_


def alone(ranks: Ranks) -> dict[str, Any]:
    from keel.trainer.engine import zero  # noqa: PLC0415  (loads DeepSpeed)

    results: dict[str, Any] = {}
    with computing(torch.float16) as patch:
        results["end"] = at_the_end(ranks)
        patch.setattr(zero, "SCALE_WINDOW", WINDOW)
        results |= {f"doubled {stage}": doubled(ranks, stage) for stage in DOUBLED}
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    write_model(folder / "untied")
    write_model(folder / "dense", "dense")
    write_model(folder / "teacher", "dense", seed=7)
    student = AutoModelForCausalLM.from_pretrained(folder / "dense")
    student.resize_token_embeddings(student.config.vocab_size + 7)
    student.save_pretrained(folder / "padded")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return run_all(folder, __name__)


def test_run_gives_up_at_the_smallest_scale(results: dict[str, Any]) -> None:
    values_ = results["alone"]["end"]
    assert [step["train/loss_scale"] for step in values_["first"]] == [4096, 2048, 2048]
    assert [step["train/skipped_steps"] for step in values_["first"]] == [0, 1, 0]
    assert len(values_["later"]) == 16 and values_["later"][-1]["train/loss_scale"] == 1
    assert "16 optimizer steps" in values_["gave up"] and values_["findings"]


@pytest.mark.parametrize("stage", DOUBLED)
def test_doubled_scale_does_not_halve_the_gradient(results: dict[str, Any], stage: int) -> None:
    steps = results["alone"][f"doubled {stage}"]
    scales = [256] * WINDOW + [512] * WINDOW + [1024] * 2
    assert [step["scale"] for step in steps] == scales
    norms = [step["norm"] for step in steps]
    assert norms == pytest.approx([norms[0]] * 8, rel=1e-2)
    assert [step["taken"] for step in steps] == pytest.approx(norms, rel=1e-2)


def test_loss_scale_is_restored_with_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(scaler: Any) -> Any:
        return SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)  # it logs an overflow
    saved, fresh = (DynamicLossScaler(2.0**16, 100, 1.0, 1, False) for _ in range(2))
    for overflows in (False, True, False):
        saved.update_scale(overflows)
    state = loss_scale(engine(saved))
    assert state["cur_scale"] == 2.0**15 and state["cur_iter"] == 3
    set_loss_scale(engine(fresh), state)
    for _ in range(100):  # doubles within this window
        saved.update_scale(False)
        fresh.update_scale(False)
        assert vars(fresh) == vars(saved)
    assert fresh.loss_scale == 2.0**16
    static = LossScaler(scale=1.0)
    for unscaled in (engine(static), SimpleNamespace(optimizer=SimpleNamespace())):
        assert loss_scale(unscaled) == {}
        set_loss_scale(unscaled, {"cur_scale": 7.0})
    assert static.loss_scale == 1.0


TARGETS = {"dense": ("q_proj", "o_proj", "up_proj"), "untied": ("q_proj", "o_proj", "experts")}


def lora_config(model: str, stage: int) -> Config:
    config = make_config(1, stage, kl_coef=0.1, ref_routing="replay", lr=5e-2)
    lora = LoraConfig(rank=4, alpha=8.0, targets=TARGETS[model])
    return replace(config, model=replace(config.model, lora=lora))


def lora(model: str, stage: int) -> Scenario:
    """Train for three steps, with a checkpoint after the first, and continue from that once."""

    def run(ranks: Ranks) -> dict[str, Any]:
        config = lora_config(model, stage)
        engine = ranks.engine(config, model)

        def step(engine: Any, number: int) -> dict[str, float]:
            groups = Rollouts(number).groups(2, 3, kl_coef=0.1)
            return values(engine.step([ranks.batch(groups, config)]))

        result: dict[str, Any] = {"first": ranks.published(engine), "metrics": [step(engine, 0)]}
        folder = ranks.folder / f"{model} saved"
        folder.mkdir()
        engine.save(folder)
        result["metrics"] += [step(engine, 1), step(engine, 2)]
        engine.export(ranks.folder / f"{model} out")
        again = ranks.engine(config, model)
        again.load(folder)
        step(again, 1)
        step(again, 2)
        return {**result, "last": ranks.published(engine), "resumed": ranks.published(again)}

    return run


LORAS = {"lora dense": lora("dense", 0), "lora untied": lora("untied", 2)}


@pytest.fixture(params=["dense", "untied"])
def trained(
    request: pytest.FixtureRequest, folder: Path, results: dict[str, Any]
) -> tuple[Path, dict[str, Any]]:
    return folder / request.param, results[f"lora {request.param}"]


def logits(model: Any) -> Tensor:
    ids = torch.arange(24)[None] % 60
    with torch.no_grad():
        return model.eval()(ids).logits


def test_exported_models_compute_what_peft_computes(trained: tuple[Path, Any]) -> None:
    from peft import PeftModel  # noqa: PLC0415

    model, _ = trained
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = logits(base)
    merged = AutoModelForCausalLM.from_pretrained(f"{model} out", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, f"{model} out/adapter")
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-5, atol=1e-5)
    assert float((logits(merged) - before).abs().max()) > 0.05
    settings = json.loads(Path(f"{model} out/adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8.0)


def test_engines_get_merged_weights_under_base_names(trained: tuple[Path, Any]) -> None:
    from keel.model.load import checkpoint_tensors, load_policy  # noqa: PLC0415

    model, result = trained
    base = dict(checkpoint_tensors(load_policy(str(model), torch.float32)))
    assert result["first"].keys() == result["last"].keys() == base.keys()
    for name, tensor in base.items():
        assert torch.equal(result["first"][name], tensor), name
        adapted = any(target in name.split(".") for target in TARGETS[model.name])
        assert torch.equal(result["last"][name], tensor) is not adapted, name


def test_lora_resume_is_exact_and_saves_adapters_only(trained: tuple[Path, Any]) -> None:
    model, result = trained
    same(result["resumed"], result["last"], atol=0)
    (rank,) = json.loads(Path(f"{model} saved/optimizer/index.json").read_text())["ranks"]
    assert rank["pieces"] and all("lora_" in name for name, *_ in rank["pieces"])


def test_reference_of_lora_is_the_base_model(trained: tuple[Path, Any]) -> None:
    first, second, third = (metrics["kl/ref"] for metrics in trained[1]["metrics"])
    assert first == 0.0 < second < third


def source(name: str, teacher: str) -> SourceConfig:
    return SourceConfig(
        name=name, source="reasoning_gym", task="chain_sum", size=8, kl_coef=1.0, teacher=teacher
    )


def config_for(teachers: dict[str, str]) -> Config:
    sources = tuple(source(name, teacher) for name, teacher in teachers.items())
    return replace(make_config(1, 0, tokens=TIGHT, lr=1e-2), data=DataConfig(sources=sources))


def in_domain(groups: list[ScoredGroup], domain: str) -> list[ScoredGroup]:
    return [
        replace(g, group=replace(g.group, prompt=replace(g.group.prompt, domain=domain)))
        for g in groups
    ]


def kl_of(ranks: Ranks, teachers: dict[str, str], domains: str) -> float:
    """Return the KL metric of one step on a group of each domain."""
    config, groups = config_for(teachers), list[ScoredGroup]()
    for number, domain in enumerate(domains):
        groups += in_domain(Rollouts(number).groups(1, 4, kl_coef=1.0), domain)
    ((plan,),) = plan_batches(groups, config)
    return values(ranks.engine(config, "dense").step([plan.pack()]))["kl/ref"]


def compared(ranks: Ranks) -> dict[str, float]:
    names = {"a": "teacher", "b": "dense", "d": "padded"}
    teachers = {domain: str(ranks.folder / name) for domain, name in names.items()} | {"c": ""}
    return {
        **{domains: kl_of(ranks, teachers, domains) for domains in ("a", "b", "c", "d", "abc")},
        "alone": kl_of(ranks, {"a": teachers["a"]}, "a"),
    }


def test_each_domain_is_compared_with_its_teacher(results: dict[str, Any]) -> None:
    kl = results["compared"]
    assert kl["a"] == kl["alone"] > 1e-3
    assert kl["b"] == kl["c"] == 0.0, "the student itself, as a teacher and as the initial model"
    assert 0 < kl["d"] < kl["a"], (kl, "only unmasked tokens see rows beyond the student's ids")
    assert 0 < kl["abc"] < kl["a"]


def test_teachers_of_untrained_domains_are_not_loaded() -> None:
    config = config_for({"a": "t", "b": "u"})
    sources = tuple(replace(each, holdout=2) for each in config.data.sources)
    config = replace(config, data=replace(config.data, sources=sources, train_on=("b",)))
    assert config.data.references == ("", "u")
    groups = in_domain(Rollouts(0).groups(1, 3, kl_coef=1.0), "b")
    ((plan,),) = plan_batches(groups, config)
    kinds = [micro.reference_S for micro in plan.pack().micro_batches]
    assert all(kind is not None and set(kind) == {1} for kind in kinds)


def test_packing_keeps_references() -> None:
    groups: list[Any] = []
    for number, domain in enumerate(("a", "b")):
        groups += in_domain(Rollouts(number).groups(1, 3), domain)
    options: dict[str, Any] = {"replicas": 1, "micro_batch_tokens": 4096}
    (batch,) = pack(groups, references={"a": 0, "b": 2}, **options)
    (micro,) = batch.micro_batches
    assert micro.reference_S is not None and sorted(micro.reference_S) == [0, 0, 0, 2, 2, 2]
    (plain,) = pack(groups, **options)
    assert plain.micro_batches[0].reference_S is None


SCENARIOS = {1: {"alone": alone, **LORAS, "compared": compared}}


STEPS = 3


class LocalCalls(RankCalls):
    """Calls a rank in this process."""

    def call_replicas(self, method: str, inputs: Sequence[Any], what: str) -> list[Any]:
        return [getattr(self.actors[0], method)(inputs[0])]

    def call_timed(
        self, method: str, arguments: Sequence[Any], what: str, steps: int = 1
    ) -> list[Any]:
        return [getattr(self.actors[0], method)(*arguments[0])]

    def call_all(self, method: str, *arguments: object, deadline: object) -> list[Any]:
        return [getattr(self.actors[0], method)(*arguments)]


class Local(Learner):
    """A learner with one rank in this process."""

    def __init__(
        self, model: Path, config: Config, oom_recovery: OomRecovery | None = None
    ) -> None:
        self._config, self._put_to_sleep, self._oom_recovery = config, done, oom_recovery
        self.worker = TrainerWorker(0, str(model), config, gpu=False)
        self.worker._engine = TrainerEngine(str(model), config)
        self._ranks = LocalCalls([self.worker], config, direct=False)

    def weights(self) -> dict[str, torch.Tensor]:
        module = self.worker.engine._network
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_packed_step_needs_packed_batches() -> None:
    with pytest.raises(ValueError, match="call `pack` first"):
        TrainerWorker(0, "model", make_config(1, 0), gpu=False).step()


def short(config: Config) -> Config:
    """Limit contexts to 24 tokens."""
    sampling = replace(config.rollout.sampling, max_tokens=12)
    return replace(
        config,
        data=replace(config.data, max_prompt_tokens=12),
        rollout=replace(config.rollout, sampling=sampling),
    )


def test_step_is_repeated_in_smaller_micro_batches(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = short(make_config(1, 0, tokens=96, kl_coef=0.1))
    groups = [Rollouts(step).groups(4, 3) for step in range(STEPS)]
    half = replace(roomy, trainer=replace(roomy.trainer, micro_batch_tokens=48))
    straight = Local(folder / "untied", half)
    expected = [straight.step(each) for each in groups]
    calls, accumulate = count(), TrainerEngine._forward_backward

    def tight(self: TrainerEngine, *arguments: Any, **options: Any) -> Any:
        result = accumulate(self, *arguments, **options)
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result

    monkeypatch.setattr(TrainerEngine, "_forward_backward", tight)
    saved, output = tmp_path / _CACHE_FILE, list[str]()
    saved.write_text('{"values": {"trainer.micro_batch_tokens": 96}, "hardware": {}}')
    learner = Local(folder / "untied", roomy, OomRecovery(config=roomy, folder=tmp_path))
    learner.say = lambda kind, text: output.append(text)
    for number, (each, other) in enumerate(zip(groups, expected, strict=True)):
        metrics = values(learner.step(each).metrics)
        assert metrics.pop("train/out_of_memory", None) == (None if number else 1)
        assert metrics == values(other.metrics)
    assert learner.version == STEPS and len(output) == 1
    weights, reference = learner.weights(), straight.weights()
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference.items())
    # A resumed run uses it, too.
    assert json.loads(saved.read_text())["values"] == {"trainer.micro_batch_tokens": 48}


def test_out_of_memory_update_is_not_retried(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(make_config(1, 1, tokens=96))
    output, recovery = list[str](), OomRecovery(config=config, folder=tmp_path)
    learner = Local(folder / "untied", config, recovery)
    learner.say = lambda kind, text: output.append(text)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.50 GiB.")

    monkeypatch.setattr(learner.worker.engine._engine, "step", full)
    with pytest.raises(UpdateOutOfMemory, match=r"30\.50 GiB.*offload_optimizer: true"):
        learner.step(Rollouts(0).groups(4, 3))
    assert not output and recovery.config is config


def test_engines_without_flash4_restore_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from keel.trainer.engine import zero  # noqa: PLC0415  (loads DeepSpeed)

    removed: list[bool] = []
    handle = SimpleNamespace(remove=lambda: removed.append(True))
    monkeypatch.setattr(flash4, "_ACTIVE", [handle])  # of an earlier engine in this process
    model: Any = None
    assert zero.use_flash4(make_config(1, 1), model, torch.device("cpu")) == ""
    assert removed == [True] and not flash4._ACTIVE
