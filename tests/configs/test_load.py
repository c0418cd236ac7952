"""A recipe says what it means, or its error says where and how to mend it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keel.configs.load import dump_config, load_config, load_distillation, load_synthesis
from keel.configs.schema import Config, ConfigError, DataConfig, SourceConfig
from keel.configs.suggest import RENAMED, knobs
from keel.configs.synthesis import SynthesisConfig

RECIPE = """\
run: {steps: 7}
data:
  sources:
    - {name: sums, source: reasoning_gym, task: chain_sum, size: 64, holdout: 8, kl_coef: 1e-3}
    - {name: gcds, source: reasoning_gym, task: gcd, size: 32}
"""


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_recipe_and_overrides_become_a_config(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, RECIPE),
        [
            "run.steps=9",
            "data.sources.1.size=48",
            "data.sources[sums].rewards={correct: 1, format: 0.1}",
            "rollout.sampling.stop=[a, b]",
            "algorithm.mask_delta=null",
            "trainer.lr=1e-5",
        ],
    )
    assert config.run.steps == 9
    assert config.data.sources[1].size == 48
    assert config.data.sources[0].kl_coef == 1e-3
    assert config.data.sources[0].rewards == {"correct": 1.0, "format": 0.1}
    assert config.rollout.sampling.stop == ("a", "b")
    assert config.algorithm.mask_delta is None
    assert config.trainer.lr == 1e-5


def test_loads_of_one_recipe_share_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, RECIPE.replace("chain_sum", "gcd, params: {x: [1]}"))
    changed = load_config(path, ["data.sources.0.params.x.0=2"])
    assert changed.data.sources[0].params == {"x": [2]}
    assert load_config(path).data.sources[0].params == {"x": [1]}


def test_numbers_written_as_text_count_as_floats(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, RECIPE + "trainer: {lr: '2e-6', eps: 1, beta1: '0.5'}"))
    assert (config.trainer.lr, config.trainer.eps, config.trainer.beta1) == (2e-6, 1.0, 0.5)
    assert isinstance(config.trainer.eps, float)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=true", "run.steps = True: must be a whole number"),
        ("run.steps=1e3", "run.steps = 1000.0: must be a whole number; write 1000"),
        ("run.steps='8'", "run.steps = '8': must be a whole number without quotes"),
        ("run.steps=1.5", "must be a whole number"),
        ("run.steps=", "run.steps = null: must be a whole number"),
        ("run.dir=3", "run.dir = 3: must be text; put it in quotes"),
        ("trainer.lr=fast", "trainer.lr = 'fast': must be a finite number"),
        ("trainer.lr=.nan", "must be a finite number"),
        ("trainer.lr=true", "trainer.lr = True: must be a finite number"),
        ("trainer.zero_stage=true", "must be one of 0, 1, 2, 3"),
        ("run.resume=off", "run.resume = False: must be one of auto, never"),
        ("algorithm.keep_routing=1", "must be true or false"),
        ("data.sources[sums].holdout=al", "must be a whole number, or all"),
        ("rollout.sampling.stop=x", "rollout.sampling.stop = 'x': must be a list"),
        ("rollout.sampling=3", "rollout.sampling = 3: must be a section"),
        ("data.sources[sums].rewards.correct=x", "data.sources[sums].rewards.correct = 'x'"),
        ("data.sources[sums].params=[1]", "data.sources[sums].params = [1]: must be a section"),
        ("data.sources=[{name: a}]", "data.sources[a].source: missing, and it has no default"),
        ("run.steps=0", "run.steps = 0: must be at least 1"),
        ("run.hang_timeout_s=-1", "run.hang_timeout_s = -1.0: must not be negative (seconds; 0:"),
        ("data.sources[gcds].kl_coef=-1", "data.sources[gcds].kl_coef = -1.0: must not be"),
        ("algorithm.group_size=1", "algorithm.group_size = 1: must be at least 2"),
        ("data.sources=[]", "data.sources = []: add one"),
    ],
)
def test_a_wrong_value_names_the_knob(tmp_path: Path, override: str, message: str) -> None:
    error = refused(write(tmp_path, RECIPE), override)
    assert message in error
    assert error.startswith(f"override {override!r}: ")


def test_a_value_out_of_range_is_found_where_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path, RECIPE.replace("kl_coef: 1e-3", "\n       kl_coef: -1"))
    assert refused(path).startswith(f"{path}:5: data.sources[sums].kl_coef = -1.0: ")
    path = write(tmp_path, RECIPE + "rollout:\n  sampling:\n    top_p: 0.9\n    top_k: 0\n")
    assert refused(path).startswith(f"{path}:9: rollout.sampling.top_k = 0: ")
    unrecorded = ("rollout.sampling.top_k=8", "algorithm.keep_sampling_mask=false")
    assert refused(path, *unrecorded).startswith(f"override {unrecorded[1]!r}: ")


@pytest.mark.parametrize(
    ("key", "cure"),
    [
        ("trainer.lrr", "did you mean trainer.lr?"),
        ("trainer.learning_rate", "did you mean trainer.lr?"),
        ("rollout.max_tokens", "did you mean rollout.sampling.max_tokens or "),
        ("lr", "did you mean trainer.lr or "),
        ("trainr.lr", "did you mean trainer?"),
        ("algorithm.num_generations", "did you mean algorithm.group_size?"),
        ("algorithm.beta", "did you mean data.sources[].kl_coef?"),
        ("data.sources[gcds].holdoutt", "did you mean data.sources[gcds].holdout?"),
        ("model.tiny.cold_start.stepps", "did you mean model.tiny.cold_start.steps?"),
        ("rollout.temprature", "did you mean eval.temperature or "),
        ("run.zzz", "keel knobs run lists"),
        ("trainer.learning_rte", "did you mean trainer.lr?"),
        ("trainer.ratee", "the nearest is trainer."),
        ("trainer.checkpointing", "did you mean trainer.activation_checkpointing?"),
        ("trainer.lora", "LoRA is not supported"),
        ("peft.r", "LoRA is not supported"),
        ("model.load_in_4bit", "quantised training is not supported"),
        ("push_to_hub", "hf upload"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_knob(tmp_path: Path, key: str, cure: str) -> None:
    error = refused(write(tmp_path, RECIPE), f"{key}=1")
    assert cure in error


def test_a_step_is_a_checkpoint_without_quotes(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, RECIPE), ["eval.checkpoint=20"])
    assert config.eval.checkpoint == "20"
    assert "must be last, base, or a step such as 20" in refused(
        write(tmp_path, RECIPE), "eval.checkpoint=-1"
    )


def test_a_recipe_of_another_command_is_said_to_be_one(tmp_path: Path) -> None:
    path = write(tmp_path, RECIPE)
    for load in (load_distillation, load_synthesis):
        with pytest.raises(ConfigError, match="of the recipes of `keel train`; this command takes"):
            load(path)


@pytest.mark.parametrize("old", RENAMED)
def test_old_knob_names_are_answered_with_new_ones(tmp_path: Path, old: str) -> None:
    new = f"{old.rpartition('.')[0]}.{RENAMED[old]}"
    author = old.startswith("author.")
    known = set(knobs(SynthesisConfig if author else Config))
    assert old not in known and any(path == new or path.startswith(f"{new}.") for path in known)
    if not author:
        override = old.replace("[]", "[sums]")
        message = refused(write(tmp_path, RECIPE), f"{override}=1")
        assert message.endswith(f"renamed to {new.replace('[]', '[sums]')}")


def test_the_old_model_name_is_answered_with_the_new_one(tmp_path: Path) -> None:
    assert refused(write(tmp_path, RECIPE), "model.path=embedded").endswith("renamed to tiny")


def test_an_old_name_in_a_recipe_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, RECIPE + "rollout:\n  gpu_memory: 0.5\n")
    assert refused(path).startswith(f"{path}:7: rollout.gpu_memory:")


def test_all_typos_are_reported_with_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, RECIPE + "trainer:\n  lrr: 1\n  zero_stage: 9\nevil: {samples: 2}\n")
    lines = refused(path).splitlines()
    assert len(lines) == 3
    assert any(line.startswith(f"{path}:7: trainer.lrr: no such knob") for line in lines)
    assert any(line.startswith(f"{path}:8: trainer.zero_stage = 9") for line in lines)
    assert any(line.startswith(f"{path}:9: evil: no such knob") for line in lines)


@pytest.mark.parametrize("section", ["rollout.sampling", "rollout", "eval"])
@pytest.mark.parametrize("option", ["bad_words", "guided_json", "logits_processors", "min_p"])
def test_sampling_that_cannot_be_replayed_is_refused(
    tmp_path: Path, section: str, option: str
) -> None:
    error = refused(write(tmp_path, RECIPE), f"{section}.{option}=1")
    assert f"{section}.{option}: changes the distribution without being recorded" in error
    assert "remove it" in error


def test_a_recipe_inherits(tmp_path: Path) -> None:
    write(tmp_path, RECIPE + "trainer: {lr: 1e-4, eps: 1e-7}", "base.yaml")
    (tmp_path / "sub").mkdir()
    write(tmp_path, "defaults: ../base.yaml\ntrainer: {lr: 3e-4}", "sub/middle.yaml")
    path = write(tmp_path, "defaults: sub/middle.yaml\nrun: {seed: 5}")
    config = load_config(path)
    assert (config.trainer.lr, config.trainer.eps) == (3e-4, 1e-7)
    assert (config.run.seed, config.run.steps) == (5, 7)

    write(tmp_path, RECIPE + "trainer: {lrr: 1}", "base.yaml")
    assert "base.yaml:6: trainer.lrr" in refused(path)


def test_what_replaces_an_inherited_value_is_reported_where_it_stands(tmp_path: Path) -> None:
    base = write(tmp_path, RECIPE, "base.yaml")
    kinds = "defaults: base.yaml\n"
    path = write(tmp_path, kinds + "data:\n  sources: {name: x, task: gcd}\n")
    assert refused(path).startswith(
        f"{path}:3: data.sources = {{'name': 'x', 'task': 'gcd'}}: must"
    )
    path = write(tmp_path, kinds + "run: 3\ndata: [1]\n")
    assert f"{path}:2: run = 3: must be a section" in refused(path)
    assert f"{path}:3: data = [1]: must be a section" in refused(path)
    path = write(tmp_path, kinds + "data:\n  sources:\n    - {source: jsonl, path: a}\n")
    assert refused(path) == f"{path}:4: data.sources[0].name: missing, and it has no default"
    # A list is replaced whole, and what the ancestor said about its entries goes with it.
    assert not re.search(rf"{base}:", refused(path, "data.sources.0.task=3"))
    path = write(tmp_path, kinds + "run:\n  steps: ???\n")  # what must be said has been said
    assert load_config(path).run.steps == 7


def test_inheritance_that_cannot_be_followed(tmp_path: Path) -> None:
    a = write(tmp_path, "defaults: b.yaml", "a.yaml")
    write(tmp_path, "defaults: a.yaml", "b.yaml")
    assert "goes round in a circle" in refused(a)
    path = write(tmp_path, "run: {}\ndefaults: base.yml")
    assert f"{path}:2: defaults: " in refused(path)
    assert "must be the path of a recipe" in refused(write(tmp_path, "defaults: [a]"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  steps: [1\ntrainer: {}", ":3: not valid YAML"),
        ("run:\n  steps: 1\n eval_every: 2", ":3: not valid YAML: it is indented otherwise"),
        ("run: {dir: }", """must be text; an empty one is "" (in a shell: run.dir='""'), and #"""),
        ("specialists: []", "this is a chain of stages: `keel distill` runs it"),
        ("run:\n\tsteps: 1", "; line 2 has a tab, write spaces"),
        (
            "run:\n  steps\uff1a 1\n  eval_every: 2",
            "; line 2 has '\uff1a' (fullwidth colon), write :",
        ),
        ("run: {steps: 1\uff0c eval_every: 2}", "; line 1 has '\uff0c' (fullwidth comma), write ,"),
        (
            "run:\n\u00a0\u00a0steps: 1\n  eval_every: 2",
            "; line 2 has '\\xa0' (no break space), write a space",
        ),
        ("run: {dir: \u201cruns/a\u201d}", "takes typographic quotes for part of the text"),
        ("run: {steps: \uff14}", "must be a whole number; write 4 in plain digits"),
        ("run: {steps: 1}\nrun: {steps: 2}", ":2: not valid YAML: found duplicate key run"),
        ("- 1", ":1: a recipe is made of"),
        ("just text", ":1: a recipe is made of"),
        ("", "data.sources = []: add one"),
        ("data: {}", "data.sources = []: add one"),
        (RECIPE + "1: x", ":6: 1: no such knob"),
        (RECIPE + "rewards: {x: 1}", "scores completions is data.sources[].rewards; this"),
    ],
)
def test_a_malformed_recipe_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    error = refused(path)
    assert str(path) in error
    assert message in error


