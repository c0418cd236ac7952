"""What can be asked of a name in vLLM before an engine is built (`keel.rollout.vllm_contract`).

Importing this module does not import vLLM.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

SCHED = "vllm.v1.core.sched"
GPU = "vllm.v1.worker.gpu"
MODEL = "vllm.model_executor"
"""Where vLLM has its scheduler, Model Runner V2, and models."""


@dataclass(frozen=True, slots=True)
class Has:
    """A module or class, with these attributes: its own, or set on `self` by its methods."""

    where: str
    """`module` or `module:name.name`."""
    names: str = ""

    def broken(self, found: Any) -> Iterator[str]:
        missing = set(self.names.split()) - attributes(found)
        if missing:
            yield f"{self.where} has no {', '.join(sorted(missing))}"


@dataclass(frozen=True, slots=True)
class Takes:
    """A function or class with exactly these parameters."""

    where: str
    parameters: str

    def broken(self, found: Any) -> Iterator[str]:
        names = list(inspect.signature(getattr(found, "fn", found)).parameters)  # Triton's: fn
        if names != self.parameters.split():
            yield f"{self.where} takes ({', '.join(names)})"


@dataclass(frozen=True, slots=True)
class Uses:
    """A function that looks these names up, so that what stands in for them is called."""

    where: str
    names: str

    def broken(self, found: Any) -> Iterator[str]:
        missing = set(self.names.split()) - set(inspect.unwrap(found).__code__.co_names)
        if missing:
            yield f"{self.where} does not use {', '.join(sorted(missing))}"


@dataclass(frozen=True, slots=True)
class Same:
    """A function that looks up the names it did when Keel was written, and no others: what stands
    in for all of it would leave out what vLLM adds."""

    where: str
    names: str
    """Their digest."""

    def broken(self, found: Any) -> Iterator[str]:
        try:
            names = digest(found)
        except (OSError, TypeError):  # compiled
            names = "not to be read"
        if names != self.names:
            yield f"{self.where} does something else (names: {names} instead of {self.names})"


Need = Has | Takes | Uses | Same


def digest(function: Any) -> str:
    """Of the names that a function's source looks up."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return hashlib.sha256(" ".join(sorted(names)).encode()).hexdigest()[:12]


def attributes(found: Any) -> set[str]:
    """Of a module; or of a class, with those that instances get from any method of it."""
    names = set(dir(found))
    for kind in found.__mro__ if isinstance(found, type) else ():
        if kind.__module__.startswith("vllm."):
            names |= vars(kind).keys()  # `dir` leaves out the methods of an enumeration
            names |= vars(kind).get("__annotations__", {}).keys()
            names |= assigned(kind)
    return names


@cache
def assigned(kind: type) -> set[str]:
    """Attributes that the methods of a class give to `self`, by their bytecode: reading the sources
    takes ten times as long."""
    return {name for value in vars(kind).values() for code in codes(value) for name in stored(code)}


def codes(value: Any) -> Iterator[CodeType]:
    """Of a method of any kind, and of the functions in it."""
    for name in ("__func__", "fget", "func"):  # of a class, a property, one that is cached
        value = getattr(value, name, value)
    code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
    found = [code] if isinstance(code, CodeType) else []
    while found:
        yield (code := found.pop())
        found += [it for it in code.co_consts if isinstance(it, CodeType)]


def stored(code: CodeType) -> Iterator[str]:
    """Attributes that are given to `self`."""
    if "self" not in code.co_varnames + code.co_freevars + code.co_cellvars:
        return
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and before == "self":
            yield instruction.argval
        before = instruction.argval
