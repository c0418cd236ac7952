"""The loop of supervised training on fakes, and the preparation of `keel sft` and `pretrain`."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError
from keel.data.stream import Stream
from keel.model.load import load_model_config
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.metrics import Mean, Metric, Sum, values
from keel.rl.packing import PackPlan
from keel.rl.sft import SftExample, supervised_segment
from keel.rl.types import StepResult
from keel.trainer import sft
from keel.trainer.prepare import Task, _text_encoder, prepare
from keel.trainer.run.checkpoint import State, save
from tests.model.families import build
from tests.trainer.placement.shapes import machine


def lessons(*lengths: int) -> list[SftExample]:
    segments = [
        supervised_segment("c", list(range(length)), [False, *[True] * (length - 1)])
        for length in lengths
    ]
    return [SftExample(prompt_id=f"c{n}", segments=(one,)) for n, one in enumerate(segments)]


def stream(examples: Sequence[SftExample]) -> Stream[SftExample]:
    return Stream(
        {"s": examples}, weights={"s": 1.0}, seed=0, content=lambda lesson: lesson.prompt_id
    )


def config_of(**knobs: Any) -> Config:
    overrides = [f"{name}={value}" for name, value in {"sft.epochs": 0, **knobs}.items()]
    return load_config("sft-quickstart", ["run.steps=6", *overrides]).supervised()


class Ranks:
    """Records trained examples."""

    def __init__(self, config: Config) -> None:
        self.config, self.version = config, 0
        self.learned: list[list[int]] = []
        """Tokens of each step's conversations."""

    def retry_on_oom(self, act: Callable[[Config], StepResult]) -> StepResult:
        return act(self.config)

    def step_on(
        self, plans: Sequence[Sequence[PackPlan]], lessons: Sequence[SftExample], /
    ) -> StepResult:
        batches = [plan.pack() for own in plans for plan in own]
        rows = [row for batch in batches for row in batch.micro_batches]
        self.learned.append(sorted(int(n) + 1 for row in rows for n in row.sequence_tokens_S))
        self.version += 1
        return StepResult(version=self.version, metrics={"loss": Sum(1.0)})

    def evaluate_nll(
        self, plans: Sequence[Mapping[str, PackPlan]], hurry: Callable[[], bool], /
    ) -> dict[str, Metric]:
        return {f"{name}/nll": Mean(4.0 - self.version, 2) for name in plans[0]}


class Run:
    """A run that records its output."""

    def __init__(
        self,
        examples: Sequence[SftExample],
        config: Config,
        heldout: Mapping[str, Sequence[SftExample]],
        *,
        stop_after: int = 99,
    ) -> None:
        self.ranks, self.config, self.stop_after = Ranks(config), config, stop_after
        self.batches = sft.Batches(
            stream(examples), config.sft, epoch=len(examples), heldout=heldout
        )
        self.steps: dict[int, dict[str, float]] = {}
        self.saved: dict[int, Mapping[str, Any]] = {}

    def begin(self, activity: str) -> None: ...
    def show_progress(self, done: int, total: int, unit: str) -> None: ...

    def record(self, step: int, metrics: Mapping[str, Metric], *_: object) -> None:
        self.steps[step] = {**self.steps.get(step, {}), **values(metrics)}

    def evaluated(self, step: int) -> bool:
        return any(name.startswith("eval/") for name in self.steps.get(step, {}))

    def save(self, step: int, position: Mapping[str, Any]) -> bool:
        self.saved[step] = json.loads(json.dumps(position))
        return True

    def fit(self, *, start: int = 0) -> int:
        return sft.fit(
            self.config,
            batches=self.batches,
            learner=self.ranks,
            journal=self,
            save=self.save,
            should_stop=lambda: len(self.steps) > self.stop_after,
            say=print,
            should_abort=lambda: False,
            start=start,
        )


def test_run_evaluates_and_reports() -> None:
    config = config_of(**{"sft.conversations_per_step": 4})
    run = Run(lessons(*range(3, 13)), config, {"h": lessons(5)})
    assert run.fit() == 6
    assert [len(step) for step in run.ranks.learned] == [4] * 6
    assert list(run.steps) == list(range(7)) and list(run.saved) == [6]
    losses = [found.get("eval/h/loss") for found in run.steps.values()]
    assert losses == [2.0, *[None] * 5, -1.0], "before the first step and after the last"
    last = run.steps[6]
    assert last["sft/epochs"] == 2.4 and last["sft/conversations"] == 4
    assert last["sft/tokens"] == sum(run.ranks.learned[-1])
    assert last["sft/learned_tokens"] == last["sft/tokens"] - 4
    assert last["sft/packed"] == last["sft/tokens"] / run.config.trainer.micro_batch_tokens


