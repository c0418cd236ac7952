"""The code never unpickles, executes or passes to a shell any input."""

from __future__ import annotations

import ast
import pickle
import re
from functools import cache
from pathlib import Path

import pytest

from keel.rewards.custom import FOLDER, PREFIX, load_function

ROOT = Path(__file__).parent.parent
FOLDERS = [
    "agents",
    "configs",
    "data",
    "model",
    "commands",
    "examples",
    "synthesis",
    "weights",
    "rewards",
    "rl",
    "rollout",
    "trainer",
]
PICKLES = {*("weights/channel.py", "trainer/engine/weights.py"), "rewards/custom.py"}
"""Messages between ranks and engines of one run, and functions that the caller of `keel.train`
passes to the run's workers."""
RUNS_TEXT = {
    "agents/environments/general/author_code.py",
    "agents/env_runtime/fork_server.py",
    "rewards/code/call_driver.py",
    "rewards/code/languages.py",
}
"""Files that run inside a sandbox."""


WORDS = re.compile(
    r"from_pretrained|load\(|savez?|pickle|dill|joblib|marshal|yaml|popen|system\(|shell|eval\(|exec\("
)
"""Quick text filter for files to parse."""


@cache
def calls() -> list[tuple[str, str, dict[str, ast.expr]]]:
    """File, dotted name and keywords of each call."""
    results: list[tuple[str, str, dict[str, ast.expr]]] = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not WORDS.search(text := path.read_text()):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call):
                    keywords = {k.arg or "**": k.value for k in node.keywords}
                    results.append((str(path.relative_to(ROOT)), dotted(node.func), keywords))
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


def test_files_are_not_pickled() -> None:
    for file, name, keywords in calls():
        if name == "torch.load":
            assert ast.unparse(keywords["weights_only"]) == "True", file
        if name in ("np.load", "numpy.load", "np.savez", "np.savez_compressed", "np.save"):
            assert is_false(keywords.get("allow_pickle")), file
        if name.partition(".")[0] in ("pickle", "cloudpickle", "dill", "joblib", "marshal"):
            assert file in PICKLES, f"{file}: {name}"


def test_recipe_cannot_name_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    (tmp_path / "python.x").mkdir()
    (tmp_path / "python.x" / "y.pkl").write_bytes(pickle.dumps(len))
    with pytest.raises(ValueError, match=r"keel\.train"):
        load_function(f"{PREFIX}x/y")


def test_yaml_makes_plain_data() -> None:
    for file, name, keywords in calls():
        assert name not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), file
        if name == "yaml.compose":
            assert ast.unparse(keywords["Loader"]) == "yaml.SafeLoader", file


def test_text_is_executed_in_sandboxes_only() -> None:
    for file, name, keywords in calls():
        assert name not in ("os.system", "os.popen") and "shell" not in keywords, file
        assert name not in ("eval", "exec") or file in RUNS_TEXT, f"{file}: {name}"


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
