"""Private parts of other libraries are used in one file per library, which checks them at start-up,
so a new release breaks nothing elsewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCED = ("trainer", "model")
"""Packages under these rules; `rollout` has separate rules for vLLM."""
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
"""Quick text filter: parsing every file takes a second."""
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
OWN = ("self", "cls", "super")
PUBLIC = ("_replace", "_asdict", "_fields", "_exit")
"""Public names with an underscore, from named tuples and `os`."""


def sources() -> list[Path]:
    return [path for package in FENCED for path in sorted((ROOT / package).rglob("*.py"))]


def private(name: str) -> bool:
    return name in ("__class__", "__dict__") or (name.startswith("_") and not name.endswith("__"))


def reached_for(path: Path) -> Iterator[str]:
    """Private attributes and modules of other libraries used in a file."""
    if not CANDIDATE.search(text := path.read_text()):
        return
    nodes = list(ast.walk(ast.parse(text)))
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
    """Return True for an attribute of the enclosing class."""
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in OWN


def undisclosed(module: str) -> bool:
    """Return True for private modules, and for anything inside DeepSpeed below its top level."""
    library, *inside = module.split(".")
    if library == "deepspeed":
        return len(inside) > 1 or (bool(inside) and inside[0].islower())
    return library in LIBRARIES and any(map(private, inside))


def test_internals_are_named_in_their_files_only() -> None:
    uses = {str(p.relative_to(ROOT)): set(reached_for(p)) for p in sources()}
    assert {name: inside for name, inside in uses.items() if inside and name not in NAMED} == {}


def test_named_files_do_use_internals() -> None:
    """Otherwise the rule would check nothing."""
    uses = {name: set(reached_for(ROOT / name)) for name in NAMED}
    assert all(uses[name] for name in NAMED if name not in BY_IMPORT)
    assert {"ds_tensor", "_update_hp_grad", "__class__"} <= uses[DEEPSPEED]
    assert {"_world", "_set_pg_timeout", "_cdata"} <= uses["model/torch_internals.py"]
    assert all("ray._private.state" in (ROOT / name).read_text() for name in BY_IMPORT)