@pytest.mark.parametrize(
    ("knobs", "steps"), [((4, 0, 3), 8), ((4, 25, 3), 12), ((64, 0, 1), 1), ((64, 0, 0.25), 1)]
)
def test_epochs_become_steps(knobs: tuple[int, int, float], steps: int) -> None:
    """3 × 10 conversations in batches of four; 225 tokens in batches of at most 25; and less than
    one batch."""
    examples, (each, tokens, epochs) = lessons(*range(3, 13)), knobs
    sizes = {"sft.conversations_per_step": each, "sft.tokens_per_step": tokens}
    config = config_of(**sizes, **{"sft.epochs": epochs})
    batches = sft.Batches(stream(examples), config.sft, epoch=10, heldout={})
    assert batches.steps_of(epochs) == steps
    assert batches.epochs == 0, "it stays where it is"
    drawn = [lesson.prompt_id for _ in range(steps) for lesson in batches.take()]
    assert len(drawn) == math.ceil(10 * epochs)
    assert set(Counter(drawn).values()) == {max(1, int(epochs))}
    assert batches.passes(steps) == epochs
    assert len(batches.take()) > 0, "a run that goes on goes on"


PAGE = Path(__file__).parents[2] / "docs" / "pretrain.md"


def recipe(folder: Path, *, text: bool = False, holdout: int = 2) -> str:
    """A recipe for conversations, or for text and a model with sparse attention."""
    if text:
        rows: list[Any] = [{"text": f"{number} " * 30} for number in range(8)]
        tiny: dict[str, Any] = {"family": "deepseek_v32", "index_top_k": 16, "max_context": 64}
        sft = {"max_context_tokens": 40}
    else:
        answer = "<think>it is {0}</think>{0}"
        rows = [{"prompt": f"What is {i}?", "completion": answer.format(i)} for i in range(12)]
        tiny = {}
        sft = {"max_context_tokens": 64, "conversations_per_step": 4}
    data = folder / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "chats", "source": "text" if text else "jsonl"}
    sections = {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "model": {"path": "tiny", "dtype": "float32", "tiny": {**tiny, "cold_start": {"steps": 0}}},
        "sft": {"sources": [{**source, "path": str(data), "holdout": holdout}], **sft},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(sections))
    return str(path)


def batches_of(task: Task) -> sft.Batches:
    assert task.batches is not None
    return task.batches


