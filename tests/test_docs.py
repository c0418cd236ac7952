"""Names and quoted code in README and documentation; `make docs` checks links and navigation."""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs.reference_pages import pages
from keel.commands.cli import main, parser
from keel.commands.reference import _all_knobs, _find_metric, sections
from keel.configs.load import load_config
from keel.model.tiny.tokenizer import build_tokenizer
from tests.model.stand_in import stand_in
from tests.trainer.machines import NOTHING, Accepted, Machine, at

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.md")}
PAGES |= pages()  # `make docs` generates some
FENCE = re.compile(r"^(```+)(\w*)\n(.*?)^\1$", flags=re.MULTILINE | re.DOTALL)


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
        assigned = [node.targets for node in tree.body if isinstance(node, ast.Assign)]
        there |= {getattr(target, "id", "") for targets in assigned for target in targets}
        listed = re.search(r"members: \[(.*)\]", block)
        assert not listed or set(listed[1].split(", ")) <= there, module


def known(name: str) -> bool:
    names = {knob.name for knob in _all_knobs()} | {section.name for section in sections()}
    return name in names or f"{name}[]" in names or any(n.startswith(f"{name}.") for n in names)


KNOB = re.compile(
    r"`((?:run|model|data|rewards|rollout|agents|algorithm|trainer|alarms|eval|sft)\.[\w.\[\]]+)"
)
GUIDES = tuple(name for name in PAGES if name not in ("knobs.md", "metrics.md"))


def ours(page: str) -> Iterator[str]:
    """Lines about Keel: in tables of other frameworks' names, all columns but the first."""
    for line in PAGES[page].splitlines():
        yield line.split("|", 2)[2] if page == "coming-from.md" and line.startswith("|") else line


METRICS = "agents|domain|eval|indexer|judge|kl|length|mask|mismatch|reward|routing|sampling|time"


def test_guides_name_existing_knobs_metrics_and_commands() -> None:
    for page in GUIDES:
        text = "\n".join(ours(page))
        names = [name for name in KNOB.findall(text) if not name.startswith("model.safetensors")]
        assert [name for name in names if not known(name)] == [], page
        for name in re.findall(rf"`((?:{METRICS})/[\w@<>/]+)`", text):
            assert (ROOT / name).exists() or _find_metric(name), (page, name)
        for _, language, text in FENCE.findall(PAGES[page]):
            for line in text.replace("\\\n", " ").splitlines() * (language == "sh"):
                words = shlex.split(line, comments=True)
                if words[:1] == ["keel"]:
                    parser().parse_args(words[1:])


TEXT = (ROOT / "README.md").read_text()
BLOCKS = [
    (language, text.rstrip("\n"))
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
]


QUICK = ["data.sources[logic].size=40", "data.sources[logic].holdout=16"]


def block(start: str) -> str:
    (text,) = [text for _, text in BLOCKS if text.lstrip().startswith(start)]
    return text


def commands(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def test_named_paths_exist() -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", TEXT)
    files = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", TEXT)
    assert len(links) > 20 and len(files) > 4
    assert [path for path in (*links, *files) if not (ROOT / path).exists()] == []


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with README's `my.yaml`, its data, and empty weights of its model and of a shallow
    model, which takes a tenth of the time."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my.yaml").write_text(block("# my.yaml"))
    (line,) = re.findall(r"A line of `school.jsonl` is `([^`]*)`", TEXT)
    prompts = (f"What is 42 + {i} - {i}?" for i in range(300))
    lines = [json.dumps({**json.loads(line), "prompt": prompt}) for prompt in prompts]
    (folder / "school.jsonl").write_text("\n".join(lines))
    shape = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 4}
    shape |= {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
    shape |= {"vocab_size": 151_936, "max_position_embeddings": 40_960}
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    for name, layers in (("Qwen3-30B-A3B", 48), ("shallow", 2)):
        model = folder / name
        model.mkdir()
        (model / "config.json").write_text(
            json.dumps({**kind, **shape, "num_hidden_layers": layers})
        )
        build_tokenizer().save_pretrained(model)
        stand_in(model)
    return folder


@pytest.mark.e2e
def test_my_yaml_is_accepted_for_its_hardware(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(mine)
    config = load_config("my.yaml")
    assert Path(config.model.path).name == "Qwen3-30B-A3B"
    model, shallow = (f"model.path={mine / name}" for name in ("Qwen3-30B-A3B", "shallow"))
    node = Machine(gpus=config.run.gpus_per_node, nodes=config.run.nodes, gib=config.run.gpu_gib)
    seen: list[str] = []
    for _, command, *arguments in commands(block("keel check my.yaml")):
        seen.append(command)
        if command == "check":
            with at(NOTHING):
                assert main([command, *arguments, model, *QUICK]) == 0, capsys.readouterr().err
        else:
            with at(node), pytest.raises(Accepted):
                main([command, *arguments, shallow, *QUICK])
    assert seen == ["check", "train", "eval"]
    output = capsys.readouterr().out
    assert "1 node(s) of 8 GPU(s), 139.0 GiB each" in output
    assert "8 trainer rank(s)" in output, output
    assert "school (school.jsonl): 100 to train on, 200 held out" in output


RAYJOB = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "rayClusterSpec"},
    "rayClusterSpec": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {
        *("groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template")
    },
}
"""Fields of KubeRay's `ray.io/v1` RayJob that the manifest uses, by parent."""


@pytest.mark.e2e
def test_cluster_files_are_valid() -> None:
    from ray.scripts.scripts import start as ray_start  # noqa: PLC0415  (slow to load)

    fences = {text.splitlines()[0]: text for _, _, text in FENCE.findall(PAGES["clusters.md"])}
    manifest = yaml.safe_load(fences["apiVersion: ray.io/v1"])
    spec = manifest["spec"]
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    used = {
        "": manifest,
        "spec": spec,
        "rayClusterSpec": cluster,
        "headGroupSpec": groups[0],
        "workerGroupSpecs": groups[1] | groups[2],
    }
    assert manifest["kind"] == "RayJob"
    assert {parent: set(fields) for parent, fields in used.items()} == RAYJOB
    assert f'"ray[default]=={cluster["rayVersion"]}"' in (ROOT / "pyproject.toml").read_text()
    start = {option for each in ray_start.params for option in each.opts}
    for group in groups:
        assert {f"--{name}" for name in group["rayStartParams"]} <= start
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in group["template"]["spec"]["volumes"]
        }
    script = fences["#!/bin/bash"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    used_options = re.findall(r"(--[\w-]+)", " ".join(re.findall(r"ray start (.*)", script)))
    assert used_options and set(used_options) <= start
    for line in (spec["entrypoint"], re.search(r"^keel .*?(?= &$)", script, re.M | re.S)[0]):  # type: ignore[index]
        words = shlex.split(line.replace("\\\n", " "))
        parser().parse_args(words[1:])
        knobs = [word.partition("=")[0] for word in words if "=" in word]
        assert knobs and all(map(known, knobs))
