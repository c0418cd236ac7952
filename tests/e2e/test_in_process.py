"""Commands of Keel, run in this process to save start-up time: mixed recipes, SFT, docs' chains.

The trainer's engine is in this process, and vLLM actors are reused: each command begins by loading
its own weights into them.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from keel.commands.cli import main
from keel.commands.distill import distill
from keel.configs.distillation import DistillConfig
from keel.configs.load import load_as, load_config
from keel.configs.schema import Config, SamplingConfig
from keel.data.dataset import Dataset
from keel.examples.small.__main__ import main as make_tasks
from keel.examples.small.__main__ import make
from keel.model import ray_timeouts
from keel.model.tiny.tokenizer import build_tokenizer, vocab_rows
from keel.rewards.judge.service import JudgeService
from keel.rewards.sandbox.sandbox import IsolationError, open_sandbox
from keel.rl.futures import never_abort
from keel.rl.metrics import Metric, merge
from keel.rl.packing import PackPlan, TrainBatch
from keel.rl.sft import SftExample
from keel.rl.types import ScoredGroup, StepResult, TokenNumbers
from keel.rollout.engine.worker import RayEngine
from keel.rollout.pool import RolloutPool
from keel.rollout.spec import EngineSpec
from keel.trainer import build_agents as agents
from keel.trainer.engine.engine import TrainerEngine
from keel.trainer.launch import (
    Runtime,
    SftRuntime,
    build_scorer,
    initial_model,
    run_episodes,
)
from keel.trainer.learner import plan_batches
from keel.trainer.nonfinite import describe_findings
from keel.trainer.placement.nodes import start_ray, stop_ray
from keel.trainer.prepare import Task
from keel.trainer.run.manifest import Entry, find_damage
from keel.trainer.run.trajectory_files import saved_segments
from keel.weights.channel import Bucket, HostData
from keel.weights.sync import WeightSync
from tests.rewards.judge.judge_server import good, running
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_ray_workers")]


class LocalLearner:
    """`keel.trainer.learner.Learner` without Ray: one rank in this process."""

    def __init__(self, model: str, config: Config) -> None:
        if not torch.cuda.is_available():
            torch.set_num_threads(config.trainer.threads)
        self.engine = TrainerEngine(model, config)
        self._config = config
        self.token_numbers: Mapping[int, TokenNumbers] = {}

    @property
    def version(self) -> int:
        return self.engine.version

    def step(self, groups: Sequence[ScoredGroup]) -> StepResult:
        saved = saved_segments(groups, self._config.run)
        (plans,) = plan_batches(groups, self._config, saved)
        keys = {key for plan in plans for key in plan.recording_refs}
        found = ray_timeouts.fetch([*keys], seconds=PATIENCE_S)
        return self._step([plan.pack(found) for plan in plans], groups)

    def retry_on_oom(self, act: Callable[[Config], StepResult]) -> StepResult:
        return act(self._config)

    def step_on(
        self, plans: Sequence[Sequence[PackPlan]], examples: Sequence[SftExample]
    ) -> StepResult:
        return self._step([plan.pack() for plan in plans[0]], examples)

    def _step(
        self, batches: Sequence[TrainBatch], groups: Sequence[ScoredGroup | SftExample]
    ) -> StepResult:
        metrics = self.engine.step(batches)
        self.token_numbers = self.engine.token_numbers
        return StepResult(
            version=self.version,
            metrics=metrics,
            findings=describe_findings(self.engine.findings, groups),
            gave_up=self.engine.gave_up,
        )

    def evaluate_nll(
        self, plans: Sequence[Mapping[str, PackPlan]], hurry: Callable[[], bool] = never_abort
    ) -> dict[str, Metric]:
        if hurry():
            return {}
        return merge(
            {
                f"{name}/{metric}": value
                for metric, value in self.engine.evaluate_nll(plan.pack()).items()
            }
            for name, plan in (plans[0] if plans else {}).items()
        )

    direct = False

    def put_engines_to_sleep(self) -> None: ...

    def put_weights(self) -> list[ray.ObjectRef[Any]]:
        return [
            ray.put(Bucket(entries=entries, data=HostData(flat.cpu().numpy())))
            for entries, flat in self.engine.buckets(requested=True)
        ]

    def load(self, folder: Path) -> None:
        self.engine.load(folder)

    def save(self, folder: Path) -> dict[str, Entry]:
        return self.engine.save(folder)

    def export(self, folder: Path) -> dict[str, Entry]:
        return self.engine.export(folder)


SHARE = 0.1
"""Share of a GPU that Ray reserves for an engine."""


class Engines:
    def __init__(self) -> None:
        self._pools: dict[EngineSpec, RolloutPool] = {}

    def ready(self, task: Task, model: str, learner: LocalLearner) -> RolloutPool:
        spec = EngineSpec.of(task.config, model)
        kind = kind_of(spec)
        if kind not in self._pools:
            for other in [*self._pools][: -3 if task.gpu else -1]:
                self._pools.pop(other).shutdown()
            options = {"num_gpus": SHARE} if task.gpu else {}
            self._pools[kind] = RolloutPool(
                spec.config,
                partial(RayEngine, spec, gpu=task.gpu, options=lambda _: options),
                startup_timeout_s=task.config.run.startup_timeout_s,
            )
            self._pools[kind].start()
        pool = self._pools[kind]
        WeightSync(learner, pool).push(learner.version).result()
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()
        self._pools.clear()


def kind_of(spec: EngineSpec) -> EngineSpec:
    """Reduce a spec to the fixed properties of an engine: no weights, seed or sampling parameters.
    Sampling seeds are therefore the same in all runs."""
    sampling = SamplingConfig(top_k=spec.config.sampling.top_k)
    config = replace(spec.config, sampling=sampling)
    return replace(spec, model_path="", tokenizer="", seed=0, config=config)


def unwatched() -> dict[str, Any]:
    return {"watchdog": SimpleNamespace(check=lambda: None), "gpus": 0}


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    """Let `keel.commands.cli.main` run `train`, `sft` and `eval` in this process, on a CPU and a
    single Ray cluster. Environments are checked once, not by each command."""
    engines, tried = Engines(), dict[str, dict[str, str]]()

    def check_environments(config: Config, chat: Any, dataset: Dataset) -> dict[str, str]:
        which = repr([source for source in config.data.sources if source.environment.enabled])
        if which not in tried:
            tried[which] = agents.check_environments(config, chat, dataset)
        return tried[which]

    @contextmanager
    def running(task: Task, log: Path | None = None, **_: Any) -> Iterator[Runtime]:
        if not ray.is_initialized():
            start_ray()
        config = task.config
        model = initial_model(config, task.dataset, gpu=task.gpu)
        ranks = LocalLearner(model, config)
        with ExitStack() as stack:
            pool = engines.ready(task, model, ranks)
            asks = config.rewards.judge
            judge = stack.enter_context(JudgeService(asks)) if asks.base_url else None
            scorer = stack.enter_context(build_scorer(config, judge, log))
            runner = stack.enter_context(run_episodes(task, pool))
            parts: Any = {"ranks": ranks, "scorer": scorer, "agents": runner, **unwatched()}
            yield Runtime(task=task, pool=pool, nodes=SimpleNamespace(), **parts)  # type: ignore[arg-type]

    @contextmanager
    def teaching(task: Task, **_: Any) -> Iterator[SftRuntime]:
        model = initial_model(task.recipe, task.dataset, gpu=task.gpu)
        learner = LocalLearner(model, task.config)
        yield SftRuntime(task=task, learner=learner, **unwatched())  # type: ignore[arg-type]

    threads = torch.get_num_threads()
    with (
        patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu"),
        patch("keel.trainer.prepare.check_environments", check_environments),
        patch("keel.commands.train.launch", running),
        patch("keel.commands.sft.launch_sft", teaching),
        patch("keel.commands.evaluate.launch", running),
    ):
        try:
            yield
        finally:
            engines.close()
            if ray.is_initialized():
                stop_ray()
            torch.set_num_threads(threads)


def in_sandboxes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder where environments can run."""
    try:
        open_sandbox("bubblewrap")
    except IsolationError as error:
        pytest.skip(str(error))
    folder.chmod(0o755)  # environments run in it as another user
    monkeypatch.chdir(folder)