@pytest.mark.parametrize("kind", ["chats", "template", "trajectories"])
def test_heldout_prompts_are_not_trained_on(tmp_path: Path, kind: str) -> None:

    def write(name: str, lines: Sequence[Any]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(tmp_path / name)

    path = write("p.jsonl", [{"prompt": f"What is  {i}?", "answer": str(i)} for i in range(12)])
    prompts = {"name": "asked", "source": "jsonl", "path": path, "holdout": 5}
    if kind == "template":
        prompts["template"] = "boxed"
    knobs = [f"data={json.dumps({'sources': [prompts]})}"]
    if kind == "trajectories":
        said = {"role": "assistant", "content": "Go on."}
        asked = [[{"role": "user", "content": f"Room {i}."}, said] for i in range(12)]
        rows = [
            {"id": f"asked/{i}", "parts": {"correct": 1.0}, "messages": each}
            for i, each in enumerate(asked, start=1)
        ]
        sampled = {"name": "chats", "source": "trajectories", "path": write("t.jsonl", rows)}
        knobs.append(f"sft.sources={json.dumps([sampled])}")
    task = prepare(recipe(tmp_path, holdout=0), knobs, supervised=True)
    assert "chats: 7 conversations to learn from" in task.text()
    assert "left out: 5 held out by data.sources" in task.text()
    assert task.config.data.sources == () and task.config.algorithm.mask_delta is None


@pytest.mark.parametrize(
    ("text", "overrides", "named"),
    [
        (False, ["sft.max_context_tokens=8"], r"chats\.jsonl:1 has \d+ tokens"),
        (True, ["trainer.attention=warm-up", "model.tiny.index_top_k=50"], r"40 tokens.* 50"),
        (True, ["sft.max_context_tokens=65"], r"max_context = 64"),
    ],
)
def test_invalid_recipes_are_refused(
    tmp_path: Path, text: bool, overrides: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        prepare(recipe(tmp_path, text=text), overrides, supervised=True)


@pytest.mark.parametrize(
    ("stage", "numbers"), [("warm-up", (1000, 16, 1e-3)), ("sparse", (15_000, 480, 7.3e-6))]
)
def test_recipes_of_the_report_run_in_small(
    tmp_path: Path, stage: str, numbers: tuple[int, int, float]
) -> None:
    name = f"pretrain-v32-{stage}"
    config = load_config(name)
    trainer, size = config.trainer, config.sft
    assert (config.run.steps, size.conversations_per_step, trainer.lr) == numbers
    assert (trainer.attention, size.max_context_tokens) == (stage, 2**17)
    (line,) = re.findall(f"keel pretrain {name} (.*)", PAGE.read_text())
    small = {each.partition("=")[0]: each for each in line.split()}
    (tmp_path / "text.txt").write_text("some text " * 500)
    model = {"family": "deepseek_v32", "index_top_k": 12, "max_context": 128}
    tiny = {"path": "tiny", "dtype": "float32", "tiny": {**model, "cold_start": {"steps": 0}}}
    small |= {"model.path": f"model={json.dumps(tiny)}"}
    small |= {"text": f"sft.sources[text].path={tmp_path}", "dir": f"run.dir={tmp_path}"}
    task = prepare(name, [*small.values()], supervised=True)
    assert task.config.trainer.lr == trainer.lr and len(batches_of(task).take()) > 0


def test_dense_base_can_be_warmed_up(tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "base", build_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    build("deepseek_v3", **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text()) | {"index_topk": 8}
    (folder / "config.json").write_text(json.dumps(content))
    knobs = [f"model.path={folder}", "sft.max_context_tokens=64"]
    task = prepare(
        recipe(tmp_path, text=True), [*knobs, "trainer.attention=warm-up"], supervised=True
    )
    assert (task.facts.architecture, task.facts.index_top_k) == ("DeepseekV32ForCausalLM", 8)
    assert any("no indexers" in line for line in task.warnings)
    plain = prepare(recipe(tmp_path, text=True), knobs, supervised=True)
    assert (plain.facts.architecture, plain.facts.index_top_k) == ("DeepseekV3ForCausalLM", 0)
    assert any("stays dense" in line for line in plain.warnings)
    for key, value in (("rope_interleave", False), ("q_lora_rank", None)):
        (folder / "config.json").write_text(json.dumps(content | {key: value}))
        with pytest.raises(ConfigError, match="q_lora_rank and rope_interleave"):
            load_model_config(str(folder), new_indexers=True)


def test_plan_on_gpus_has_a_time(tmp_path: Path) -> None:
    overrides, path = ["run.device=gpu", "run.steps=3600"], recipe(tmp_path, text=True)
    task = prepare(path, overrides, supervised=True, hardware=lambda _: machine(1, 80.0))
    (line,) = [each for each in task.text().splitlines() if each.startswith("time")]
    (each,) = re.findall(r"([\d.]+) ms per step, [\d.]+ hours for 3,600 steps", line)
    assert float(each) > 0


@pytest.mark.parametrize("epochs", [1.5, 2, 2.5])
def test_finished_run_resumes_for_more_epochs(tmp_path: Path, epochs: float) -> None:
    path, knobs = recipe(tmp_path, text=True), ["sft.conversations_per_step=4", "sft.epochs=1"]
    again = prepare(path, knobs, supervised=True)
    first = batches_of(again)
    assert again.config.run.steps == 4, "of 14 windows the last has 2"
    beginning = first.position()
    assert sum(len(first.take()) for _ in range(4)) == 14
    (tmp_path / "run").mkdir()
    state = State(step=4, version=4, config="", cursor=first.position())
    save(tmp_path / "run" / "checkpoints", state, lambda folder: {}, keep=1)
    task = prepare(path, [*knobs, f"sft.epochs={epochs}"], supervised=True)
    assert task.position() == beginning
    task.restore(state.cursor)
    drawn = [len(batches_of(task).take()) for _ in range(4, task.config.run.steps)]
    assert sum(drawn) == 14 * (epochs - 1)
    assert prepare(path, knobs, supervised=True).config.run.steps == 4


def test_control_tokens_are_escaped_in_text() -> None:
    tokenizer = build_tokenizer()
    by = _text_encoder(tokenizer)
    ids = by.encode("so <|im_end|> ends it")
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(list(ids)) == "so <|im_end|> ends it"
    assert (by.before, by.after) == ((), (tokenizer.eos_token_id,))
