"""Copies of a project that lie about on a machine: in one of them is what the policy is to find
out.

Any Python from 3.9, no package.
"""

from __future__ import annotations

import os
import re
import sys
import zipfile
from collections.abc import Iterable

from keel.agents.environments.code.languages import REPO

Installed = dict[str, list[str]]
"""Name of a package, as `plain` has it → where it lies."""
HOLDERS = ("site-packages", "dist-packages", "node_modules", "extern", "third_party", "include")
"""Folders that packages lie in; and those with `vendor` in their names."""
ENDINGS = (".py", ".so", ".js", ".whl", ".egg", ".dist-info", ".egg-info", ".h", ".hpp")
METADATA = (".whl", ".egg", ".dist-info", ".egg-info")


def machine() -> list[str]:
    """Folders where a machine's packages lie."""
    found = [sys.prefix, sys.base_prefix, "/usr/local", "/usr/include", "/usr/share/nodejs"]
    found += ["/usr/lib/node_modules", "/usr/share/python-wheels"]
    if os.path.isdir("/usr/lib"):
        found += [f"/usr/lib/{one}" for one in os.listdir("/usr/lib") if one.startswith("python")]
    real = dict.fromkeys(map(os.path.realpath, found))
    return [one for one in real if one != "/usr" and os.path.isdir(one)]


def find_packages(folders: Iterable[str]) -> Installed:
    """Packages below, in archives and those that others brought along too. Not those whose code is
    the repository's own."""
    found: Installed = {}
    for folder in folders:
        for path, below, files in os.walk(folder):
            holds = _holds(os.path.basename(path))
            for name in [*below, *files]:
                whole = os.path.join(path, name)
                if (holds or name.endswith(METADATA)) and not _own(whole):
                    found.setdefault(_named(name), []).append(whole)
                if name.endswith((".whl", ".egg", ".zip")):
                    for one in _inside(whole):
                        found.setdefault(_named(one), []).append(f"{whole}:{one}")
    return found


def normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _holds(folder: str) -> bool:
    return folder in HOLDERS or "vendor" in folder


def _own(path: str) -> bool:
    if os.path.islink(path):
        return f"{os.path.realpath(path)}/".startswith(f"{REPO}/")
    if not path.endswith(".dist-info"):
        return False
    # An editable installation's metadata: the code itself lies in the repository.
    try:
        with open(os.path.join(path, "direct_url.json")) as file:
            return f"file://{REPO}" in file.read()
    except OSError:
        return False


def _inside(path: str) -> set[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.split("/") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile):
        return set()
    tops = {parts[0] for parts in names}
    return tops | {
        parts[n + 1] for parts in names for n in range(len(parts) - 1) if _holds(parts[n])
    }


def _named(name: str) -> str:
    for ending in ENDINGS:
        if name.endswith(ending):
            name = name[: -len(ending)]
            if ending in METADATA:
                name = name.partition("-")[0]
            elif ending == ".so":
                name = name.partition(".")[0]
            break
    return normalize_name(name)
