"""Recipes that would take for ever, say something else than they seem to, or end in a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keel.configs.load import load_config
from keel.configs.paths import data_path
from keel.configs.schema import ConfigError

SOURCE = "data: {sources: [{name: s, source: reasoning_gym, task: chain_sum, size: 8"


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(f"defaults: quickstart.yaml\n{text}")
    shipped = Path(load_config.__code__.co_filename).parent / "quickstart.yaml"
    (folder / "quickstart.yaml").write_text(shipped.read_text())
    return path


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, r"recipe.yaml: not valid YAML: its aliases stand for 100000 values or more"),
        ("a: &a [*a]", r"aliases|holds itself"),
        (f"run: {{seed: {'9' * 5000}}}", r"recipe.yaml:2: run.seed = 9{40}: has too many digits"),
        (f"run: {{seed: {'9' * 23}}}", r"recipe.yaml:2: run.seed: has 23 digits"),
        ("run: {steps: 1:30}", r"recipe.yaml:2: run.steps = 1:30: YAML reads it .* to base 60"),
        ("run: {seed: 0100}", r"recipe.yaml:2: run.seed = 0100: YAML reads it .* to base 8"),
        ('run: {dir: "a\\0b"}', r"recipe.yaml:2: run.dir = 'a\\x00b': holds a control character"),
        ("run: {steps: 1, steps: 2}", r"recipe.yaml:2: not valid YAML: found duplicate key"),
        ("rewards: {workers: 100000000}", r"rewards.workers = 100000000: must be 0 to 4096"),
        ("rewards: {code: {time_s: 1e300}}", r"rewards.code.time_s = 1e\+300: must be at most"),
        ("rewards: {judge: {base_url: 'http://[::1', model: m}}", r"base_url = .*Invalid IPv6"),
        (f"{SOURCE}, weight: 1e308}}]}}", r"weight = 1e\+308: must be 0 to 10000000"),
        (f"{SOURCE}999999999}}]}}", r"size = 8999999999: must be 0 to 10000000"),
    ],
)
def test_it_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(recipe(tmp_path, text))


def test_so_are_overrides(tmp_path: Path) -> None:
    path = recipe(tmp_path, "")
    with pytest.raises(ConfigError, match=r"override 'run.steps=1:30': YAML reads it"):
        load_config(path, ["run.steps=1:30"])
    bomb = "&a [x,x,x,x,x,x,x,x,x,x]"
    for name, above in zip("bcdefg", "abcdef", strict=True):
        bomb = f"[{bomb}, &{name} [{','.join([f'*{above}'] * 10)}]]"
    with pytest.raises(ConfigError, match="aliases stand for"):
        load_config(path, [f"data.sources={bomb}"])


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "circle.yaml").symlink_to(tmp_path / "circle.yaml")
    for base in (f"{tmp_path}/circle.yaml", "~nobody-of-this-name/x.yaml"):
        (tmp_path / "of.yaml").write_text(f"defaults: {base}\n")
        with pytest.raises(ConfigError, match=r"of.yaml:1: defaults: "):
            load_config(tmp_path / "of.yaml")
    with pytest.raises(ConfigError, match="home directory"):
        data_path("~nobody-of-this-name/x.jsonl")


def test_a_message_gives_a_terminal_no_orders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(recipe(tmp_path, 'run: {"\\e[31mred\\u202e\\a": 1}'))
    assert not re.search("[\x1b\x07\u202e]", str(raised.value)) and "red" in str(raised.value)


@pytest.mark.parametrize("tag", ["python/object/apply:os.system", "python/name:os.system"])
def test_a_recipe_runs_nothing(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ConfigError, match="not valid YAML: could not determine a constructor"):
        load_config(recipe(tmp_path, f"run: {{dir: !!{tag} ['touch {tmp_path}/ran']}}"))
    # OmegaConf's resolvers read variables of the environment, or call functions that are known.
    for text in ("${oc.env:HOME}", "${oc.decode:'[1]'}", "${eval:1}"):
        path = recipe(tmp_path, "run: {dir: '" + text.replace("'", "''") + "'}")
        with pytest.raises(ConfigError, match=r"recipe.yaml:2: run.dir: .* refer to knobs alone"):
            load_config(path)
    path.write_text("defaults: '${oc.env:HOME}'")
    with pytest.raises(ConfigError, match=r"defaults: .*/\$\{oc.env:HOME\}: no such file"):
        load_config(path)
    assert not (tmp_path / "ran").exists()