def test_a_missing_recipe_names_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, RECIPE, "chain_sum.yaml")
    write(tmp_path, RECIPE, "other.yaml")
    assert "chain_sum.yaml" in refused(tmp_path / "chain_sums.yaml")
    assert "no such folder" in refused(tmp_path / "nowhere" / "x.yaml")
    assert "is a folder; " in refused(tmp_path)
    for name in ("quikstart", "quickstrat.yaml"):
        assert "did you mean quickstart, which comes with Keel?" in refused(Path(name))
    comes = "agent-guess, agent-trip, agent-trip-100m, gpu-dense, "
    assert f"; Keel comes with {comes}" in refused(Path("zzz"))
    assert "Keel" not in refused(tmp_path / "quikstart.yaml")
    with pytest.raises(ConfigError, match=r"no such file.*; Keel comes with quickstart, special"):
        load_distillation("zzz")
    with pytest.raises(ConfigError, match=r"no such file[^K]*$"):
        load_synthesis("zzz")  # none comes along
    (tmp_path / "latin.yaml").write_bytes(b"run: {dir: caf\xe9}")
    assert "cannot be read as UTF-8 text; save it" in refused(tmp_path / "latin.yaml")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert "is a file of data and no recipe; name a YAML file" in refused(tmp_path / "rows.jsonl")


