"""How programs are built and run, language by language. A new one is an entry in the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """How programs in a language are built and run, in the words of `Sandbox.run`."""

    source: str
    """Name of the source file in `{box}`."""
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    """Makes the file `program` in the current folder, which `run` finds in `{box}`. Empty: no
    compiler."""
    extra: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """More files in `{box}`."""
    calls: tuple[str, ...] = ()
    """How functions are called (`keel.rewards.code.call_driver`'s protocol). Empty: they cannot
    be."""
    bounded: bool = True
    """Whether its programs can live with a limit on address space."""


_LAUNCH = b"""
import builtins, sys
if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)  # a program's own time bounds what it reads and prints
builtins.exit = builtins.quit = sys.exit
source = compile(open(sys.argv.pop(), encoding="utf-8").read(), "solution.py", "exec")
del builtins, sys  # a program has to import them itself
exec(globals().pop("source"))
"""
_DRIVER = Path(__file__).with_name("call_driver.py")

LANGUAGES: dict[str, Language] = {
    # Without `site`, which takes as long to start as all the rest.
    "python": Language(
        source="solution.py",
        run=("{python}", "-S", "{box}/launch.py", "{box}/solution.py"),
        extra={"launch.py": _LAUNCH, "driver.py": _DRIVER.read_bytes()},
        calls=("{python}", "-S", "{box}/driver.py", "{box}/solution.py"),
    ),
    "c++": Language(
        source="solution.cpp",
        compile=("g++", "-O2", "-std=c++17", "-o", "program", "{box}/solution.cpp"),
        run=("{box}/program",),
    ),
    "c": Language(
        source="solution.c",
        compile=("gcc", "-O2", "-std=c17", "-o", "program", "{box}/solution.c", "-lm"),
        run=("{box}/program",),
    ),
}
