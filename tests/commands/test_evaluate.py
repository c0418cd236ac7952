"""`keel eval` and `keel compare` with scripted engines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keel.commands.cli import main
from keel.commands.evaluate import variant_runtime
from keel.configs.load import load_config
from keel.configs.schema import Config, EvalVariant
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.types import Group, Prompt, ScoredGroup, Segment, Trajectory
from keel.rollout.chat.chat import TemplateChat
from keel.trainer.launch import Runtime, run_episodes
from keel.trainer.prepare import prepare
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder

FEW = (
    "data.sources[spelling].size=12",
    "data.sources[spiral].size=12",
    "data.sources[spelling].holdout=4",
    "data.sources[spiral].holdout=4",
    "eval.samples=4",
    "algorithm.group_size=3",
)


OPEN = "data.sources[trip].environment.isolation=none-i-trust-the-environments"


@dataclass
class Fake:
    """A started system. Prompt n of a set has n correct completions, one of them late in its last
    group."""

    skill: int = 0
    asked: list[tuple[Prompt, int]] = field(default_factory=list[Any])
    loaded: list[str] = field(default_factory=list[str])
    stop_after: int = 10**9

    def __post_init__(self) -> None:
        self.learner = SimpleNamespace(load=lambda path: self.loaded.append(path.name))
        self.scorer = SimpleNamespace(submit=self.score)
        self.wake = lambda: None
        self.with_watchdog = lambda stop: stop
        self.agents, self.pool = None, SimpleNamespace(steps=0)
        self.counts: dict[str, int] = {}

    def submit(self, prompt: Prompt, purpose: str, size: int) -> Future[Any]:
        assert purpose == "eval"
        if len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append((prompt, size))
        late = size < 3
        return ready(
            Group(
                prompt=prompt,
                trajectories=tuple(trajectory(prompt, n) for n in range(size - late)),
                dropped=("late: too slow",) * late,
            )
        )

    def score(self, group: Group, purpose: str) -> Future[ScoredGroup]:
        number = len(group.trajectories)
        right = int(group.prompt.prompt_id.rpartition("/")[2]) % 4 + self.skill
        values = [float(n < right) for n in range(number)]
        return ready(
            ScoredGroup(
                group=group,
                rewards_G=np.array(values, np.float32),
                parts_G=tuple({"correct": value, "error": 0.0} for value in values),
                advantages_G=np.zeros(number, np.float32),
            )
        )


def trajectory(prompt: Prompt, sibling: int) -> Trajectory:
    segment = Segment(
        prompt_id=prompt.prompt_id,
        token_ids_T=np.arange(6, dtype=np.int32),
        trainable_T=np.arange(6) > sibling,
        logp_old_T=np.zeros(6, np.float32),
        version_T=np.zeros(6, np.int32),
    )
    message = {"role": "assistant", "content": f"so \\boxed{{ no {sibling}}}", "raw": ""}
    return Trajectory(
        prompt_id=prompt.prompt_id,
        sibling=sibling,
        segments=(segment,),
        finish_reason="stop" if sibling else "length",
        messages=(message,),
    )


def ready(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    system = Fake()

    @contextmanager
    def running(task: object, say: object, log: Path, *, learner: bool) -> Iterator[Any]:
        assert log.name == "rewards" and log.parent.is_dir(), "what functions print has a place"
        before = len(system.loaded)
        yield system
        # A checkpoint's weights are the ranks' to read; a model folder's the engines'.
        assert learner == (len(system.loaded) > before)

    monkeypatch.setattr("keel.commands.sampling.launch", running)
    return system


def of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())["results"]


def test_results_of_each_set_and_domain(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW, "eval.submissions=1")
    assert main(["eval", *words]) == 0
    out = capsys.readouterr().out
    report = of(tmp_path / "eval" / "base")["recipe"]
    heldout = prepare("quickstart", words[1:]).dataset.heldout
    passes = [
        min(int(p.prompt_id.rpartition("/")[2]) % 4, 3) for p in heldout["spelling"]
    ]  # by hand: groups of three and of one, the last completion late
    spelling = report["spelling"]
    assert spelling["pass@1"] == pytest.approx(sum(passes) / 16)
    assert spelling["pass@4"] == pytest.approx(np.mean([n > 0 for n in passes]))
    assert spelling["unscored"] == 4 and spelling["completions"] == 16
    assert (spelling["tokens_mean"], spelling["tokens_most"]) == (4, 5)
    assert spelling["cut"] == pytest.approx(1 / 3)
    low, high = spelling["pass@1_interval"]
    assert low < spelling["pass@1"] < high
    # The first is cut off, and the second is then the one that is handed in.
    numbers = [int(p.prompt_id.rpartition("/")[2]) % 4 for p in heldout["spelling"]]
    assert spelling["contest"] == pytest.approx(np.mean([n > 1 for n in numbers]))
    assert report["all"]["prompts"] == 8 and set(report) >= {"spelling", "spiral", "all"}
    warned = f"run.dir = {tmp_path} has no checkpoint"
    for word in ("pass@2", "maj@4", "contest", "95 %", "8 completions missing", warned):
        assert word in out
    assert "\nsampling with model.path = tiny\n" in out
    line = json.loads((tmp_path / "eval/base/samples.jsonl").read_text().splitlines()[0])
    assert line["samples"][1]["answer"] == "no 1" and line["missing"] == ["late: too slow"]


def test_majority_counts_right_answers_together(fake: Fake, tmp_path: Path) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW, "eval.pass_at=[4]")
    assert main(["eval", *words]) == 0
    spelling = of(tmp_path / "eval" / "base")["recipe"]["spelling"]
    rights = [
        int(p.prompt_id.rpartition("/")[2]) % 4
        for p in prepare("quickstart", words[1:]).dataset.heldout["spelling"]
    ]
    # Wrong answers differ from each other: one right is a third of the lead, two are all of it.
    share = {0: 0.0, 1: 1 / 3, 2: 1.0, 3: 1.0}
    assert spelling["maj@4"] == pytest.approx(np.mean([share[n] for n in rights]))


def test_stopped_evaluation_resumes(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    fake.stop_after = 7  # in the middle of a prompt
    assert main(["eval", *words]) == 130
    table = tmp_path / "eval/base/samples.jsonl"
    with table.open("ab") as file:
        file.write('{"variant": "é'.encode()[:-1])  # in the middle of a character
    done = table.read_bytes().count(b"\n")
    fake.stop_after, before = 10**9, len(fake.asked)
    assert main(["eval", *words]) == 0
    assert len(fake.asked) - before == 2 * (8 - done)
    assert len(table.read_text().splitlines()) == 8
    ended = table.read_bytes()
    assert main(["eval", *words, "eval.temperature=0.5"]) == 0
    assert main(["eval", *words]) == 0
    assert {p.name for p in (tmp_path / "eval").iterdir()} == {"base", "base.2", "base.3"}
    assert table.read_bytes() == ended
    capsys.readouterr()
    assert main(["eval", *words, f"eval.dir={tmp_path / 'eval/base'}"]) == 2
    assert "holds an evaluation that has ended" in capsys.readouterr().err


def test_dropped_prompts_do_not_count(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = "eval.variants=[{name: one}, {name: two}]"
    words = ("quickstart", f"run.dir={tmp_path}", *FEW, variants)
    assert main(["eval", *words]) == 0
    (tmp_path / "eval/base/results.json").unlink()  # as of one that has not ended
    fewer = [f"data.sources[{name}].holdout=1" for name in ("spelling", "spiral")]
    assert main(["eval", *words, *fewer]) == 0
    assert of(tmp_path / "eval/base")["two"]["all"]["prompts"] == 2
    assert "\n6 prompts sampled earlier are in no set now" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other",
    [
        "rewards.code.memory_mib=999",
        "data.sources[spiral].rewards={correct: 0.5}",
        "data.sources[spiral].thinking=false",
    ],
)
def test_other_scoring_is_another_evaluation(fake: Fake, tmp_path: Path, other: str) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    fake.stop_after = 7
    assert main(["eval", *words]) == 130
    fake.stop_after, before = 10**9, len(fake.asked)
    assert main(["eval", *words, other]) == 0
    assert len(fake.asked) - before == 2 * 8
    assert not (tmp_path / "eval/base/results.json").exists()
    assert main(["eval", *words, "rewards.workers=1"]) == 0  # the first goes on
    assert (tmp_path / "eval/base/results.json").exists()


def test_checkpoints_by_name(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    trained = prepare("quickstart", words[1:]).config
    with RunFolder(trained) as folder:
        for step in (2, 4):
            digest, of = config_digest(trained), "another" if step == 4 else ""
            state = State(step=step, version=step, cursor={}, config=digest, tokenizer=of)
            folder.save(state, lambda path: {})
    assert main(["eval", *words]) == 0
    message = "warning: model.path = 'tiny' has another tokenizer or chat template than when step_"
    assert message in capsys.readouterr().out
    assert main(["eval", *words, "eval.checkpoint='2'"]) == 0
    assert main(["eval", *words, "eval.checkpoint=base", "data.only=[spiral]"]) == 0
    assert fake.loaded == ["step_000004", "step_000002"]
    assert {p.name for p in (tmp_path / "eval").iterdir()} == {"step_000004", "step_000002", "base"}
    assert main(["eval", *words, "eval.checkpoint='3'"]) == 2
    assert "has checkpoints of steps: 2, 4" in capsys.readouterr().err


def test_two_evaluations_compared(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["eval", *words, f"eval.dir={one}"]) == 0
    fake.skill = 1
    assert main(["eval", *words, f"eval.dir={two}", f"eval.against={one}"]) == 0
    out = capsys.readouterr().out
    assert f"− {one}:" in out
    assert main(["compare", str(one), str(two)]) == 0
    head, *table = capsys.readouterr().out.splitlines()
    assert head == f"{two} − {one}:" and "\n".join(table) in out
    name, pairs, difference = table[-1].split()[:3]
    rates = [of(folder)["recipe"]["all"]["pass@1"] for folder in (one, two)]
    assert (name, pairs) == ("all", "8") and rates[1] > rates[0]
    assert float(difference) == pytest.approx(rates[1] - rates[0], abs=1e-3)
    assert main(["compare", str(one), str(tmp_path)]) == 2
    assert "cannot be read as an evaluation" in capsys.readouterr().err
    ways = "eval.variants=[{name: plain, thinking: without}]"
    assert main(["eval", *words, ways, f"eval.against={one}"]) == 2
    assert "it has other variants (recipe)" in capsys.readouterr().err, "and nothing was sampled"
    other = (*words, "run.seed=3", f"eval.dir={tmp_path / 'three'}", f"eval.against={one}")
    assert main(["eval", *other]) == 2
    assert "it has another prompt called" in capsys.readouterr().err


def test_variants_side_by_side(fake: Fake, tmp_path: Path) -> None:
    ways = "eval.variants=[{name: plain, thinking: without}, {name: boxed, ask: boxed}]"
    words = ("quickstart", f"run.dir={tmp_path}", *FEW, ways)
    assert main(["eval", *words, "data.max_prompt_tokens=256"]) == 0
    assert set(of(tmp_path / "eval/base")) == {"plain", "boxed"}
    ends = [str(p.messages[-1]["content"]).endswith("within \\boxed{}.") for p, _ in fake.asked]
    assert sum(ends) == len(ends) / 2
    assert not any(p.thinking for (p, _), end in zip(fake.asked, ends, strict=True) if not end)


def test_too_long_variant_is_refused(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = "eval.variants=[{name: plain}, {name: boxed, ask: boxed}]"
    words = ("quickstart", f"run.dir={tmp_path}", *FEW, ways)
    assert main(["eval", *words]) == 2
    message = capsys.readouterr().err
    assert "eval.variants[boxed]: prompt spelling/" in message and not fake.asked
    more = int(re.findall(r"Raise data.max_prompt_tokens = 64 by at least (\d+)", message)[0])
    assert main(["eval", *words, f"data.max_prompt_tokens={64 + more - 8}"]) == 2
    assert main(["eval", *words, f"data.max_prompt_tokens={64 + more + 64}"]) == 0


@dataclass(frozen=True)
class Agents:
    """The parts of a started system that a variant uses."""

    config: Config
    chat: Any


def test_variant_sets_the_context_method() -> None:
    config = load_config(
        "agent-trip",
        [OPEN, "agents.summary_tokens=32"],
    )
    task: Any = Agents(config, TemplateChat(build_tokenizer()))
    nothing: Any = None
    with run_episodes(task, nothing) as agents:
        system = Runtime(task=task, pool=nothing, ranks=nothing, scorer=nothing, agents=agents)
        methods: dict[str, str] = {}
        for context in ("discard-all", "as-in-training", "summary"):
            variant = EvalVariant(name="v", context=context)
            with variant_runtime(config, system, variant) as changed:
                assert isinstance(changed, Runtime) and changed.agents is not None
                methods[context] = changed.agents._limits["trip"].context.method
    assert methods == {"discard-all": "discard-all", "as-in-training": "none", "summary": "summary"}


def test_variant_sets_budgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Known:
        config: Config

    opened: list[tuple[str, int]] = []

    def episodes(task: Known, pool: object) -> Any:
        opened.append((task.config.agents.context, task.config.rollout.sampling.max_tokens))
        return nullcontext("other episodes")

    monkeypatch.setattr("keel.commands.evaluate.run_episodes", episodes)
    config = load_config("mixed-agents")  # `chat` has 32 tokens, the others 48
    parts: Any = {"task": Known(config), "pool": None, "ranks": None, "scorer": None}
    system = Runtime(**parts)
    with variant_runtime(
        config, system, EvalVariant(name="v", max_tokens=40, context="discard-all")
    ) as other:
        assert isinstance(other, Runtime) and other.agents == "other episodes"
        now = other.task.config
        assert [now.sampling("eval", d).max_tokens for d in ("spelling", "chat")] == [40, 32]
    with variant_runtime(config, system, EvalVariant(name="v", thinking="without")) as same:
        assert same is system
    assert opened == [("discard-all", 40)] and config.agents.context == "none"


def test_training_prompts_can_be_evaluated(fake: Fake, tmp_path: Path) -> None:
    words = ("quickstart", f"run.dir={tmp_path}", *FEW)
    assert main(["eval", *words, "eval.prompts=train", "eval.size=3"]) == 0
    dataset = prepare("quickstart", words[1:]).dataset
    asked = {prompt.prompt_id for prompt, _ in fake.asked}
    assert asked == {p.prompt_id for some in dataset.train.sources.values() for p in some[:3]}
    assert not asked & {p.prompt_id for some in dataset.heldout.values() for p in some}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.pass_at=[8]", "each must be from 1 to eval.samples = 4"),
        ("eval.checkpoint=newest", "must be last, base, or a step"),
        ("eval.variants=[{name: a}, {name: a}]", "eval.variants = "),
        ("eval.variants=[{name: a, max_tokens: 9999}]", "eval.variants[a].max_tokens = 9999"),
        ("eval.variants=[{name: a, context: summary}]", "no source has an environment"),
        ("eval.variants=[{name: 'a b'}]", "must be letters, digits"),
        ("eval.against=/nowhere", "/nowhere/samples.jsonl: cannot be read"),
        ("data.only=[nothing]", "data.only"),
    ],
)
def test_invalid_evaluations_are_refused(
    override: str, message: str, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "quickstart", f"run.dir={tmp_path}", *FEW, override]) == 2
    assert message in capsys.readouterr().err and not fake.asked