def test_a_byte_order_mark_is_no_part_of_the_recipe(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "\ufeff" + RECIPE)).run.steps == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps", "write key=value"),
        ("=3", "write key=value"),
        ("--run.steps=3", "write 'run.steps=3', without dashes"),
        ("run.steps=[", "not valid YAML"),
        ("data.sources.7.size=1", "has no entry '7'; it has sums, gcds"),
        ("data.sources[sum].size=1", "did you mean data.sources[sums]?"),
        ("data.sources.0.name.x=1", "data.sources.0.name = 'sums' is a value, not a section"),
        ("run.dir=${run.nothing}", "Interpolation key 'run.nothing' not found"),
        ("run.dir=???", "Missing mandatory value"),
    ],
)
def test_a_malformed_override(tmp_path: Path, override: str, message: str) -> None:
    error = refused(write(tmp_path, RECIPE), override)
    assert message in error
    assert f"override {override!r}" in error


def test_references_are_resolved(tmp_path: Path) -> None:
    text = RECIPE + "run: {seed: 3, dir: 'runs/${run.seed}'}"
    assert load_config(write(tmp_path, text.partition("\n")[2])).run.dir == "runs/3"


AWKWARD = [
    "${run.seed}",
    "a\\${b}",
    "\\\\${",
    "${",
    "\\",
    "1e-6",
    "null",
    "yes",
    "0x10",
    "a: b",
    "'",
]
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner, max_size=2)
)