HELD = ("general", "search", "interpreter")
AGENTS = (*HELD, "code")
DOMAINS = ("spelling", "spiral", "programs", "chat", *AGENTS)


def test_all_domains_train_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_sandboxes(tmp_path, monkeypatch)
    tasks = tmp_path / "small-tasks"
    assert make(tasks, general=6, search=6, code=1, programs=2, lessons=2, seed=0) == 0
    overrides = [
        f"run.dir={tmp_path / 'run'}",
        f"model.tiny.cache_dir={tmp_path / 'cache'}",
        "rewards.judge.model=m",
        f"rewards.judge.timeout_s={PATIENCE_S}",
        f"rewards.timeout_s={PATIENCE_S}",
        "rewards.code.completion_s=60",
        "rewards.code.time_s=20",
        "model.tiny.cold_start.steps=40",
        "model.tiny.cold_start.batch_size=32",
        "run.steps=2",
        "run.eval_every=2",
        "rollout.engines=1",
        "algorithm.group_size=2",
        "data.sources[general].size=6",
        *(f"data.sources[{name}].size=200" for name in ("spelling", "spiral", "interpreter")),
        *(f"data.sources[{name}].holdout=1" for name in ("spelling", "spiral", *HELD)),
        "data.sources[code].holdout=0",
        "data.sources[chat].budget.max_tokens=5",
    ]
    monkeypatch.setattr("keel.rewards.checks._REFERENCES_S", PATIENCE_S)
    with running(good) as server:
        url = f"rewards.judge.base_url={server.url}"
        status = main(["train", "mixed-agents", url, *overrides])
    output = capsys.readouterr()
    assert status == 0, output.out + output.err
    assert "programs: 12 of 12 " in output.out
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    _, *steps = map(json.loads, lines)
    assert [one["step"] for one in steps] == [1, 2]
    for step in steps:
        # The engine had exactly the trainer's weights, which a step has changed.
        assert step["staleness/mean"] == 0 and step["mismatch/logp_abs"] <= 1e-4
        assert step["routing/fallback_fraction"] == 0 and step["sampling/kept_mean"] >= 1
        assert step["judge/completions"] >= 2 and step["judge/failures"] == 0
        assert step["reward/error"] == step["rollout/dropped_completions"] == 0
        # Every domain is in every step, as the source weights add up to its prompts.
        assert all(f"domain/{domain}/reward_mean" in step for domain in DOMAINS)
        assert all(f"domain/{domain}/calls_mean" in step for domain in AGENTS)
        assert step["domain/chat/length_mean"] <= 5
    assert max(step["agents/calls_mean"] for step in steps) > 0
    assert all(f"eval/{name}/pass@1" in steps[-1] for name in HELD)


