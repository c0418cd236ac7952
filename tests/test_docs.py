"""Pages, links and quoted code of the documentation, checked without mkdocs. `make docs` runs its
strict build."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from keel.commands import new as new_recipe
from keel.commands.cli import main, parser
from keel.commands.reference import all_knobs, find_metric, pages, sections
from keel.configs.load import load_config
from keel.configs.shipped import shipped
from tests.trainer.machines import NOTHING, at

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.md")}
PAGES |= pages()  # `make docs` generates some
FENCE = re.compile(r"^(```+)(\w*)\n(.*?)^\1$", flags=re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """Remove fenced blocks and inline code, whose brackets are not links."""
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", FENCE.sub("", text))


def slug(heading: str) -> str:
    """Anchor of a heading, as GitHub and pymdownx generate it."""
    shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")


@cache
def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#{1,6} (.+)$", FENCE.sub("", PAGES[page]), flags=re.MULTILINE)
    return {slug(heading) for heading in headings}


class Tagged(yaml.SafeLoader):
    """Ignores the Python function that mkdocs.yml names."""


Tagged.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def in_nav(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for inner in entry.values() if isinstance(entry, dict) else entry * isinstance(entry, list):
        yield from in_nav(inner)


def test_every_page_is_in_the_navigation_once() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=Tagged)
    listed = Counter(in_nav(config["nav"]))
    assert set(listed) == {*PAGES, "python.ipynb"} and max(listed.values()) == 1


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page: str) -> None:
    for picture, target in re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", prose(PAGES[page])):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        name = page
        if path:
            file = (DOCS / page).parent.joinpath(path).resolve()
            assert file.is_file() or file.name in pages(), f"{page}: {target}"
            assert file.is_relative_to(DOCS), f"{page}: {target} is not on the site"
            name = file.relative_to(DOCS).as_posix()
        if picture:
            continue
        assert not anchor or anchor in anchors(name), f"{page}: {target}: no such heading"


def test_api_page_names_existing_members() -> None:
    text = PAGES["api.md"]
    blocks = re.split(r"^::: ", text, flags=re.MULTILINE)[1:]
    assert len(blocks) > 10
    for block in blocks:
        module = block.split()[0]
        path = ROOT / f"{module.removeprefix('keel.').replace('.', '/')}.py"
        path = ROOT / "commands/api.py" if module == "keel.commands.api" else path
        assert path.is_file(), module
        tree = ast.parse(path.read_text())
        there = {getattr(node, "name", "") for node in tree.body}
        there |= {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        listed = re.search(r"members: \[(.*)\]", block)
        assert not listed or set(listed[1].split(", ")) <= there, module


def known(name: str) -> bool:
    """Return True for the name of a knob, a section, or an entry in a table of names."""
    names = {knob.name for knob in all_knobs()} | {section.name for section in sections()}
    return name in names or f"{name}[]" in names or any(n.startswith(f"{name}.") for n in names)


KNOB = re.compile(
    r"`((?:run|model|data|rewards|rollout|agents|algorithm|trainer|alarms|eval|sft)\.[\w.\[\]]+)"
)
GUIDES = tuple(name for name in PAGES if name not in ("knobs.md", "metrics.md"))


def ours(page: str) -> Iterator[str]:
    """Lines about Keel: in tables of other frameworks' names, all columns but the first."""
    for line in PAGES[page].splitlines():
        yield line.split("|", 2)[2] if page == "coming-from.md" and line.startswith("|") else line


@pytest.mark.parametrize("page", GUIDES)
def test_guides_name_existing_knobs(page: str) -> None:
    wrong = [
        name
        for line in ours(page)
        for name in KNOB.findall(line)
        if not known(name) and not name.startswith("model.safetensors")
    ]
    assert wrong == []


METRICS = "agents|domain|eval|indexer|judge|kl|length|mask|mismatch|reward|routing|sampling|time"


@pytest.mark.parametrize("page", GUIDES)
def test_guides_name_existing_metrics(page: str) -> None:
    for name in re.findall(rf"`((?:{METRICS})/[\w@<>/]+)`", "\n".join(ours(page))):
        assert (ROOT / name).exists() or find_metric(name), name


# The commands and recipes of start.md and first-hour.md.


