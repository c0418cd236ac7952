"""vLLM's internals are touched in named files alone, and all that these touch is checked at
start-up (`keel.rollout.vllm_contract`). By the source: nothing is imported from vLLM here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

from keel.rollout.vllm_checks import GPU, SCHED, Has
from keel.rollout.vllm_contract import NEEDS, Part

ROLLOUT = Path(__file__).parent.parent.parent / "rollout"
FENCE: dict[str, tuple[Part, ...]] = {
    "vllm_internals.py": ("engine",),
    "weight_loading/": ("updates", "copies"),
    "engine/kv_cache.py": ("kv_cache",),
    "engine/begin.py": ("begin",),
    "engine/quick_start.py": ("start", "warm_up"),
    "engine/invariant.py": ("invariant",),
    "engine/residual.py": ("residual",),
    "fastpath/": ("packed", "cascade", "steady", "bursts"),
    "engine/shims.py": ("shims",),
    "recording/v1.py": ("v1",),
}
"""Where vLLM's internals are touched, and the parts of the contract that say which."""
PUBLIC = ("vllm", "vllm.outputs", "vllm.logprobs", "vllm.platforms", "vllm.sampling_params")
INTERNAL = {
    *("aux_output_connector", "batch_queue", "driver_worker", "engine_core", "get_model"),
    *("input_batch", "kv_cache_manager", "model_executor", "model_runner", "scheduler"),
    *("set_pause_state", "vllm_config"),
}
"""Attributes that lead into vLLM, whatever holds them."""
VARIABLES = {
    "fastpath/scheduler.py": {
        "self": f"{SCHED}.scheduler:Scheduler",
        "request": "vllm.v1.request:Request",
    },
    "fastpath/decode_run.py": {
        "request": "vllm.v1.request:Request",
        "params": "vllm.sampling_params:SamplingParams",
    },
    "fastpath/sampler.py": {
        "self": f"{GPU}.sample.sampler:Sampler",
        "input_batch": f"{GPU}.input_batch:InputBatch",
        "states": f"{GPU}.sample.states:SamplingStates",
        "runner": f"{GPU}.model_runner:GPUModelRunner",
        "sampler": f"{GPU}.sample.sampler:Sampler",
    },
    "fastpath/sample_graphs.py": {
        "batch": f"{GPU}.input_batch:InputBatch",
        "runner": f"{GPU}.model_runner:GPUModelRunner",
    },
    "fastpath/steady_steps.py": {
        "batch": f"{GPU}.input_batch:InputBatch",
        "buffers": f"{GPU}.input_batch:InputBuffers",
        "output": f"{SCHED}.output:SchedulerOutput",
        "parallel": "vllm.config:ParallelConfig",
        "runner": f"{GPU}.model_runner:GPUModelRunner",
        "state": f"{GPU}.model_runner:ExecuteModelState",
        "states": f"{GPU}.states:RequestState",
        "tables": f"{GPU}.block_table:BlockTables",
    },
}
"""The classes of vLLM that variables of these files are of."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROLLOUT))


SOURCES = sorted(ROLLOUT.rglob("*.py"))
OUTSIDE = [path for path in SOURCES if not name_of(path).startswith(tuple(FENCE))]


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of what is imported from vLLM."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.split(".")[0] == "vllm")


def trespasses(source: str) -> list[str]:
    """What a file outside the fence does that only those inside may."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = [f"{module}.{name}" for module, name in imports(tree) if module not in PUBLIC]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
        if node.attr in INTERNAL or (private and not ours and node.attr not in own):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", OUTSIDE, ids=name_of)
def test_nothing_of_vllm_is_touched_outside_the_fence(path: Path) -> None:
    assert trespasses(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.v1.request import Request",
        "import vllm.v1.engine.core",
        "from vllm._custom_ops import f",
        "engine.engine_core.abort()",
        "self._llm.model_executor",
        "request._status",
    ],
)
def test_a_trespass_is_seen(source: str) -> None:
    assert trespasses(source)


@pytest.mark.parametrize("place", FENCE)
def test_every_name_that_is_imported_is_in_the_contract(place: str) -> None:
    checked = [need.where for part in FENCE[place] for need in NEEDS[part]]
    files = [path for path in SOURCES if name_of(path).startswith(place)]
    assert files
    for path in files:
        for module, name in imports(ast.parse(path.read_text())):
            begins = (f"{module}:{name}", f"{module}.{name}:")  # a name, or a module
            assert module in PUBLIC or any(where.startswith(begins) for where in checked), (
                f"{name_of(path)} imports {name} of {module}, which is not checked"
            )


@pytest.mark.parametrize("place", VARIABLES)
def test_every_attribute_that_is_touched_is_in_the_contract(place: str) -> None:
    tree = ast.parse((ROLLOUT / place).read_text())
    ours = own_names(tree)
    touched: dict[str, set[str]] = {}
    for variable, attribute in attributes_of_names(tree):
        if (where := VARIABLES[place].get(variable)) and not attribute.startswith("__"):
            touched.setdefault(where, set()).add(attribute)
    assert touched.keys() == set(VARIABLES[place].values())
    for where, names in touched.items():
        checked: set[str] = set()
        for need in (need for part in FENCE["fastpath/"] for need in NEEDS[part]):
            if isinstance(need, Has) and need.where == where:
                checked.update(need.names.split())
            elif need.where.startswith(f"{where}."):
                checked.add(need.where.rpartition(".")[2])
        assert names - ours - checked == set(), where


def own_names(tree: ast.AST) -> set[str]:
    """What a file's classes define, and what their constructors set."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
            if node.name == "__init__":
                names.update(n.attr for n in ast.walk(node) if stores(n))
    return names


def stores(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def attributes_of_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr
