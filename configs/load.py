"""Load a recipe (YAML) and `key=value` overrides into a `Config`. Only this file uses OmegaConf.

    defaults: base.yaml          # optional base recipe: a path relative to this file, or the bare
                                 # name of a recipe that comes with Keel
    trainer: {lr: 3e-6}

Later values replace earlier ones, in this order: schema defaults, `defaults:` (recursively), the
recipe, overrides. Sections are merged and lists are replaced. An override of a section sets only
the knobs it names: `run={steps: 3}` is the same as `run.steps=3`. `${run.seed}` refers to another
knob. Write `\\${` for a literal `${`. All unknown keys and wrong types are reported together.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, fields
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import yaml

from keel.configs.paths import find_recipe, read_recipe
from keel.configs.schema import (
    AUTO,
    AUTO_KNOBS,
    Config,
    ConfigError,
    EvalConfig,
    RolloutConfig,
    SamplingConfig,
    Section,
)
from keel.configs.sections.base import is_removed_default, knob_types, section_type, suggest
from keel.configs.sections.data import ROWS

C = TypeVar("C", bound=Section)

_MOST_VALUES = 100_000
"""Maximum number of values in a recipe after expanding its YAML aliases."""
_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{(?:\s*(\w[\w.\[\]-]*)\s*\})?")
"""Matches a reference such as `${run.seed}`, with its key as the group. The group is empty for
anything else that OmegaConf would resolve, such as `${oc.env:HOME}`."""
_MOST_GROWTH = 10_000
"""Maximum factor by which references may multiply a text or a list."""
_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
_NAMES = (
    "allowed_token_ids bad_words beam_width best_of frequency_penalty guided_decoding guided_json "
    "guided_regex length_penalty logit_bias logits_processor logits_processors min_new_tokens "
    "min_p min_tokens no_repeat_ngram_size num_beams presence_penalty repetition_penalty "
    "structured_outputs thinking_token_budget typical_p use_beam_search"
)
_UNRECORDED = frozenset(_NAMES.split())
"""Sampling options that change the distribution in a way the trainer cannot replay."""
_STEP_KNOBS = ("eval.checkpoint", "filter.checkpoint")
"""Text knobs that may hold a step number, which YAML reads as an integer."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
_INVALID: Any = object()
"""Placeholder for a value whose error has already been reported."""
_ROW_KNOBS = frozenset(
    ("name", "source", "path", "split", "subset", "size", "holdout", "weight", "domain")
)
"""Knobs that define which rows of a source are used. The others define how rows are read and
scored."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the recipe at `path` and apply `key=value` overrides in order. `path` is a file, or the
    bare name of a recipe that comes with Keel.

    Override keys are dotted. List entries are addressed by index or name:
    `data.sources[chain_sum].size=64`. The dotted name of a reward function is a single key:
    `data.sources.0.rewards.my_rewards.brief=0.5`. Values are YAML.

    Raises ConfigError with the file and line (or the override) of each problem.
    """
    return load_recipe(path, overrides)[0]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, frozenset[str]]:
    """Load a recipe like `load_config`, but also return the names of its `auto` knobs. In the
    config, these knobs have their CPU defaults."""
    tree, where, recipe = _tree(Config, Path(path), overrides)
    tree, auto = _without_auto(tree)
    return _build_config(Config, tree, where, recipe), auto


def load_as(root: type[C], path: str | Path, overrides: Sequence[str] = ()) -> C:
    """Load a recipe of another command, such as a `DistillConfig`. Takes the same arguments as
    `load_config`."""
    return _build_config(root, *_tree(root, Path(path), overrides))


