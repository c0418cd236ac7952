"""Imports point one way without cycles, in-function imports included.

Each heavy library has one owner. Private parts of libraries are used in one file per library, which
checks them at start-up."""

import ast
import os
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml
from setuptools import find_packages

from keel.configs.load import _Loader
from keel.rewards.custom import _FOLDER, PREFIX, load_function

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "configs": set[str](),
    "rl": set[str](),
    "data": {"rl", "configs"},
    "rewards": {"rl", "configs"},
    "agents": {"rl", "configs"},
    "synthesis": {"rl", "configs", "agents", "rewards"},
    "examples": {"rl", "configs", "agents", "rewards", "synthesis", "commands"},
    "model": {"rl", "configs"},
    "weights": {"rl", "configs", "model"},
    "rollout": {"rl", "model", "configs", "weights"},
    "trainer": {"rl", "model", "configs", "weights"},
    "commands": {
        *("rl", "configs", "data", "rewards", "agents", "synthesis"),
        *("model", "weights", "rollout", "trainer"),
    },
}
WIRING = tuple(f"trainer/{name}.py" for name in ("build_agents", "prepare", "launch", "work_nodes"))
WIRING_ALSO = {"rollout", "rewards", "data", "agents"}
OWNERS = {
    "vllm": ("rollout/", "weights/", "model/batch_invariant/vllm_kernels.py"),
    "deepspeed": ("trainer/engine/",),
    "omegaconf": ("configs/load.py",),
    "mcp": ("agents/",),
    "jupyter_client": ("agents/",),
    "ray": ("commands/", "rollout/", "trainer/", "model/ray_timeouts.py", "weights/sender.py"),
    "transformers": ("commands/", "model/", "weights/", "rollout/", "trainer/"),
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> list[str]:
    found: list[str] = []
    blocks: list[ast.AST] = [parsed(path)]
    while blocks:  # statements occur in blocks only, so expressions are skipped
        node = blocks.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        for block in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, block, ())
            blocks += inner if isinstance(inner, list) else ()  # a lambda's body is an expression
    return found


def sources(*more: str) -> list[Path]:
    """Source files without shipped tasks, which are data."""
    return [
        path
        for package in (*MAY_IMPORT, *more)
        for path in sorted((ROOT / package).rglob("*.py"))
        if "shipped" not in path.parts
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] in ("__init__", "__main__") else parts
    return ".".join(parts if parts[0] == "benchmarks" else ("keel", *parts))


def wrong_imports(path: Path) -> Iterator[str]:
    name = name_of(path)
    package = name.split("/")[0]
    allowed = MAY_IMPORT[package] | {package} | (WIRING_ALSO if name in WIRING else set())
    for imported in imports_of(path):
        top, *rest = imported.split(".")
        if top in MAY_IMPORT:
            yield f"{name} imports {imported}: say keel.{imported}"
        if top == "keel" and rest and rest[0] not in allowed:
            yield f"{name} imports {imported}"
        if top in OWNERS and not name.startswith(OWNERS[top]):
            yield f"{name} imports {imported}"


def test_imports_point_one_way() -> None:
    assert [wrong for path in sources() for wrong in wrong_imports(path)] == []


WAITS = ("get", "put", "wait", "kill", "nodes", "init", "shutdown", "cancel")
RAY_ITSELF = {
    "trainer/placement/nodes.py": {"init"},  # local cluster with deadlines, or wrapped in `bounded`
    "rollout/engine/worker.py": {"cancel"},  # does not wait
    "trainer/placement/watchdog.py": {"remote"},  # on a background thread
    "trainer/placement/ray_internals.py": {"nodes"},  # `cluster_nodes` bounds the wait
}


def waits_of(path: Path) -> set[str]:
    text = path.read_text()
    if "ray." not in text and ".remote" not in text:
        return set()
    made = [node.func for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    names = [call for call in made if isinstance(call, ast.Attribute)]
    ray = {call.attr for call in names if getattr(call.value, "id", "") == "ray"}
    return (ray & {*WAITS}) | {call.attr for call in names if call.attr == "remote"}


def test_ray_calls_have_deadlines() -> None:
    found = {name_of(path): waits_of(path) for path in sources()}
    assert found.pop("model/ray_timeouts.py") >= {"get", "put", "wait"}
    wrong = {name: made - RAY_ITSELF.get(name, set()) for name, made in found.items()}
    assert not any(wrong.values()), "call keel.model.ray_timeouts instead"


def arrows(unit: Callable[[str], str]) -> dict[str, set[str]]:
    known = {module_of(path) for path in sources("benchmarks")}
    graph: dict[str, set[str]] = {}
    for path in sources("benchmarks"):
        here = module_of(path)
        for imported in imports_of(path):
            target = next((m for m in (imported, imported.rpartition(".")[0]) if m in known), None)
            if target and unit(target) != unit(here):
                graph.setdefault(unit(here), set()).add(unit(target))
    return graph


def folder_of(module: str) -> str:
    """Folder of a module; modules directly in a package count alone."""
    return ".".join(module.split(".")[: 2 if module.startswith("benchmarks") else 3])


@pytest.mark.parametrize("unit", [str, folder_of], ids=["modules", "folders"])
def test_no_import_cycles(unit: Callable[[str], str]) -> None:
    try:
        TopologicalSorter(arrows(unit)).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_test_folders_mirror_the_code() -> None:
    code = {name_of(path.parent) for path in sources("benchmarks")}
    root = ROOT / "tests"
    tests = {str(path.parent.relative_to(root)) for path in root.rglob("*.py")}
    assert tests - code == {".", "e2e", "gpu"}


def test_every_package_is_in_the_wheel() -> None:
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = set(find_packages(str(ROOT), include=find["find"]["include"]))
    folders = {path.parent.relative_to(ROOT).parts for path in sources()}
    assert packages == {"keel", *(".".join(("keel", *folder)) for folder in folders)}
    links = [path for path in (ROOT / "keel").iterdir() if path.is_symlink()]
    assert {path.name: os.readlink(path) for path in links} == {
        package: f"../{package}" for package in MAY_IMPORT
    }


FENCED = ("trainer", "model")
"""Packages with private parts of libraries in one file each; `rollout` has rules for vLLM."""
DEEPSPEED = "trainer/engine/deepspeed_internals.py"
NAMED = (
    DEEPSPEED,
    "model/batch_invariant/vllm_kernels.py",
    "model/layers/flash4.py",
    "model/torch_internals.py",
    "model/transformers_internals.py",
    "trainer/placement/ray_internals.py",
)
BY_IMPORT = ("trainer/placement/ray_internals.py",)
"""Files that import private modules by name at run time."""
LIBRARIES = ("torch", "transformers", "deepspeed", "ray")
OF_DEEPSPEED = re.compile(
    r"ds_(tensor|shape|id|numel|status|persist)|ipg_\w+|fp(16|32)_\w*(groups|partition)\w*"
    r"|bf?(16|it16)_groups\w*|\w*hp_grads?\w*|autoep_\w*group|basic_optimizer|empty_partition_cache"
    r"|offload_states|averaged_gradients|parameter_offload|group_name|ep_group|model_family"
)
"""Private DeepSpeed attributes without a leading underscore."""
CANDIDATE = re.compile(
    rf"(?<!\bself)(?<!\bcls)(?<!\bsuper\(\))\._|__(class|dict)__|(get|has|set|del)attr\("
    rf"|deepspeed\.\w|\.({OF_DEEPSPEED.pattern})\b"
)
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
OWN = ("self", "cls", "super")
PUBLIC = ("_replace", "_asdict", "_fields", "_exit")
"""Public names with an underscore, from named tuples and `os`."""


def private(name: str) -> bool:
    return name in ("__class__", "__dict__") or (name.startswith("_") and not name.endswith("__"))


def reached_for(path: Path) -> Iterator[str]:
    """Private attributes and modules of other libraries used in a file."""
    if not CANDIDATE.search(path.read_text()):
        return
    nodes = list(ast.walk(parsed(path)))
    ours = {node.attr for node in nodes if own(node)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from filter(undisclosed, (prefix + alias.name for alias in node.names))
        elif isinstance(node, ast.Attribute):
            name = node.attr
            hidden = private(name) and name not in ours and name not in PUBLIC
            if hidden or (OF_DEEPSPEED.fullmatch(name) and not own(node)):
                yield name
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
            texts = [name for name in names if isinstance(name, str)]
            yield from (t for t in texts if private(t) or OF_DEEPSPEED.fullmatch(t))


def own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in OWN


def undisclosed(module: str) -> bool:
    """Return True for private modules, and for anything inside DeepSpeed below its top level."""
    library, *inside = module.split(".")
    if library == "deepspeed":
        return len(inside) > 1 or (bool(inside) and inside[0].islower())
    return library in LIBRARIES and any(map(private, inside))


def test_internals_are_named_in_their_files_only() -> None:
    fenced = (p for p in sources() if name_of(p).startswith(FENCED))
    uses = {name_of(p): set(reached_for(p)) for p in fenced}
    assert {name: inside for name, inside in uses.items() if inside and name not in NAMED} == {}


def test_named_files_do_use_internals() -> None:
    uses = {name: set(reached_for(ROOT / name)) for name in NAMED}
    assert all(uses[name] for name in NAMED if name not in BY_IMPORT)
    assert {"ds_tensor", "_update_hp_grad", "__class__"} <= uses[DEEPSPEED]
    assert {"_world", "_set_pg_timeout", "_cdata"} <= uses["model/torch_internals.py"]
    assert all("ray._private.state" in (ROOT / name).read_text() for name in BY_IMPORT)


ENGINES = ("vllm", "deepspeed", "transformers")


def lines_of(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.e2e
@pytest.mark.parametrize(
    "modules",
    [
        {
            "keel.commands.cli": ("torch", "numpy", "ray", "omegaconf", *ENGINES),
            "keel.commands.reference": ("torch", "numpy", "rich", "yaml", "omegaconf"),
            "keel.commands.new": ("torch", "numpy", "ray", *ENGINES),
            "keel.trainer.loop": ("torch", "ray", *ENGINES),
            "keel.rewards.judge.service": ("torch", "openai", *ENGINES),
            "keel.rollout.engine.worker": ("torch", *ENGINES),
            "keel.trainer.learner": ("torch", *ENGINES),
            "keel.commands.chat": ("torch", *ENGINES),
            "keel.commands.serve": ("torch", *ENGINES),
        },
        {"keel.rl.losses": ("ray", *ENGINES), "keel.rollout.pool": ENGINES},
    ],
    ids=["without torch", "with torch"],
)
def test_light_modules_load_nothing_heavy(modules: dict[str, tuple[str, ...]]) -> None:
    program = (
        f"import importlib, sys\n"
        f"for module, absent in {modules!r}.items():\n"
        f"    importlib.import_module(module)\n"
        f"    print(module, *(name for name in absent if name in sys.modules))"
    )
    assert lines_of(program) == list(modules)


@pytest.mark.e2e
def test_invalid_recipe_is_refused_before_heavy_imports() -> None:
    source = "{name: a, source: jsonl, path: /nowhere/at-all.jsonl}"
    table = "{name: a, source: file, path: /nowhere/at-all.csv}"
    lines = ("check quikstart", "train quickstart trainer.lrr=1", "eval quickstart run.steps=0")
    lines += ("judge answers.jsonl --recipe quikstart", "sft sft-quickstart sft.epochs=many")
    lines += ("distill quikstart", "synthesize nothere.yaml", "knobs trainer.lrr")
    commands = [line.split() for line in lines]
    named = [
        ("check", "quickstart", "data.sources[spiral].rewards={corect: 1}"),
        ("train", "quickstart", "model.path=/nowhere/at-all"),
        ("eval", "quickstart", "model.path=/nowhere/at-all", "data.sources[spiral].size=8"),
        ("sft", "sft-quickstart", f"sft.sources=[{source}]"),
        ("train", "quickstart", f"data.sources=[{source}]"),
        ("train", "quickstart", f"data.sources=[{table}]"),
    ]
    heavy = ("torch", "ray", "matplotlib", "sympy", *ENGINES)
    program = (
        f"import sys; from keel.commands.cli import main\n"
        f"for commands, heavy in ({commands!r}, {('numpy', *heavy)!r}), ({named!r}, {heavy!r}):\n"
        f"    for command in commands:\n"
        f"        print('status', main(command), *(n for n in heavy if n in sys.modules))"
    )
    # A busy machine prints progress lines in between.
    statuses = [line for line in lines_of(program) if line.startswith("status ")]
    assert statuses == ["status 2"] * len(commands + named)


PICKLES = {"weights/channel.py", "trainer/engine/weights.py", "rewards/custom.py"}
"""Messages between ranks and engines of one run, and functions that the caller of `keel.train`
passes to the run's workers."""
RUNS_TEXT = {
    "agents/environments/general/author_code.py",
    "agents/env_runtime/fork_server.py",
    "rewards/code/call_driver.py",
}
"""Files that run inside a sandbox."""


WORDS = re.compile(
    r"from_pretrained|load\(|savez?|pickle|dill|joblib|marshal|yaml|popen|system\(|shell|eval\(|exec\("
)


@cache
def calls() -> list[tuple[str, str, dict[str, ast.expr]]]:
    results: list[tuple[str, str, dict[str, ast.expr]]] = []
    for path in (path for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))):
        if not WORDS.search(path.read_text()):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                keywords = {k.arg or "**": k.value for k in node.keywords}
                results.append((name_of(path), dotted(node.func), keywords))
    return results


def dotted(node: ast.expr) -> str:
    """Return `a.b.c`, or "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_false(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def test_models_bring_no_code() -> None:
    loaders = [c for c in calls() if c[1].endswith(".from_pretrained") and c[1].startswith("Auto")]
    assert len(loaders) > 5
    for file, name, keywords in loaders:
        options = ast.unparse(keywords["**"]) if "**" in keywords else ""
        safe = is_false(keywords.get("trust_remote_code")) or options in ("options",)
        assert safe or options.startswith("hub_options("), f"{file}: {name}"


def test_files_and_texts_run_no_code() -> None:
    for file, name, keywords in calls():
        if name == "torch.load":
            assert ast.unparse(keywords["weights_only"]) == "True", file
        if name in ("np.load", "numpy.load", "np.savez", "np.savez_compressed", "np.save"):
            assert is_false(keywords.get("allow_pickle")), file
        if name.partition(".")[0] in ("pickle", "cloudpickle", "dill", "joblib", "marshal"):
            assert file in PICKLES, f"{file}: {name}"
        assert name not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), file
        assert name not in ("os.system", "os.popen") and "shell" not in keywords, file
        assert name not in ("eval", "exec") or file in RUNS_TEXT, f"{file}: {name}"


def test_recipes_are_read_by_a_safe_loader() -> None:
    assert _Loader.__bases__ == (yaml.SafeLoader,)
    assert _Loader.yaml_constructors is yaml.SafeLoader.yaml_constructors


def test_recipe_cannot_name_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_FOLDER, str(tmp_path))
    (tmp_path / "python.x").mkdir()
    (tmp_path / "python.x" / "y.pkl").write_bytes(pickle.dumps(len))
    with pytest.raises(ValueError, match=r"keel\.train"):
        load_function(f"{PREFIX}x/y")


@pytest.mark.parametrize("kind", ["config", "tokenizer"])
def test_custom_model_code_never_runs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keel.configs.schema import ConfigError  # noqa: PLC0415
    from keel.model.load import load_model_config, load_tokenizer  # noqa: PLC0415

    ran = tmp_path / "ran"
    (tmp_path / "conf.py").write_text(f"open({str(ran)!r}, 'w')")
    auto = '"auto_map": {"AutoConfig": "conf.Own", "AutoTokenizer": ["conf.Own", null]}'
    (tmp_path / "config.json").write_text(f'{{"model_type": "own", {auto}}}')
    (tmp_path / "tokenizer_config.json").write_text(f'{{"tokenizer_class": "Own", {auto}}}')
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match="custom code"):
        (load_model_config if kind == "config" else load_tokenizer)(str(tmp_path))
    assert not ran.exists()
