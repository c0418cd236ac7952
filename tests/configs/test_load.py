"""Recipes, overrides and work folders, and the errors of wrong ones."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from keel.configs.diff import check_resumable, flatten_config, learning_rate_changes
from keel.configs.distillation import DistillConfig
from keel.configs.dump import dump_config
from keel.configs.load import load_as, load_config
from keel.configs.paths import data_path, shipped_recipes, unwritable
from keel.configs.schema import Config, ConfigError, DataConfig, LoraConfig, SourceConfig
from keel.configs.sections.base import _REMOVED, _RENAMED, _knob_paths
from keel.configs.synthesis import SynthesisConfig
from keel.configs.system_prompts import with_system
from keel.configs.work_folder import WorkFolder

RECIPE = """\
run: {steps: 7}
data:
  sources:
    - {name: sums, source: reasoning_gym, task: chain_sum, size: 64, holdout: 8, kl_coef: 1e-3}
    - {name: gcds, source: reasoning_gym, task: gcd, size: 32, rewards: {correct: 1, mine.b: 0.1}}
"""


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path | str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_recipe_and_overrides_become_a_config(tmp_path: Path) -> None:
    overrides = ["run.steps=${algorithm.group_size}", "run.dir=runs/s${run.seed}"]
    overrides += ["data.sources[sums].rewards={correct: 1, format: 0.1}", "data.sources.1.size=48"]
    overrides += ["rollout.sampling.stop=[a, b]", "algorithm.mask_delta=null"]
    overrides += ["trainer.lr=1e-5", "eval.checkpoint=20"]
    config = load_config(write(tmp_path, RECIPE + "trainer: {eps: 1, beta1: '0.5'}"), overrides)
    assert (config.run.steps, config.run.dir) == (config.algorithm.group_size, "runs/s0")
    assert config.data.sources[1].size == 48
    assert config.data.sources[0].kl_coef == 1e-3
    assert config.data.sources[0].rewards == {"correct": 1.0, "format": 0.1}
    assert config.rollout.sampling.stop == ("a", "b")
    assert config.algorithm.mask_delta is None
    assert (config.trainer.lr, config.trainer.eps, config.trainer.beta1) == (1e-5, 1.0, 0.5)
    assert isinstance(config.trainer.eps, float) and config.eval.checkpoint == "20"


@pytest.mark.parametrize(
    ("override", "knob"),
    [
        ("run.steps=true", "run.steps = True"),
        ("run.steps=1e3", "run.steps = 1000.0"),
        ("trainer.lr=.nan", "trainer.lr = nan"),
        ("data.sources[sums].holdout=al", "data.sources[sums].holdout = 'al'"),
        ("data.sources[sums].rewards.correct=x", "data.sources[sums].rewards.correct = 'x'"),
        ("data.sources=[{name: a}]", "data.sources[a].source: missing"),
        ("run.steps=0", "run.steps = 0"),
        ("data.sources[gcds].kl_coef=-1", "data.sources[gcds].kl_coef = -1.0"),
    ],
)
def test_wrong_value_names_override_and_knob(tmp_path: Path, override: str, knob: str) -> None:
    assert refused(write(tmp_path, RECIPE), override).startswith(f"override {override!r}: {knob}")


def test_mistakes_are_reported_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path, RECIPE.replace("kl_coef: 1e-3", "\n       kl_coef: -1"))
    assert refused(path).startswith(f"{path}:5: data.sources[sums].kl_coef = -1.0: ")
    path = write(tmp_path, RECIPE + "rollout:\n  sampling:\n    top_p: 0.9\n    top_k: 0\n")
    assert refused(path).startswith(f"{path}:9: rollout.sampling.top_k = 0: ")
    path = write(tmp_path, RECIPE + "trainer:\n  lrr: 1\n  zero_stage: 9\nevil: {samples: 2}\n")
    typo, value, section = sorted(refused(path).splitlines())
    assert typo.startswith(f"{path}:7: trainer.lrr: ")
    assert value.startswith(f"{path}:8: trainer.zero_stage = 9")
    assert section.startswith(f"{path}:9: evil: ")


def test_old_names_are_answered_with_new_ones(tmp_path: Path) -> None:
    known = {*_knob_paths(Config), *_knob_paths(SynthesisConfig)}
    assert {*_RENAMED.values()} <= {name for path in known for name in path.split(".")}
    path = write(tmp_path, RECIPE)
    assert refused(path, "rollout.sleep=1").endswith("renamed to rollout.time_share")
    length = "data.sources[sums].length"
    assert refused(path, f"{length}.right=1").endswith(f"renamed to {length}.correct_threshold")
    assert refused(path, "model.embedded.layers=1").endswith("renamed to model.tiny")
    assert "keel compare" in refused(path, "eval.against=x")
    assert not known & _REMOVED.keys()
    defaults = ["eval.against=''", "data.sources[sums].most_pass_rate=1.0"]
    assert load_config(path, defaults) == load_config(path)
    assert "keel filter" in refused(path, "data.sources[sums].most_pass_rate=0.5")
    assert refused(path, "model.path=embedded").endswith("renamed to tiny")


def test_unknown_key_is_answered_with_a_knob(tmp_path: Path) -> None:
    for key, knob in (
        ("rollout.max_tokens", "rollout.sampling.max_tokens"),
        ("lr", "trainer.lr or "),
        ("data.sources[gcds].holdoutt", "data.sources[].holdout?"),
    ):
        assert knob in refused(write(tmp_path, RECIPE), f"{key}=1")


@pytest.mark.parametrize("option", ["bad_words", "guided_json", "logits_processors", "min_p"])
def test_unrecorded_sampling_is_refused(tmp_path: Path, option: str) -> None:
    path = write(tmp_path, RECIPE)
    for section in ("rollout.sampling", "rollout", "eval"):
        message = refused(path, f"{section}.{option}=1")
        assert f"{section}.{option}: changes the distribution" in message


def test_data_instead_of_a_recipe(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\n', "words.jsonl")
    assert f"keel new --data {path}" in refused(path)


def test_recipes_inherit(tmp_path: Path) -> None:
    base = write(tmp_path, RECIPE + "trainer: {lr: 1e-4, eps: 1e-7}", "base.yaml")
    (tmp_path / "sub").mkdir()
    write(tmp_path, "defaults: ../base.yaml\ntrainer: {lr: 3e-4}", "sub/middle.yaml")
    path = write(tmp_path, "defaults: sub/middle.yaml\nrun:\n  seed: 5\n  steps: ???\n")
    config = load_config(path)
    assert (config.trainer.lr, config.trainer.eps) == (3e-4, 1e-7)
    assert (config.run.seed, config.run.steps) == (5, 7)
    write(tmp_path, RECIPE + "trainer: {lrr: 1}", "base.yaml")
    assert f"{base.name}:6: trainer.lrr" in refused(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  steps: [1\ntrainer: {}", ":3: not valid YAML"),
        ("run: {steps: 1}\nrun: {steps: 2}", ":2: not valid YAML"),
        ("run: {dir: }", 'write ""'),
        ("", "data.sources = []"),
        (RECIPE + "1: x", ":6: 1: no such knob"),
        ("defaults: [a]", ":1: defaults = ['a']"),
        ("defaults: recipe.yaml", "circular"),
        (RECIPE + "x: &a [*a]", "nested too deeply"),
        (f"run: {{seed: {'9' * 5000}}}", "digits"),
        ("run: {steps: 1:30}", ":1: run.steps = '1:30'"),
        ('run: {dir: "a\\0b"}', ":1: run.dir = 'a\\x00b'"),
    ],
)
def test_malformed_recipe_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    error = refused(write(tmp_path, text))
    assert "recipe.yaml" in error and message in error


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps", "key=value"),
        ("--run.steps=3", "'run.steps=3'"),
        ("run.steps=[", "not valid YAML"),
        ("run.steps=1:30", "run.steps = '1:30'"),
        ("data.sources.7.size=1", "has no entry '7'; it has sums, gcds"),
        ("model.lora.r=8", "did you mean model.lora.rank?"),
        ("data.sources[sum].size=1", "did you mean data.sources[sums]?"),
        ("data.sources.0.name.x=1", "data.sources.0.name = 'sums' is a value"),
        ("run.dir=${run.nothing}", "run.nothing"),
        ("run.dir=???", "run.dir"),
    ],
)
def test_malformed_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    error = refused(write(tmp_path, RECIPE), override)
    assert message in error and f"override {override!r}" in error


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
TRIPLING = "run: {dir: x}\na0: '${run.dir}'\n" + "".join(
    f"a{n}: '{f'${{a{n - 1}}}' * 3}'\n" for n in range(1, 13)
)
LISTS = "a0: [x, x, x]\n" + "".join(
    f"a{n}: [{', '.join([f'${{a{n - 1}}}'] * 3)}]\n" for n in range(1, 13)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        TRIPLING,
        LISTS,
        "run: {dir: !!python/object/apply:os.system ['touch ran']}",
        "run: {dir: '${oc.env:HOME}'}",
        "run: {dir: '${oc.decode:[1]}'}",
        r"run: {dir: 'a\\${oc.env:HOME}'}",
        "a: oc\nrun: {dir: '${${a}.env:HOME}'}",
        "run: {dir: '${run.seed'}",
        "defaults: ~no-user-of-this-name/x.yaml",
    ],
)
def test_recipes_run_nothing_and_end(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "recipe.yaml" in refused(write(tmp_path, text))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigError):
        data_path("~no-user-of-this-name/x.jsonl")


AWKWARD = ["${run.seed}", "a\\${b}", "\\\\${", "${", "\\", "1e-6", "null", "yes", "0x10", "'"]
CHARACTERS = "ab1 .-:#{}[]$\\\"'&*!%@`,?|>~é\u2028\ufeff中😀"


def test_dumped_config_reads_back_the_same(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices(CHARACTERS, k=rng.randrange(12))) for _ in range(120)]
    params = {"texts": [*texts, *AWKWARD], "others": [None, True, -(10**30), [[], [0]]]}
    source = SourceConfig(
        name="a", source="reasoning_gym", task="gcd", size=3, system=texts[0], params=params
    )
    config = Config(data=DataConfig(sources=(source,)))
    assert load_config(write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize("name", ["mine.b", "mine.partial", "mine.near.partial"])
def test_dotted_reward_function_is_one_key(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, RECIPE)
    for knob in (f".1.rewards.{name}", f"[gcds].rewards[{name}]", f".gcds.rewards.{name}"):
        rewards = load_config(path, [f"data.sources{knob}=0.7"]).data.sources[1].rewards
        assert rewards == {"correct": 1.0, "mine.b": 0.1} | {name: 0.7}


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ("run={steps: 3, seed: 1}", ["run.steps=3", "run.seed=1"]),
        ("data.sources[spelling]={weight: 9}", ["data.sources[spelling].weight=9"]),
        ("data.sources.1={rewards: {correct: 2}}", ["data.sources.1.rewards={correct: 2}"]),
        ("data={only: [spelling]}", ["data.only=[spelling]"]),
        ("run={dir: 'runs/${run.seed}'}", ["run.dir=runs/${run.seed}"]),
    ],
)
def test_section_override_equals_its_knobs(section: str, parts: list[str]) -> None:
    before, after = (flatten_config(load_config("quickstart", o)) for o in ([], [section]))
    assert after == flatten_config(load_config("quickstart", parts)) != before


EVAL_RECIPE = """
data:
  sources:
    - {name: school, source: file, path: school.csv, columns: {prompt: question}, holdout: 8,
       template: boxed, rewards: {correct: 1.0, my.brief: 0.1}, weight: 2.0, size: 50}
    - {name: other, source: jsonl, path: other.jsonl}