def _tree(
    root: type[Section], path: Path, overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str], str]:
    """Merge a recipe's layers and overrides, and resolve its references. Also returns the place
    where each key is set, and the recipe's path."""
    recipe = find_recipe(path, root.RECIPES)
    layers, where = _read_layers(recipe, (), root.RECIPES)
    if root is not Config and (foreign := {"data", "model", "trainer"} & layers[-1].keys()):
        raise ConfigError(
            f"{where[min(foreign)]}: {min(foreign)}: belongs to recipes of `keel train`. This "
            f"command takes {', '.join(field.name for field in fields(root))}"
        )
    tree: dict[str, Any] = {}
    for layer in layers:
        tree = _merge(tree, layer)
    for override in overrides:
        steps, value, origin = _parse_override(override)
        for knob, one in _split_section(root, steps, value):
            _set_knob(tree, where, knob, one, origin)
    if root is Config:
        tree = _with_eval_file(tree, where)
    return _resolve_references(root, tree, where, str(recipe)), where, str(recipe)


def _resolve_references(
    root: type[Section], tree: dict[str, Any], where: Mapping[str, str], recipe: str
) -> dict[str, Any]:
    """Replace references such as `${run.seed}`. Raises ConfigError if one can't be resolved, or if
    a value was left as `???`."""
    texts = list(_strings(tree))
    counts: dict[str, int] = {}
    targets: set[str] = set()
    for key, text in texts:
        found: list[str] = _REFERENCE.findall(text)
        if "" in found:
            raise ConfigError(
                f"{where.get(key, recipe)}: {key}: a reference must name a knob, as ${{run.seed}} "
                "does. It can't call a function, read the environment or hold another reference "
                "(write a literal ${ as \\${)"
            )
        counts[key] = len(found)
        targets.update(name.replace("[", ".").replace("]", "") for name in found)
    growth = 1
    for target in targets:
        inside = (n for key, n in counts.items() if f"{key}.".startswith(f"{target}."))
        growth *= max(1, sum(inside))
    if growth > _MOST_GROWTH:
        raise ConfigError(
            f"{recipe}: values that hold several references are referred to in turn, which could "
            f"multiply a text {growth:,} times. Write some of them out"
        )
    if not any("${" in text or text == "???" for _, text in texts):
        return tree
    from omegaconf import OmegaConf  # noqa: PLC0415  (imports slowly)
    from omegaconf.errors import OmegaConfBaseException  # noqa: PLC0415

    try:
        complete = OmegaConf.create(_with_defaults(root, tree))
        container = OmegaConf.to_container(complete, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError, UnicodeEncodeError) as error:
        key = getattr(error, "full_key", None) or ""
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{where.get(key, recipe)}: {key or 'a value'}: {reason} (write a literal ${{ as \\${{)"
        ) from error
    return cast(dict[str, Any], container)


def _with_eval_file(tree: dict[str, Any], where: dict[str, str]) -> dict[str, Any]:
    """Turn `eval.file` into a source that is read with the same settings as the recipe's first
    file."""
    section, data = _mapping(tree.get("eval")), _mapping(tree.get("data"))
    path, sources = section.get("file"), data.get("sources")
    if not isinstance(path, str) or not path or not isinstance(sources, list):
        return tree
    sources = cast(list[Any], sources)
    others = [_mapping(one) for one in sources]
    rows = next((one for one in others if one.get("source") in ROWS), dict[str, Any]())
    name = Path(path).name.partition(".")[0] or "eval"
    source = {
        **{knob: value for knob, value in rows.items() if knob not in _ROW_KNOBS},
        "name": f"{name}-eval" if name in [one.get("name") for one in others] else name,
        "source": "jsonl" if path.endswith(".jsonl") else "file",
        "path": path,
        "holdout": "all",
    }
    where[f"data.sources.{len(sources)}"] = where.get("eval.file", "")
    data = {**data, "sources": [*sources, source]}
    if isinstance(only := data.get("only"), list) and only:
        data["only"] = [*cast(list[Any], only), source["name"]]
    return {**tree, "eval": {k: v for k, v in section.items() if k != "file"}, "data": data}


def _mapping(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _without_auto(tree: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Remove the knobs that are `auto`, and return their names along with those that the recipe
    doesn't set. If its other knobs rule out a default, the smallest valid value is set instead."""
    rest, auto = dict(tree), set[str]()
    for knob in AUTO_KNOBS:
        section, _, name = knob.partition(".")
        knobs = rest.get(section, {})
        if isinstance(knobs, dict) and _mapping(knobs).get(name, AUTO) == AUTO:
            rest[section] = {k: value for k, value in _mapping(knobs).items() if k != name}
            auto.add(knob)
    for knob, value in _smallest_valid(rest).items():
        section, _, name = knob.partition(".")
        if knob in auto:
            rest[section] = {**rest[section], name: value}
    return rest, frozenset(auto)


def _smallest_valid(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the smallest value that the other knobs allow for each `auto` knob."""
    rollout, trainer = _mapping(tree.get("rollout")), _mapping(tree.get("trainer"))
    knobs = ("expert_parallel", "sequence_parallel", "hpz_partition_size")
    widths = [trainer.get(name) for name in knobs]
    ranks = math.lcm(*(n for n in widths if type(n) is int and n > 0))
    least = trainer.get("min_ranks")
    if type(least) is int:
        ranks *= max(1, math.ceil(least / ranks))
    implied: dict[str, Any] = {"trainer.ranks": ranks}
    if rollout.get("colocated") is True:
        engines = rollout.get("engines", trainer.get("ranks", ranks))
        implied = {"rollout.engines": engines, "trainer.ranks": engines}
    if trainer.get("offload_optimizer") is True:
        implied["trainer.zero_stage"] = 1
    if trainer.get("hpz_partition_size", 1) != 1:
        implied["trainer.zero_stage"] = 3
    return implied


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge `above` into `below`. Sections are merged recursively, and all other values are
    replaced.

    OmegaConf's own merge isn't used because it fails when a section replaces a list. Keel reports
    this mistake more clearly when it checks the recipe against the schema.
    """
    both = dict(below)
    for key, value in above.items():
        old = below.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merge(cast(dict[str, Any], old), cast(dict[str, Any], value))
        if value != "???" or key not in below:
            both[key] = value
    return both


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    below: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        below = cast(dict[Any, Any], value).items()
    elif isinstance(value, list):
        below = enumerate(cast(list[Any], value))
    elif isinstance(value, str):
        yield key, value
    for name, inner in below:
        yield from _strings(inner, f"{key}.{name}".lstrip("."))


def _with_defaults(section: type[Section], tree: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of all knobs, to which references may refer."""
    hints, complete = knob_types(section), dict(tree)
    for field in fields(section):
        inner = section_type(hints[field.name])
        value = tree.get(field.name, {} if field.default_factory is not MISSING else None)
        if inner is not None and inner is hints[field.name] and isinstance(value, dict):
            complete[field.name] = _with_defaults(inner, cast(dict[str, Any], value))
        elif field.name not in tree and inner is None and field.default is not MISSING:
            auto = f"{section.PATH}.{field.name}" in AUTO_KNOBS
            default: Any = AUTO if auto else field.default
            many = isinstance(default, tuple)
            complete[field.name] = list(cast(Sequence[Any], default)) if many else default
    return complete


def _read_layers(
    path: Path, trail: tuple[Path, ...], folder: str
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a recipe's layers (base recipes first), along with the place where each key is set."""
    text, real = read_recipe(path, folder), path.resolve()
    if real in trail:
        raise ConfigError(f"{path}: `defaults` is circular")
    try:
        parsed, nodes = _parse_recipe(text)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        yaml_file = path.suffix in (".yaml", ".yml")
        hint = "" if yaml_file else f". `keel new --data {path}` writes a recipe for data"
        raise ConfigError(f"{path}{line}: not valid YAML: {_reason(error)}{hint}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply, or an alias that contains itself") from error
    if not isinstance(parsed, dict | None):
        raise ConfigError(f"{path}:1: a recipe consists of `section:` and `key: value` lines")
    layer = deepcopy(cast(dict[str, Any], parsed or {}))
    lines = {key: f"{path}:{line}" for key, _, line in nodes}
    if "defaults" not in layer:
        return [layer], lines
    base = layer.pop("defaults")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{lines['defaults']}: defaults = {base!r}: must be the path of a recipe")
    sibling = path.parent / base
    try:
        found = sibling if sibling.exists() else find_recipe(Path(base), folder, sibling)
        bases, base_lines = _read_layers(found, (*trail, real), folder)
    except ConfigError as error:
        raise ConfigError(f"{lines['defaults']}: defaults: {error}") from error
    replaced = tuple(
        f"{key}." for key, value, _ in nodes if not isinstance(value, yaml.MappingNode)
    )
    kept = {key: line for key, line in base_lines.items() if not key.startswith(replaced)}
    return [*bases, layer], kept | lines


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads numbers the way Python does: 1e-6 is a number, but 1:30, 010 and
    dates are text. Duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set[str]()
        for key, _ in node.value:
            if key.value in keys and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem=f"duplicate key {key.value}", problem_mark=key.start_mark
                )
            keys.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = dict(yaml.SafeLoader.yaml_implicit_resolvers)
for _first in "-+.0123456789":
    _Loader.yaml_implicit_resolvers[_first] = [(f"{_TAG}int", _INTEGER), (f"{_TAG}float", _FLOAT)]


def _parse_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """Parse YAML into plain data and its root node. Raises yaml.YAMLError if the YAML is invalid,
    and ValueError if a number is too long."""
    loader: Any = _Loader(text)
    root: yaml.Node | None = loader.get_single_node()
    return root and loader.construct_document(root), root


# Cached, because parsing dominates loading and tests load the same recipes many times.
@lru_cache(maxsize=256)
def _parse_recipe(text: str) -> tuple[Any, Sequence[tuple[str, yaml.Node, int]]]:
    """Parse a recipe into plain data, along with the dotted key, node and line of each value."""
    data, root = _parse_yaml(text)
    nodes = list(islice(_nodes(root), _MOST_VALUES))
    if len(nodes) == _MOST_VALUES:
        raise yaml.YAMLError(f"its aliases expand to {_MOST_VALUES} values or more")
    return data, nodes


def _nodes(node: yaml.Node | None, key: str = "") -> Iterator[tuple[str, yaml.Node, int]]:
    children: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(name.value), name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), value, value) for index, value in enumerate(node.value)]
    for name, mark, value in children:
        child = f"{key}.{name}".lstrip(".")
        yield child, value, mark.start_mark.line + 1
        yield from _nodes(value, child)


def _reason(error: Exception) -> str:
    problem = getattr(error, "problem", None) or str(error)
    return "inconsistent indentation" if problem.startswith("expected <block end>") else problem


def _parse_override(override: str) -> tuple[list[str], Any, str]:
    origin = f"override {override!r}"
    key, equals, text = override.partition("=")
    key = key.strip()
    if key.startswith("-"):
        raise ConfigError(f"{origin}: write {override.lstrip('-')!r}, without dashes")
    pairs = re.findall(r"\[([^\]]+)\]|([^.\[\]]+)", key)
    steps = [bracketed or plain for bracketed, plain in pairs]
    if not equals or not steps:
        raise ConfigError(f"{origin}: write key=value without spaces, such as run.steps=20")
    if steps[:2] == ["data", "sources"] and steps[3:4] == ["rewards"] and len(steps) > 5:
        steps = [*steps[:4], ".".join(steps[4:])]  # the dotted name of a reward function
    try:
        value, node = _parse_yaml(text)
    except RecursionError as error:
        raise ConfigError(f"{origin}: nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{origin}: not valid YAML: {_reason(error)}") from error
    rest = text[node.end_mark.index :].strip() if node is not None else ""
    if rest.startswith("#"):
        raise ConfigError(f"{origin}: YAML reads {rest!r} as a comment; put the value in quotes")
    return steps, value, origin


def _set_knob(
    tree: dict[str, Any], where: dict[str, str], steps: Sequence[str], value: Any, origin: str
) -> None:
    node: Any = tree
    done: list[str] = []
    for position, step in enumerate(steps):
        place: Any = step
        if isinstance(node, list):
            place = _index(cast(list[Any], node), step, ".".join(done), origin)
        elif not isinstance(node, dict):
            raise ConfigError(f"{origin}: {'.'.join(done)} = {node!r} is a value, not a section")
        done.append(str(place))
        below = cast(dict[Any, Any], node)  # or a list with an entry at `place`
        if position == len(steps) - 1:
            below[place] = value
        elif place == step and below.get(step) is None:
            below[place] = {}
        node = below[place]
    path = ".".join(done)
    for replaced in [known for known in where if known.startswith(f"{path}.")]:
        del where[replaced]
    where[path] = origin


def _index(items: list[Any], step: str, path: str, origin: str) -> int:
    names = [
        str(cast(dict[str, Any], item).get("name", i)) if isinstance(item, dict) else str(i)
        for i, item in enumerate(items)
    ]
    if step in names:
        return names.index(step)
    if step.isdecimal() and int(step) < len(items):
        return int(step)
    near = difflib.get_close_matches(step, names, n=1)
    hint = f"did you mean {path}[{near[0]}]?" if near else f"it has {', '.join(names)}"
    raise ConfigError(f"{origin}: {path} has no entry {step!r}; {hint}")


def _split_section(root: type, steps: list[str], value: Any) -> Iterator[tuple[list[str], Any]]:
    """Split a section's value into its knobs. Any other value is yielded unchanged."""
    hint: Any = root
    for step in steps:
        section = section_type(hint)
        is_list = get_origin(hint) is tuple
        hint = section if is_list else knob_types(section).get(step) if section else None
    section = None if get_origin(hint) is tuple else section_type(hint)
    if section is None or not isinstance(value, dict):
        yield steps, value
        return
    inner = cast(dict[Any, Any], value)
    for key in sorted(inner, key=lambda key: key == "name"):  # last: it addresses the entry
        yield from _split_section(root, [*steps, str(key)], inner[key])


# --- Building the config ---


def _build_config(
    root: type[C], tree: Mapping[str, Any], where: Mapping[str, str], recipe: str
) -> C:
    """Build a config of type `root` from plain data.

    `where` maps each dotted key to the "file:line" or override that set it. Errors about any other
    key refer to `recipe`. Raises ConfigError with one line per wrong key or type. If all keys and
    types are correct, the error reports the first rule that is broken.
    """
    builder = _Builder(root, tree, where, recipe)
    built = builder.section(root, tree, ())
    if builder.problems:
        raise ConfigError("\n".join(builder.problems))
    return cast(C, built)


_Keys = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""


class _Builder:
    """Builds a recipe's dataclasses and collects errors."""

    def __init__(
        self, root: type, tree: Mapping[str, Any], where: Mapping[str, str], recipe: str
    ) -> None:
        self.root, self.tree, self.where, self.recipe = root, tree, where, recipe
        self.problems: list[str] = []

    def label(self, keys: _Keys) -> str:
        """Format a path for messages. List entries are shown with their names:
        `data.sources[sums].size`."""
        label, node = "", cast(Any, self.tree)
        for step in keys:
            node = node[step] if isinstance(step, int) else node.get(step)
            if isinstance(step, str):
                label = f"{label}.{step}".lstrip(".")
            else:
                named = isinstance(node, Mapping)
                label += f"[{(node.get('name') if named else None) or step}]"
        return label

    def problem(self, keys: _Keys, message: str, inner: str = "") -> Any:
        """Record a problem with the value at `keys`, or with the knob `inner` in it."""
        key = ".".join(map(str, keys)) + inner
        key = key.lstrip(".")
        below = (origin for known, origin in self.where.items() if known.startswith(f"{key}."))
        origin = self.where.get(key) or next(below, "")  # an override of a knob in the section
        while key and not origin:
            key = key.rpartition(".")[0]
            origin = self.where.get(key, "")
        self.problems.append(f"{origin or self.recipe}: {message}")
        return _INVALID

    def wrong(self, keys: _Keys, value: Any, rule: str) -> Any:
        shown = "null" if value is None else repr(value)
        return self.problem(keys, f"{self.label(keys)} = {shown}: must be {rule}")

    def section(self, cls: type, tree: Any, keys: _Keys) -> Any:
        if not isinstance(tree, Mapping):
            return self.wrong(keys, tree, "a section (`key: value` lines)")
        tree, before, hints = cast(Mapping[Any, Any], tree), len(self.problems), knob_types(cls)
        for name in map(str, tree):
            path = f"{self.label(keys)}.{name}".lstrip(".")
            if name in _UNRECORDED and cls in (RolloutConfig, SamplingConfig, EvalConfig):
                why = "changes the distribution without being recorded, so probability ratios "
                self.problem((*keys, name), f"{path}: {why}would be wrong. Remove it")
            elif name not in hints and not is_removed_default(path, tree.get(name)):
                hint = suggest(path, self.root)
                self.problem((*keys, name), f"{path}: no such knob; {hint}")
        values: dict[str, Any] = {}
        for field in fields(cls):
            inner = (*keys, field.name)
            if field.name in tree:
                values[field.name] = self.value(hints[field.name], tree[field.name], inner)
            elif field.default is MISSING and field.default_factory is MISSING:
                self.problem(inner, f"{self.label(inner)}: missing, and it has no default")
        if len(self.problems) > before:
            return _INVALID
        try:
            return cls(**values)
        except ConfigError as error:  # a broken rule; the message begins with its knob
            knob, at = str(error).split(" ", 1)[0].rstrip(":"), self.label(keys)
            if knob.startswith(at):
                return self.problem(keys, str(error), knob[len(at) :])
            return self.problem((), str(error), f".{knob}")

    def value(self, hint: Any, value: Any, keys: _Keys) -> Any:
        origin, args = get_origin(hint), get_args(hint)
        words: list[Any] = []
        if origin in (Union, UnionType):
            if value is None and NoneType in args:
                return None
            words = [w for arg in args if get_origin(arg) is Literal for w in get_args(arg)]
            if isinstance(value, str) and value in words:  # such as `all`
                return value
            (hint,) = (a for a in args if a is not NoneType and get_origin(a) is not Literal)
            origin, args = get_origin(hint), get_args(hint)
        if origin is Literal:
            # Compare types too, because True == 1.
            if any(value == arg and type(value) is type(arg) for arg in args):
                return value
            return self.wrong(
                keys, value, f"one of {', '.join(map(str, [*args, *self.or_auto(keys)]))}"
            )
        if origin is tuple:
            if not isinstance(value, list):
                return self.wrong(keys, value, "a list, such as `[a, b]`")
            items = enumerate(cast(list[Any], value))
            return tuple(self.value(args[0], item, (*keys, index)) for index, item in items)
        if origin is not None and issubclass(origin, Mapping):
            if not isinstance(value, Mapping):
                return self.wrong(keys, value, "a section (`key: value` lines)")
            pairs = cast(Mapping[Any, Any], value)
            for name in pairs:
                if not isinstance(name, str):
                    path = self.label(keys)
                    self.problem(keys, f"{path}: its key {name!r} must be text; put it in quotes")
            return {name: self.value(args[1], one, (*keys, name)) for name, one in pairs.items()}
        if section_type(hint) is not None:
            return self.section(hint, value, keys)
        return value if hint is Any else self.scalar(hint, value, keys, words)

    def scalar(self, hint: type, value: Any, keys: _Keys, words: Sequence[str]) -> Any:
        if hint is float:
            number = _as_float(value)
            if number is not None and math.isfinite(number):
                return number
        elif type(value) is hint:
            if hint is int and abs(value) >= 2**63:
                return self.problem(keys, f"{self.label(keys)}: has too many digits")
            if hint is str and _CONTROL.search(value):
                return self.wrong(keys, value, "text without control characters")
            return value
        elif hint is str and type(value) is int and ".".join(map(str, keys)) in _STEP_KNOBS:
            return str(value)
        cure = ""
        if hint is str:
            cure = "; put it in quotes"
            if value is None:
                cure = '; write "" for empty text, and quote text that begins with #'
        kind = ", or ".join([_TYPE_NAMES[hint], *words, *self.or_auto(keys)])
        return self.wrong(keys, value, f"{kind}{cure}")

    def or_auto(self, keys: _Keys) -> list[str]:
        return [AUTO] * (self.root is Config and ".".join(map(str, keys)) in AUTO_KNOBS)


def _as_float(value: Any) -> float | None:
    """Convert a number, or text such as "1e-6", to a float."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