PAGE = Path(__file__).parents[2] / "docs/from-base-to-rl.md"
TAUGHT = ["spiral-direct", "programs", "towers"]
"""A reasoning_gym task, a JSONL source, and an agent task."""
TAUGHT_DOMAINS = ("logic", "code", "search-agents")
SMALL = (
    f"data.only={json.dumps(TAUGHT)}",
    "data.sources[spiral-direct].size=40",
    *(f"data.sources[{name}].holdout=2" for name in TAUGHT),
    # Any answer is right, as so young a model knows nothing.
    "data.sources[programs].path=easy.jsonl",
    "data.sources[programs].length={linear: 0.5}",  # makes rewards differ
    "algorithm.group_size=2",
    "rewards.code.completion_s=60",
    "rewards.workers=1",
    f"rewards.timeout_s={PATIENCE_S}",
)
LESSONS = (
    *(f"sft.sources[{n}].size=16" for n in ("sums", "sums-direct", "spiral", "spiral-direct")),
    *(f"sft.sources[{one.name}].holdout=1" for one in load_config("sft-specialists").sft.sources),
    "sft.epochs=0",
    "run.steps=8",
    "trainer.warmup_steps=1",
)
CHAIN = (
    f"specialists=[{{name: all, sources: {json.dumps(TAUGHT)}}}]",
    f"overrides={json.dumps([*SMALL, 'run.steps=1', 'algorithm.prompts_per_step=3'])}",
    "prompts=3",
    "eval_samples=1",
)
FEW = ("run.steps=3", "sft.sources[retrieval].size=200")
MORE: dict[str, Sequence[str]] = {
    "keel pretrain": FEW,
    "keel sft": (*SMALL, *LESSONS),
    "keel distill": CHAIN,
    "keel eval": (*SMALL, "data.only=[programs]"),
    "keel compare": (),
}