"""


def test_evaluation_file_is_read_like_the_first_file(tmp_path: Path) -> None:
    recipe = write(tmp_path, EVAL_RECIPE)
    config = load_config(recipe, ["eval.file=sets/test.jsonl", "data.only=[school]"])
    school, test = config.data.sources
    assert (test.name, test.source, test.path) == ("test", "jsonl", "sets/test.jsonl")
    assert test.holdout == "all" and config.data.weight_of(test) == 0
    for knob in ("columns", "template", "rewards", "thinking"):
        assert getattr(test, knob) == getattr(school, knob)
    assert (test.size, school.weight) == (0, 2)
    assert load_config(write(tmp_path, dump_config(config), "config.yaml")) == config


def config(**source: object) -> Config:
    values = {"name": "sums", "source": "reasoning_gym", "task": "chain_sum", "size": 64}
    return Config(data=DataConfig(sources=(SourceConfig(**(values | source)),)))  # type: ignore[arg-type]


def test_resumed_run_may_change_length_and_rate() -> None:
    old = config()
    longer = replace(old, run=replace(old.run, steps=500, dir="runs/moved"))
    check_resumable(old, longer, "runs/x")
    other = replace(longer, trainer=replace(old.trainer, grad_clip=9.0))
    with pytest.raises(ConfigError, match=r"trainer\.grad_clip: 1\.0 → 9\.0") as caught:
        check_resumable(old, other, "runs/x")
    assert "run.steps" not in str(caught.value)
    trainer = replace(
        old.trainer, lr=5e-7, indexer_lr=1e-6, indexer_schedule="linear", schedule="cosine"
    )
    new = replace(old, trainer=trainer)
    check_resumable(old, new, "runs/x")
    assert learning_rate_changes(old, new) == [
        "trainer.lr 1e-06 → 5e-07",
        "trainer.schedule constant → cosine",
        "trainer.indexer_lr 0.0 → 1e-06",
        "trainer.indexer_schedule same → linear",
    ]


def test_adapters_matter_only_if_there_are_any() -> None:
    old = config()

    def with_lora(**knobs: Any) -> Config:
        return replace(old, model=replace(old.model, lora=LoraConfig(**knobs)))

    check_resumable(with_lora(targets=("q_proj",)), old, "runs/x")
    with pytest.raises(ConfigError, match=r"model\.lora\.rank: 4 → 0"):
        check_resumable(with_lora(rank=4), old, "runs/x")


def test_evaluation_sources_may_change() -> None:
    old = config()
    measured = SourceConfig(name="test", source="jsonl", path="test.jsonl", holdout="all")
    with_test = replace(old, data=DataConfig(sources=(*old.data.sources, measured)))
    check_resumable(old, with_test, "runs/x")
    check_resumable(with_test, old, "runs/x")
    trained = replace(with_test.data.sources[1], holdout=1)
    trained_too = replace(old, data=DataConfig(sources=(*old.data.sources, trained)))
    with pytest.raises(ConfigError, match=r"data.sources\[test\]"):
        check_resumable(old, trained_too, "runs/x")


def test_obstacles_of_a_run_folder_are_named(tmp_path: Path) -> None:
    assert unwritable(tmp_path / "a" / "b") == unwritable(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for inside in ("file", "file/run", "file/a/run"):
        assert str(tmp_path / "file") in unwritable(tmp_path / inside)
    assert str(tmp_path / "link") in unwritable(tmp_path / "link" / "run")


def work_folder(path: Path) -> WorkFolder:
    return WorkFolder(path, "it.dir", "count")


def test_work_folder_resumes_after_the_last_whole_line(tmp_path: Path) -> None:
    line = {"text": "é \ud800", "n": 1}
    with work_folder(tmp_path) as folder:
        assert folder.records("x.jsonl", dict) == []
        folder.claim({"seed": 1})
        folder.append("x.jsonl", line)
    with (tmp_path / "x.jsonl").open("ab") as file:
        file.write('{"text": "é'.encode()[:-1])  # cut inside a character
    with work_folder(tmp_path) as folder:
        assert folder.changed({"seed": 1}) == []
        assert folder.changed({"seed": 2, "k": 3}) == ["seed: 1 → 2", "k: (absent) → 3"]
        assert folder.records("x.jsonl", dict) == [line]
        folder.append("x.jsonl", {"n": 2})
        assert folder.records("x.jsonl", dict) == [line, {"n": 2}]


def test_work_folder_is_exclusive_and_names_bad_files(tmp_path: Path) -> None:
    with work_folder(tmp_path / "a"), pytest.raises(ConfigError, match=r"it\.dir"):
        work_folder(tmp_path / "a").__enter__()
    with work_folder(tmp_path / "a") as folder:  # released
        (folder.path / "settings.json").write_text("{")
        with pytest.raises(ConfigError, match=r"settings\.json"):
            folder.changed({})
        (folder.path / "x.jsonl").write_text("{}\n{]\n")
        with pytest.raises(ConfigError, match=r"x\.jsonl:2: "):
            folder.records("x.jsonl", dict)
        (folder.path / "y.jsonl").mkdir()
        with pytest.raises(ConfigError, match=r"it\.dir = .*y\.jsonl cannot be opened"):
            folder.append("y.jsonl", {})


def test_neighbouring_files_precede_shipped_recipes(tmp_path: Path) -> None:
    config = load_config("qwen3-8b-8x80")
    assert config.run.dir == "runs/qwen3-8b-8x80" and config.run.gpus_per_node == 8
    assert set(shipped_recipes("distill/")) == {"quickstart", "specialists"}
    with pytest.raises(ConfigError, match="no such file"):
        load_as(DistillConfig, "qwen3-8b-8x80")
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: qwen3-8b-8x80\nrun: {dir: runs/mine}\n")
    assert load_config(mine).trainer == config.trainer
    (tmp_path / "quickstart.yaml").write_text("run: {steps: 7}\n")
    source = "{name: a, source: jsonl, path: a}"
    mine.write_text(f"defaults: quickstart.yaml\ndata: {{sources: [{source}]}}\n")
    assert load_config(mine).run.steps == 7
    mine.write_text("defaults: qwen3-8b-9x80\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:1: defaults: "):
        load_config(mine)


def test_system_prompt_precedes_an_existing_message() -> None:
    user = {"role": "user", "content": "1 + 1?"}
    assert with_system("", [user]) == (user,)
    assert with_system("A", [user]) == ({"role": "system", "content": "A"}, user)
    system = {"role": "system", "content": "B"}
    assert with_system("A", [system, user]) == ({"role": "system", "content": "A\n\nB"}, user)


RECIPES = sorted(
    path.stem for path in (Path(__file__).parents[2] / "configs/recipes").glob("*.yaml")
)
shipped_recipe = cache(load_config)
MATHEMATICS = {"gsm8k", "proofs", "sums", "sums-direct", "gcd"}
"""The report weakens the KL penalty for mathematics, or omits it."""


def test_recipes_load_by_their_bare_names() -> None:
    assert [shipped_recipe(name).run.dir for name in RECIPES] == [f"runs/{n}" for n in RECIPES]
    algorithm = shipped_recipe("gpu-dense").algorithm
    assert algorithm.updates_per_batch > 1
    assert algorithm.prompts_per_step % algorithm.updates_per_batch == 0


def test_only_removes_the_other_sources(tmp_path: Path) -> None:
    config = load_config("mixed", ["data.only=[chat, code]"])
    assert [source.name for source in config.data.sources] == ["code", "chat"]
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    with pytest.raises(ConfigError, match=r"data\.only = 'cod'.*code"):
        load_config("mixed", ["data.only=[cod]"])


def test_domains_have_the_rewards_of_the_report() -> None:
    plain = ("sft", "pretrain", "quickstart")
    recipes = [shipped_recipe(name) for name in RECIPES if not name.startswith(plain)]
    for source in (source for recipe in recipes for source in recipe.data.sources):
        assert "language" in source.rewards, source.name
        if "rubric" not in source.rewards:
            assert source.rewards["correct"] > 0 and source.length.linear > 0, source.name
        assert source.kl_coef > 0 or source.name in MATHEMATICS, source.name
