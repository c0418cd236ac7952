"""Recipes: a YAML file and `key=value` overrides become a `Config`. OmegaConf lives only here.

    defaults: base.yaml          # optional: start from that recipe, found relative to this one, or
                                 # from one that comes with Keel, by its bare name: quickstart
    trainer: {lr: 3e-6}

Order: the schema's defaults, `defaults:` (and its own), the recipe, the overrides. Sections are
merged, lists replaced. An override of a section, or of a list's entry, sets the knobs that it names
and leaves the others as they are: `run={steps: 3}` is `run.steps=3`. An override of a knob replaces
its value, also a list, and what has keys of a user's (`rewards`). `${run.seed}` refers to another
knob; text that needs a literal `${` writes `\\${`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from keel.configs.auto import spelled_out, taken_out
from keel.configs.convert import build
from keel.configs.diff import RESUMABLE_KNOBS, check_resumable, diff_configs, flatten_config
from keel.configs.distillation import DistillConfig
from keel.configs.dump import dump_config, escaped, quoted
from keel.configs.schema import Config, ConfigError
from keel.configs.sections.data import ROWS
from keel.configs.shipped import find, placed, text_of
from keel.configs.suggest import knob_types, knobs_in, section_type
from keel.configs.synthesis import SynthesisConfig
from keel.configs.yaml_guards import calls, cut_off, lookalike, misread, tree_of

__all__ = [
    "RESUMABLE_KNOBS",
    "check_resumable",
    "diff_configs",
    "dump_config",
    "flatten_config",
    "load_config",
    "load_distillation",
    "load_recipe",
    "load_synthesis",
    "spelled_apart",
]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The recipe at `path` with `key=value` overrides applied in order.

    A bare name without a suffix is a recipe of this package: `quickstart`.
    Keys are dotted; an entry of a list is named by its index or its name: `data.sources.0.size=64`
    or `data.sources[chain_sum].size=64`; the name of a reward function is one key,
    `data.sources.0.rewards.my_rewards.brief=0.5`. Values are YAML.

    Raises ConfigError naming the file and line (or the override), the knob and the cure.
    """
    return load_recipe(path, overrides)[0]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, frozenset[str]]:
    """As `load_config`, and the knobs that the recipe leaves to the hardware and the model
    (`keel.configs.auto`): the config has their values for a CPU."""
    tree, where, recipe = _tree(Config, Path(path), overrides)
    tree, left = taken_out(tree)
    return build(Config, tree, where, recipe), left


def load_synthesis(path: str | Path, overrides: Sequence[str] = ()) -> SynthesisConfig:
    """As `load_config` has it, the recipe of `keel synthesize`; none comes along."""
    return build(SynthesisConfig, *_tree(SynthesisConfig, Path(path), overrides, "synthesize/"))


def load_distillation(path: str | Path, overrides: Sequence[str] = ()) -> DistillConfig:
    """As `load_config` has it, the recipe of `keel distill`; bare names are of its own folder."""
    return build(DistillConfig, *_tree(DistillConfig, Path(path), overrides, "distill/"))


def _tree(
    root: type, path: Path, overrides: Sequence[str], folder: str = ""
) -> tuple[dict[str, Any], dict[str, str], str]:
    """Plain data, the file and line that set each key, and the recipe's name. folder: of this
    package, in which recipes of the kind come along."""
    recipe = find(path, folder)
    layers, where = _read(recipe, (), folder)
    if root is not Config and (own := {"data", "model", "trainer"} & layers[-1].keys()):
        raise ConfigError(
            f"{where[min(own)]}: {min(own)}: is a section of the recipes of `keel train`; this "
            f"command takes another kind, of {', '.join(field.name for field in fields(root))}"
        )
    try:
        tree: dict[str, Any] = {}
        for layer in layers:
            tree = _merged(tree, layer)
        for override in overrides:
            steps, value, origin = _parsed(override)
            _check_entries(tree, steps, origin)
            for knob, one in knobs_in(root, steps, value):
                _set_knob(tree, where, knob, one, origin)
        if root is Config:
            tree = spelled_out(_with_eval_file(tree, where))
        if (key := calls(tree)) is not None:
            raise ConfigError(
                f"{where.get(key, recipe)}: {key}: ${{…:…}} would call a function or read the "
                "environment, whose secrets are not for a run's folder; refer to knobs alone "
                "(write a literal ${ as \\${)"
            )
        if _refers(tree):  # OmegaConf takes longer over it than all the rest does
            whole = OmegaConf.create(_with_defaults(root, tree))
            resolved = OmegaConf.to_container(whole, resolve=True, throw_on_missing=True)
            tree = cast(dict[str, Any], resolved)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, where, str(recipe))) from error
    except (RecursionError, UnicodeEncodeError) as error:
        raise ConfigError(f"{recipe}: cannot be read: {error}") from error
    return tree, where, str(recipe)