def commands_of_page() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_sandboxes(tmp_path, monkeypatch)
    # Different questions, so that none is both held out and trained on.
    easy = [
        {"id": f"{n}", "prompt": f"Say {n}.", "answer": r"[\s\S]*", "match": "regex"}
        for n in range(8)
    ]
    Path("easy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in easy))
    output: dict[str, str] = {}
    pretrained: list[str] = []
    for words in commands_of_page():
        run, name = shrink(words)
        pretrained += words[2:] * (name == "keel pretrain")
        assert run() == 0, capfd.readouterr()
        output[name] = capfd.readouterr().out
    assert sorted(output) == sorted(["python -m keel.examples.small", *MORE])
    assert pretrained == ["pretrain-dense", "pretrain-warm-up", "pretrain-sparse"]
    for before, after in pairwise(pretrained):
        assert load_config(f"runs/{after}/config.yaml").model.path == f"runs/{before}/model"
    warm = lines_of(Path("runs/pretrain-warm-up/metrics.jsonl"))
    assert warm[-1]["indexer/kl"] < warm[1]["indexer/kl"]
    start, root = Path("runs/sft-specialists"), Path("runs/distill-specialists")
    for run, model in (
        ("specialists/all", start),
        ("distilled", start),
        ("mixed", root / "distilled"),
    ):
        assert load_config(root / run / "config.yaml").model.path == str(model / "model")

    learned = lines_of(root / "distilled.jsonl")
    held = {
        line["id"]
        for stage in ("specialist-all", "distilled", "mixed")
        for line in lines_of(root / "eval" / stage / "samples.jsonl")
    }
    assert {line["source"] for line in learned} >= {"programs"} and len(held) == 6
    for line in learned:
        assert line["specialist"] == "all" and line["parts"]["correct"] == 1
        assert line["finish_reason"] == "stop" and line["id"] not in held

    for run in ("specialists/all", "mixed"):
        _, step = lines_of(root / run / "metrics.jsonl")
        assert all(f"domain/{domain}/reward_mean" in step for domain in TAUGHT_DOMAINS)
        assert step["staleness/mean"] == 0 and step["mismatch/logp_abs"] <= 1e-4
        assert step["routing/fallback_fraction"] == 0 and step["rollout/dropped_completions"] == 0
    assert (root / "mixed/model/model.safetensors").exists()

    scores, costs = (root / "report.md").read_text().split("\n\n")
    head, *rows = scores.splitlines()
    assert head.split() == ["specialist", "distilled", "mixed"]
    assert [row.split()[0] for row in rows] == TAUGHT
    names = [row.split()[0] for row in costs.splitlines()[1:]]
    assert names == ["specialists/all", "distilled", "mixed", "together"]
    assert "programs" in output["keel compare"] and "pass@8" in output["keel eval"]


def shrink(words: list[str]) -> tuple[Callable[[], int], str]:
    """Make a small version of a command of the page; returns it with its name."""
    if words[:3] == ["python", "-m", "keel.examples.small"]:
        few = "--general 2 --search 9 --code 1 --programs 2 --lessons 6"
        return lambda: make_tasks([*words[3:], *few.split()]), " ".join(words[:3])
    name = " ".join(words[:2])
    more = MORE[name]
    if name != "keel distill":
        return lambda: main([*words[1:], *more]), name
    config = load_as(DistillConfig, words[2], more)
    return lambda: distill(config, lambda link: main(list(link))), name


TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"x": {}, "y": {}}}}


