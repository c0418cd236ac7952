"""Finds copies of a project on a machine, which would show the policy the finished change.

It runs on Python 3.9 or later and needs no packages.
"""

from __future__ import annotations

import os
import re
import sys
import zipfile
from collections.abc import Iterable

from keel.agents.environments.code.languages import REPO

Packages = dict[str, list[str]]
"""Paths of packages, keyed by the name that `normalize_name` returns."""
_PACKAGE_FOLDERS = (
    *("site-packages", "dist-packages", "node_modules", "extern", "third_party", "include"),
)
"""Names of folders that contain packages, in addition to names that contain `vendor`."""
_METADATA = (".whl", ".egg", ".dist-info", ".egg-info")
_SUFFIXES = (".py", ".so", ".js", *_METADATA, ".h", ".hpp")


def system_folders() -> list[str]:
    """Return the folders in which packages are installed on this machine."""
    folders = [sys.prefix, sys.base_prefix, "/usr/local", "/usr/include", "/usr/share/nodejs"]
    folders += ["/usr/lib/node_modules", "/usr/share/python-wheels"]
    if os.path.isdir("/usr/lib"):
        folders += [f"/usr/lib/{one}" for one in os.listdir("/usr/lib") if one.startswith("python")]
    real = dict.fromkeys(map(os.path.realpath, folders))
    return [one for one in real if one != "/usr" and os.path.isdir(one)]


def find_packages(folders: Iterable[str]) -> Packages:
    """Find packages below `folders`.

    This includes vendored packages and those in archives, but not links into the repository.
    """
    packages: Packages = {}
    for folder in folders:
        for path, subfolders, files in os.walk(folder):
            holds_packages = _holds_packages(os.path.basename(path))
            for name in [*subfolders, *files]:
                place = os.path.join(path, name)
                if (holds_packages or name.endswith(_METADATA)) and not _is_repository(place):
                    packages.setdefault(_package_name(name), []).append(place)
                if name.endswith((".whl", ".egg", ".zip")):
                    for one in _archive_packages(place):
                        packages.setdefault(_package_name(one), []).append(f"{place}:{one}")
    return packages


def normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _holds_packages(folder: str) -> bool:
    return folder in _PACKAGE_FOLDERS or "vendor" in folder


def _is_repository(path: str) -> bool:
    if os.path.islink(path):
        return f"{os.path.realpath(path)}/".startswith(f"{REPO}/")
    if not path.endswith(".dist-info"):
        return False
    # Metadata of an editable installation, whose code is the repository's.
    try:
        with open(os.path.join(path, "direct_url.json")) as file:
            return f"file://{REPO}" in file.read()
    except OSError:
        return False


def _archive_packages(path: str) -> set[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.split("/") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile):
        return set()
    nested = {
        parts[n + 1] for parts in names for n in range(len(parts) - 1) if _holds_packages(parts[n])
    }
    return {parts[0] for parts in names} | nested


def _package_name(name: str) -> str:
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            name = name[: -len(suffix)]
            if suffix in _METADATA:
                name = name.partition("-")[0]
            elif suffix == ".so":
                name = name.partition(".")[0]
            break
    return normalize_name(name)