OF_THE_FILE = frozenset(
    {"name", "source", "path", "split", "subset", "size", "holdout", "weight", "domain"}
    | {"pass_rates", "least_pass_rate", "most_pass_rate"}
)
"""Knobs of a source that say which rows it has; the others say how rows are read and scored."""


def _with_eval_file(tree: dict[str, Any], where: dict[str, str]) -> dict[str, Any]:
    """Turn `eval.file` into a source that is held out as a whole, read as the first source of rows
    is."""
    if not isinstance(tree.get("eval"), dict) or not isinstance(tree.get("data"), dict):
        return tree
    section, data = cast(dict[str, Any], tree["eval"]), cast(dict[str, Any], tree["data"])
    path = section.get("file")
    if not isinstance(path, str) or not path or not isinstance(data.get("sources"), list):
        return tree
    sources = cast(list[Any], data["sources"])
    others = [cast(dict[str, Any], one) for one in sources if isinstance(one, dict)]
    rows = next((one for one in others if one.get("source") in ROWS), dict[str, Any]())
    name = Path(path).name.partition(".")[0] or "eval"
    names = [one.get("name") for one in others]
    source = {
        **{knob: value for knob, value in rows.items() if knob not in OF_THE_FILE},
        "name": f"{name}-eval" if name in names else name,
        "source": "jsonl" if path.endswith(".jsonl") else "file",
        "path": path,
        "holdout": "all",
    }
    where[f"data.sources.{len(sources)}"] = where.get("eval.file", "")
    inner = {knob: value for knob, value in section.items() if knob != "file"}
    data = {**data, "sources": [*sources, source]}
    if isinstance(only := data.get("only"), list) and only:
        data["only"] = [*cast(list[Any], only), source["name"]]
    return {**tree, "eval": inner, "data": data}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Sections merged, everything else replaced by what `above` has. (OmegaConf's own merge raises
    a TypeError where a section stands in the place of a list: here the schema will name it.)"""
    both = dict(below)
    for key, value in above.items():
        old = below.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merged(cast(dict[str, Any], old), cast(dict[str, Any], value))
        if value != "???" or key not in below:
            both[key] = value
    return both


def _refers(value: Any) -> bool:
    """Whether anything in it has to be resolved: a `${…}` or a `???`."""
    if isinstance(value, dict):
        return any(map(_refers, cast(dict[Any, Any], value).values()))
    if isinstance(value, list):
        return any(map(_refers, cast(list[Any], value)))
    return isinstance(value, str) and ("${" in value or value == "???")


def _with_defaults(section: type, tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with the defaults of what it leaves out, so that `${run.seed}` finds them."""
    hints, complete = knob_types(section), dict(tree)
    for field in fields(section):
        inner = section_type(hints[field.name])
        given = tree.get(field.name, {} if field.default_factory is not MISSING else None)
        if inner is not None and inner is hints[field.name] and isinstance(given, dict):
            complete[field.name] = _with_defaults(inner, cast(dict[str, Any], given))
        elif field.name not in tree and inner is None and field.default is not MISSING:
            complete[field.name] = escaped(field.default)
    return complete