def blocks(page: str) -> list[tuple[str, str]]:
    return [(language, text) for _, language, text in FENCE.findall(PAGES[page])]


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 300 prompts in the format of the page."""
    folder = tmp_path_factory.mktemp("school")
    (rows,) = [text for language, text in blocks("start.md") if language == "json"]
    lines = [json.loads(line) for line in rows.splitlines()]
    assert all(line.keys() == {"question", "solution"} for line in lines)
    more = [
        {"question": f"{line['question']} ({n})", "solution": line["solution"]}
        for n in range(149)
        for line in lines
    ]
    text = "".join(json.dumps(row) + "\n" for row in [*lines, *more])
    (folder / "school.jsonl").write_text(text)
    return folder


def test_start_page_matches_keel_new_and_check(
    school: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(school)
    monkeypatch.setattr(new_recipe, "gpus_here", lambda: (0, 0.0))
    commands = [
        words
        for language, text in blocks("start.md")
        if language == "sh"
        for line in text.splitlines()
        if (words := shlex.split(line, comments=True))
    ]
    taken: list[SimpleNamespace | Any] = [
        parser().parse_args(words[1:]) for words in commands if words[0] == "keel"
    ]
    assert [arguments.command for arguments in taken] == [
        *("doctor", "new", "check", "check", "train", "watch", "eval", "eval", "report")
    ]
    assert new_recipe.new(taken[1], lambda _: 0) == 0
    shown = next(t for language, t in blocks("start.md") if language == "yaml")
    longest = re.compile(r"the longest seen has \d+ bytes")
    assert longest.sub("", Path("school.yaml").read_text()) == longest.sub("", shown)
    for arguments in taken:
        if getattr(arguments, "recipe", "") == "school.yaml":
            load_config(arguments.recipe, arguments.override)
    # The whole check except the model, which would come from the hub.
    with at(NOTHING):
        few = ["model.path=tiny", "model.tiny.cold_start.steps=0", "run.device=cpu"]
        few += ["run.gpu_gib=0", "run.gpus_per_node=0", "rollout.sampling.max_tokens=64"]
        assert main(["check", "school.yaml", *few]) == 0, capsys.readouterr().err
    assert "270 to train on, 30 held out" in capsys.readouterr().out


def test_first_hour_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new_recipe, "gpus_here", lambda: (0, 0.0))
    (table,) = [text for language, text in blocks("first-hour.md") if language == "csv"]
    head, *rows = table.splitlines()
    Path("sums.csv").write_text(
        "\n".join([head, *(f"{n}: {row}" for n in range(99) for row in rows)])
    )
    lines = [
        t
        for language, text in blocks("first-hour.md")
        if language == "sh"
        for t in text.splitlines()
    ]
    taken: list[Any] = [
        parser().parse_args(words[1:]) for words in map(shlex.split, lines) if words[0] == "keel"
    ]
    for arguments in taken:
        if arguments.command == "new":
            assert new_recipe.new(arguments, lambda _: 0) == 0
        elif getattr(arguments, "recipe", "").endswith(("words.yaml", "sums.yaml")):
            load_config(arguments.recipe, arguments.override)
    assert load_config("words.yaml").run.dir == "runs/spell_backward"
    assert load_config("sums.yaml").data.sources[0].columns == {"prompt": "question"}


def test_start_page_reward_works(school: Path) -> None:
    (code,) = [text for language, text in blocks("start.md") if language == "python"]
    (first, second) = [text for language, text in blocks("start.md") if language == "yaml"]
    names: dict[str, Any] = {}
    exec(compile(code, "my_rewards.py", "exec"), names)
    worths: Mapping[int, float] = {10: 1.0, 50: 1.0, 75: 0.5, 100: 0.0, 400: 0.0}
    for words, worth in worths.items():
        assert names["brief"](None, SimpleNamespace(answer="word " * words)) == worth
    assert yaml.safe_load(first)["data"]["sources"][0].keys() >= {"rewards", "answer_after"}
    path = school / "second.yaml"
    path.write_text(second)
    assert load_config(path).data.sources[0].rewards == {"correct": 1.0, "my_rewards.brief": 0.2}


def test_recipe_from_shipped_defaults_loads(school: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(school)
    (mine,) = [text for language, text in blocks("recipes.md") if language == "yaml"]
    Path("mine.yaml").write_text(mine)
    config, shelf = load_config("mine.yaml"), load_config("qwen3-8b-8x80")
    assert (config.run.steps, config.run.gpu_gib) == (500, shelf.run.gpu_gib)
    for language, text in blocks("recipes.md"):
        for line in text.splitlines() * (language == "sh"):
            load_config(parser().parse_args(line.split()[1:]).recipe)


def test_start_page_names_shipped_recipes() -> None:
    named = re.findall(r"`defaults: ([\w.-]+)`", PAGES["start.md"])
    assert named and set(named) <= set(shipped())
