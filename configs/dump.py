"""Write a `Config` or single values as YAML."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, cast

import yaml

from keel.configs.schema import AUTO, Config


def dump_config(config: Config, auto: Iterable[str] = ()) -> str:
    """Return every knob in `config` as YAML. Loading it with `load_config` gives an equal `Config`.
    Knobs in `auto` are written as `auto`."""
    tree = escape_references(asdict(config))
    for section, _, name in (knob.partition(".") for knob in auto):
        tree[section][name] = AUTO
    return yaml.dump(tree, Dumper=_Dumper, allow_unicode=True, sort_keys=False)


def as_override(text: str) -> str:
    """Format text as the value of an override, with quotes where YAML needs them."""
    return yaml_line(escape_references(text))


def yaml_line(value: Any) -> str:
    """Format plain data as a single line of YAML."""
    style: dict[str, Any] = {"allow_unicode": True, "sort_keys": False, "default_flow_style": True}
    text = cast(str, yaml.dump(value, Dumper=_Dumper, width=2**30, **style))
    return text.removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):  # libyaml's refuses the surrogates of undecodable paths
    """A YAML dumper that also quotes strings that only recipes read as numbers, such as 1e-6."""

    def text(self, data: str) -> yaml.Node:
        style = "'" if data and data[0] in "+-.0123456789" else None
        style = style if data.isprintable() else '"'
        return cast(Any, self).represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.text)


def escape_references(value: Any) -> Any:
    """Escape every literal `${` in a value so that it isn't read as a reference."""
    if isinstance(value, dict):
        return {k: escape_references(v) for k, v in cast(dict[str, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [escape_references(v) for v in cast(Sequence[Any], value)]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value