def _read(
    path: Path, trail: tuple[Path, ...], folder: str = ""
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The recipe's layers, its ancestors first, and the file and line that set each key. folder: as
    `_tree` has it."""
    path, real = placed(path)
    if real in trail:
        raise ConfigError(f"{path}: `defaults` goes round in a circle")
    text = text_of(path, folder)
    lines: dict[str, str] = {}
    nodes: Sequence[_Placed] = ()
    try:
        root = _composed(text)
        if root is None:
            raise ConfigError(f"{path}:1: a recipe is made of `section:` and `key: value` lines")
        nodes = root
        lines = {key: f"{path}:{line}" for key, _, line in nodes}
        for key, node, line in nodes:
            if problem := misread(node):
                raise ConfigError(f"{path}:{line}: {key} = {node.value[:40]}: {problem}")
        layer = _copied(_values(text))
    except yaml.YAMLError as error:
        said = f"{_reason(error)}{lookalike(error, text)}"
        raise ConfigError(f"{path}{_mark(error)}: not valid YAML: {said}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, lines, str(path))) from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply, or an alias that holds itself") from error
    if "defaults" not in layer:
        return [layer], lines
    base = layer.pop("defaults")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{lines['defaults']}: defaults = {base!r}: must be the path of a recipe")
    beside = path.parent / base
    try:
        ancestors, base_lines = _read(
            beside if beside.exists() else find(Path(base), folder, beside), (*trail, real)
        )
    except ConfigError as error:
        raise ConfigError(f"{lines['defaults']}: defaults: {error}") from error
    replaced = tuple(
        f"{key}." for key, value, _ in nodes if not isinstance(value, yaml.MappingNode)
    )
    kept = {key: line for key, line in base_lines.items() if not key.startswith(replaced)}
    return [*ancestors, layer], kept | lines


_Placed = tuple[str, yaml.Node, int]
"""A dotted key, its value and its line."""


# Parsing is most of what loading takes, and tests load few recipes many times.
@lru_cache(maxsize=64)
def _composed(text: str) -> Sequence[_Placed] | None:
    """None: it is no mapping. (By PyYAML's own parser: libyaml's ends the process where brackets
    are nested deeply.)"""
    root = tree_of(text)
    return tuple(_nodes(root)) if root is None or isinstance(root, yaml.MappingNode) else None


@lru_cache(maxsize=64)
def _values(text: str) -> dict[str, Any]:
    """Not to be changed: it is shared."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(text)))


@lru_cache(maxsize=256)
def _overriding(text: str) -> tuple[str, Any]:
    """What is wrong with what stands behind an override's `=`, or ""; and its value. Not to be
    changed: it is shared."""
    node = tree_of(text)
    if node is not None and (problem := misread(node) or cut_off(node, text)):
        return problem, None
    # from_dotlist rather than yaml.safe_load: values then mean what they mean in a recipe.
    parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return "", cast(dict[str, Any], parsed)["value"]


def _copied(value: Any) -> Any:
    """Plain data of its own."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in cast(dict[Any, Any], value).items()}
    return [_copied(one) for one in cast(list[Any], value)] if isinstance(value, list) else value


def _nodes(node: yaml.Node | None, key: str = "") -> Iterator[_Placed]:
    """Everything below `node`."""
    children: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(name.value), name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), value, value) for index, value in enumerate(node.value)]
    for name, mark, value in children:
        child = f"{key}.{name}".lstrip(".")
        yield child, value, mark.start_mark.line + 1
        yield from _nodes(value, child)


def _mark(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f":{error.problem_mark.line + 1}"
    return ""


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        if error.problem.startswith("expected <block end>"):
            return "it is indented otherwise than the lines around it"
        return f"{error.problem} ({error.context})" if error.context else error.problem
    return str(error)


def _explain(error: OmegaConfBaseException, where: dict[str, str], recipe: str) -> str:
    """A reference that cannot be resolved, or a value left as `???`."""
    key = error.full_key or ""
    reason = str(error).strip().partition("\n")[0]
    return f"{where.get(key, recipe)}: {key or 'a value'}: {reason} (write a literal ${{ as \\${{)"


def spelled_apart(overrides: Sequence[str]) -> list[str]:
    """The same with a knob each: `run={steps: 3, seed: 1}` as `run.steps=3` and `run.seed=1`. One
    that names no knob, or what cannot be said so, stays as it is written. Raises ConfigError for
    what is no override."""
    return [one for override in overrides for one in _apart(override)]


def _apart(override: str) -> list[str]:
    steps, value, _ = _parsed(override)
    key, found = override.partition("=")[0].strip(), list[str]()
    for knob, one in knobs_in(Config, steps, value):
        inner = "".join(f"[{k}]" if "." in k else f".{k}" for k in knob[len(steps) :])
        try:
            text = f"{key}{inner}={quoted(one)}" if inner else override
            if _parsed(text)[:2] != (knob, one):
                return [override]
        except (TypeError, ConfigError):  # bytes, and keys that no knob has
            return [override]
        found.append(text)
    return found or [override]


def _parsed(override: str) -> tuple[list[str], Any, str]:
    """Key, value, and what messages call it. Raises ConfigError."""
    origin = f"override {override!r}"
    key, equals, text = override.partition("=")
    key = key.strip()
    if key.startswith("-"):
        raise ConfigError(f"{origin}: write {override.lstrip('-')!r}, without dashes")
    if not equals or not (steps := _steps_of(key)):
        raise ConfigError(f"{origin}: write key=value without spaces, such as run.steps=20")
    try:
        problem, shared = _overriding(text)
    except RecursionError as error:
        raise ConfigError(f"{origin}: nested too deeply") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not valid YAML: {_reason(error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, {}, origin)) from error
    if problem:
        raise ConfigError(f"{origin}: {problem}")
    return steps, _copied(shared), origin


_STEP = re.compile(r"\[([^\]]+)\]|([^.\[\]]+)")


def _steps_of(key: str) -> list[str]:
    """`data.sources[sums].size` as data, sources, sums and size; none where it is no key. The name
    of a reward function (`data.sources.0.rewards.my_rewards.brief`) is one."""
    steps = [bracketed or plain for bracketed, plain in _STEP.findall(key)]
    named = steps[:2] == ["data", "sources"] and steps[3:4] == ["rewards"] and len(steps) > 5
    return [*steps[:4], ".".join(steps[4:])] if named else steps


def _check_entries(tree: dict[str, Any], steps: Sequence[str], origin: str) -> None:
    """Raises ConfigError for an entry that a list has not, whatever is to be set in it."""
    node: Any = tree
    for position, step in enumerate(steps):
        if isinstance(node, list):
            items = cast(list[Any], node)
            node = items[_index(items, step, ".".join(steps[:position]), origin)]
        elif isinstance(node, dict):
            node = cast(dict[str, Any], node).get(step)


def _set_knob(
    tree: dict[str, Any], where: dict[str, str], steps: Sequence[str], value: Any, origin: str
) -> None:
    """One knob in `tree`, and in `where` that the override did."""
    node: Any = tree
    done: list[str] = []
    for position, step in enumerate(steps):
        last = position == len(steps) - 1
        if isinstance(node, list):
            items = cast(list[Any], node)
            index = _index(items, step, ".".join(done), origin)
            done.append(str(index))
            if last:
                items[index] = value
            node = items[index]
        elif isinstance(node, dict):
            section = cast(dict[str, Any], node)
            done.append(step)
            if last:
                section[step] = value
            elif section.get(step) is None:
                section[step] = {}
            node = section[step]
        else:
            raise ConfigError(f"{origin}: {'.'.join(done)} = {node!r} is a value, not a section")
    whole = ".".join(done)
    for replaced in [known for known in where if known.startswith(f"{whole}.")]:
        del where[replaced]
    where[whole] = origin


def _index(items: list[Any], step: str, at: str, origin: str) -> int:
    """Position of the entry that `step` names by index or by `name`."""
    names = [
        str(cast(dict[str, Any], item).get("name", i)) if isinstance(item, dict) else str(i)
        for i, item in enumerate(items)
    ]
    if step in names:
        return names.index(step)
    if step.isdecimal() and int(step) < len(items):
        return int(step)
    near = difflib.get_close_matches(step, names, n=1)
    hint = f"did you mean {at}[{near[0]}]?" if near else f"it has {', '.join(names)}"
    raise ConfigError(f"{origin}: {at} has no entry {step!r}; {hint}")