def conversation(number: int) -> dict[str, Any]:
    call = {"function": {"name": "add", "arguments": {"x": number, "y": 1}}}
    thinking = {"role": "assistant", "content": "", "reasoning_content": "one more"}
    return {
        "messages": [
            {"role": "user", "content": f"What comes after {number}?"},
            {**thinking, "tool_calls": [call]},
            {"role": "tool", "content": str(number + 1)},
            {"role": "assistant", "content": str(number + 1)},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "it was added"},
        ],
        "tools": [TOOL],
    }


def sft_recipe(folder: Path) -> Path:
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps(conversation(i)) + "\n" for i in range(40)))
    chat = {"name": "chats", "source": "jsonl", "path": str(chats), "holdout": 4}
    tiny = {"cache_dir": str(folder / "cache")}
    sections = {
        "run": {"dir": str(folder / "run"), "device": "cpu", "steps": 5, "checkpoint_every": 2},
        "model": {"path": "tiny", "dtype": "float32", "tiny": tiny},
        "sft": {"sources": [chat], "max_context_tokens": 128, "tokens_per_step": 900},
        "trainer": {"lr": 5e-3, "threads": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(sections))
    return path


def steady_metrics(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    varying = ("time", "throughput/")
    return [{k: v for k, v in line.items() if not k.startswith(varying)} for line in lines]


def test_resumed_run_repeats_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = sft_recipe(tmp_path), tmp_path / "run"
    assert main(["sft", str(path)]) == 0, capsys.readouterr()
    first = steady_metrics(folder)
    *_, before, last = sorted((folder / "checkpoints").iterdir())
    assert (before.name, last.name) == ("step_000004", "step_000005")
    original = last.rename(tmp_path / "original")
    assert main(["sft", str(path)]) == 0, capsys.readouterr()
    assert steady_metrics(folder) == first
    assert [line["step"] for line in first] == list(range(6))
    assert first[0]["eval/chats/loss"] == first[0]["eval/loss"] > first[-1]["eval/loss"]
    one, other = (load_file(at / "optimizer" / "rank_0.safetensors") for at in (original, last))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert (folder / "model" / "tokenizer.json").exists()
    assert find_damage(folder / "model", extra=True) == []


IMAGES = pytest.mark.skipif(find_spec("torchvision") is None, reason="no torchvision")


ADAPTERS = ["model.lora.rank=8", "model.lora.targets=[experts, in_proj_qkvz]", "trainer.lr=0.02"]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_next", []),
        ("qwen3_next", ADAPTERS),
        pytest.param("qwen3_5_text", [], marks=IMAGES),
    ],
)
def test_hybrid_model_matches_its_engine(
    tmp_path: Path, family: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = tmp_path / "model", build_tokenizer()
    config = AutoConfig.for_model(
        family, vocab_size=vocab_rows(tokenizer), hidden_size=64, intermediate_size=64,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=2048, initializer_range=0.1, dtype="float32",
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    knobs = [
        *(f"model.path={model}", f"run.dir={tmp_path / 'run'}", "run.steps=2"),
        *("algorithm.prompts_per_step=4", "algorithm.group_size=4", "rollout.engines=1"),
        *("rewards.workers=1", f"rewards.timeout_s={PATIENCE_S}", "rollout.sampling.max_tokens=32"),
        "data.max_prompt_tokens=1024",  # transformers' Qwen3.5 tokenizer splits more finely
        *(f"data.sources[{name}].size=400" for name in ("spelling", "spiral")),
        *(f"data.sources[{name}].holdout=8" for name in ("spelling", "spiral")),
        # All answers are wrong, so only their lengths give a gradient.
        *(f"data.sources[{name}].length.overlong=1" for name in ("spelling", "spiral")),
        *(f"data.sources[{name}].length.margin=32" for name in ("spelling", "spiral")),
        *options,
    ]
    assert main(["train", "quickstart", *knobs]) == 0, capsys.readouterr()
    _, *learned = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert len(learned) == 2 and learned[0]["grad_norm"] > 0
    for step in learned:
        assert step["mismatch/logp_abs"] < 1e-4
        assert step["rollout/dropped_completions"] == 0
        assert step.get("routing/overlap", 1.0) > 0.95