@settings(max_examples=12, deadline=None)
@given(system=texts, params=st.dictionaries(st.from_regex(r"[a-z]+", fullmatch=True), values))
@example(system="${", params={"awkward": AWKWARD})
def test_a_dumped_config_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, system: str, params: dict[str, Any]
) -> None:
    source = SourceConfig(
        name="a", source="reasoning_gym", task="gcd", size=3, system=system, params=params
    )
    config = Config(data=DataConfig(sources=(source,)))
    path = write(tmp_path_factory.getbasetemp(), dump_config(config), "dump.yaml")
    assert load_config(path) == config


def test_a_dump_names_every_knob(tmp_path: Path) -> None:
    dumped = yaml.safe_load(dump_config(load_config(write(tmp_path, RECIPE))))
    assert dumped["trainer"]["lr"] == 1e-6
    assert dumped["data"]["sources"][0]["holdout"] == 8


def test_the_shipped_recipes_load() -> None:
    folder = Path(__file__).parents[2] / "configs"
    for path in sorted(folder.glob("*.yaml")):
        assert load_config(path.stem) == load_config(path)


def test_a_reference_finds_a_default(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE)
    config = load_config(recipe, ["run.dir=runs/s${run.seed}", "run.steps=${algorithm.group_size}"])
    assert config.run.dir == "runs/s0"
    assert config.run.steps == config.algorithm.group_size


@pytest.mark.parametrize(
    "text", ["x: &a [*a]", "x: " + "[" * 1000, "x: " + "{a: " * 900 + "1" + "}" * 900]
)
def test_what_is_nested_too_deeply_is_named(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE + text)
    with pytest.raises(ConfigError, match=r"r\.yaml: nested too deeply, or an alias"):
        load_config(recipe)


def test_a_raised_digit_is_no_index(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE)
    with pytest.raises(ConfigError, match="has no entry '²'"):
        load_config(recipe, ["data.sources[²].size=5"])
