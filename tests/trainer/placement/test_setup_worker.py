"""Keel's worker setup matches Ray's, or delegates to it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from ray._private.runtime_env.context import RuntimeEnvContext  # pyright: ignore
from ray.core.generated.common_pb2 import Language  # pyright: ignore

from keel.trainer.placement.programs.setup_worker import CONTEXT, LANGUAGE, command_of

WORKER = ["/ray/default worker.py", "--node-ip-address=127.0.0.1", "--raylet-name=/tmp/a b"]


def told(language: str = "PYTHON", **context: Any) -> list[str]:
    return [*WORKER, f"{LANGUAGE}={language}", f"{CONTEXT}={json.dumps(context)}", "--last=x=y"]


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("A", "B", "C"):
        monkeypatch.setenv(name, "before")
    monkeypatch.delenv("NOBODY", raising=False)


GIVEN = {"A": "1", "B": "${A}/2", "C": "${NOBODY}x $HOME"}


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize("python", ["/usr/bin/python3", "'/a b/python'"])
def test_worker_matches_rays_setup(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    context = {"py_executable": python, "env_vars": GIVEN}
    mine = command_of(told(**context, command_prefix=[], java_jars=[]))
    assert (environ := dict(os.environ))["B"] == "1/2" and environ["C"] == f"x {environ['HOME']}"
    assert mine == [python.strip("'"), *WORKER, "--last=x=y"]

    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _, args: ran.append(args))
    for name in GIVEN:
        monkeypatch.setenv(name, "before")
    value: Any = Language
    theirs: Any = RuntimeEnvContext.deserialize(json.dumps(context))
    theirs.exec_worker([*WORKER, "--last=x=y"], value.Value("PYTHON"))
    assert {name: os.environ[name] for name in GIVEN} == {name: environ[name] for name in GIVEN}
    ((_, _, line),) = ran
    assert shlex.split(line.removeprefix("exec ")) == mine


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize(
    "arguments",
    [
        told(py_executable="/usr/bin/python3", env_vars=GIVEN, command_prefix=["nice"]),
        told(py_executable="/usr/bin/python3", override_worker_entrypoint="/x.py"),
        told(py_executable="/usr/bin/python3", new_in_a_release=True, env_vars=GIVEN),
        told(py_executable="uv run python", env_vars=GIVEN),
        told(py_executable="/a b/python", env_vars=GIVEN),
        told(py_executable="/bin/$(x)", env_vars=GIVEN),
        told(env_vars=GIVEN),
        told("JAVA", py_executable="/usr/bin/python3"),
        [*WORKER, CONTEXT, "{}"],
    ],
    ids=str,
)
def test_unknown_arguments_are_delegated_to_ray(arguments: list[str]) -> None:
    assert command_of(arguments) == [sys.executable, "/ray/setup_worker.py", *arguments]
    assert os.environ["A"] == "before"


def test_rays_setup_worker_exists() -> None:
    import ray._private.workers.default_worker as worker  # noqa: PLC0415  # pyright: ignore

    assert Path(worker.__file__).with_name("setup_worker.py").is_file()
