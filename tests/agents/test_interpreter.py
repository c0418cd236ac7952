"""The Python interpreter: a real kernel, its state, and cells that go wrong."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import keel
from keel.agents.env_process.client import Hosted, Program
from keel.agents.environments.interpreter import (
    CELL_S,
    ENDING_S,
    MOST_CHARACTERS,
    Interpreter,
    _Said,
    split_call_time,
)
from keel.agents.types import EnvironmentLost
from keel.configs.sections.agents import AgentsConfig
from tests.agents.episodes import PATIENT, TASK, alive, run, use
from tests.waiting import PATIENCE_S, wait_for, within_some

PYTHON = Program(
    target="keel.agents.environments.interpreter:Interpreter",
    folder=Path(keel.__file__).parent,
    arguments={"cell_s": PATIENCE_S},
    env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    deadlines=PATIENT,
)
needs_jupyter = pytest.mark.skipif(
    find_spec("jupyter_client") is None or find_spec("ipykernel") is None,
    reason="jupyter_client and ipykernel are not installed",
)


def kernels(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.e2e
@needs_jupyter
def test_the_kernel_keeps_its_state() -> None:
    async def play() -> None:
        environment = Hosted(PYTHON)
        opening = await environment.open(TASK, seed=3)
        assert [tool.name for tool in opening.tools] == ["python"]
        assert opening.messages == TASK.messages

        async def cell(code: str) -> str:
            result = await use(environment, "python", code=code)
            assert not result.failed
            return result.text

        assert await cell("import math\nx = 6\nprint('a')\nx * 7") == "a\n42"
        assert await cell("math.floor(x / 4)") == "1"
        assert "ZeroDivisionError: division by zero" in await cell("x / 0")
        assert "SyntaxError" in await cell("x +")
        assert "StdinNotImplementedError" in await cell("input()")
        output = await cell("print('y' * 50_000)")
        assert len(output) < MOST_CHARACTERS + 100 and "characters left out" in output
        # A dead kernel is restarted.
        assert "all variables are gone" in await cell("import os; os._exit(3)")
        assert "NameError" in await cell("x")
        assert environment._process is not None
        (kernel,) = kernels(environment._process.pid)
        assert alive(kernel)
        await environment.close()
        wait_for(lambda: not alive(kernel))

    run(play())


@pytest.mark.e2e
@needs_jupyter
def test_a_slow_cell_is_interrupted() -> None:
    async def play(cell_s: float) -> None:
        environment = Hosted(replace(PYTHON, arguments={"cell_s": cell_s, "ending_s": cell_s}))
        await environment.open(TASK, seed=3)

        async def cell(code: str) -> str:
            return (await use(environment, "python", code=code)).text

        # After an interrupt, later cells run and the state is kept.
        output = await cell("x = 6\nprint('begun', flush=True)\nimport time; time.sleep(1000)")
        assert output.startswith("begun") and "KeyboardInterrupt" in output
        assert f"a cell may run for {cell_s:g} s" in output
        assert [await cell(f"x + {one}") for one in range(3)] == ["6", "7", "8"]
        # A kernel that ignores interrupts is restarted.
        deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(1000)"
        output = await cell(deaf)
        assert "could not be interrupted" in output and "all variables are gone" in output
        assert await cell("1 + 1") == "2"
        await environment.close()

    within_some(lambda cell_s: run(play(cell_s)), (2.0, 10.0, 60.0))


@pytest.mark.e2e
@needs_jupyter
def test_the_kernel_ends_with_its_episode() -> None:
    async def play() -> None:
        environment = Hosted(PYTHON)
        await environment.open(TASK, seed=3)
        assert environment._process is not None
        (kernel,) = kernels(environment._process.pid)
        with pytest.raises(EnvironmentLost, match="did not end within 3 s"):
            await use(environment, "python", 3.0, code="import os; os.kill(os.getppid(), 19)")
        wait_for(lambda: not alive(kernel))
        await environment.close()

    run(play())


@pytest.mark.parametrize("call_s", [AgentsConfig().call_s, 2.0, 150.0, 240.0, float("inf")])
def test_limits_fit_the_call_time(call_s: float) -> None:
    cell_s, ending_s, start_s = split_call_time(CELL_S, ENDING_S, call_s)
    assert cell_s + 2 * ending_s < call_s and cell_s + ending_s + start_s < call_s
    assert min(cell_s, ending_s, start_s) > 0
    assert (cell_s == CELL_S) is (call_s > 200) and cell_s >= min(CELL_S, 0.45 * call_s)
    assert split_call_time(0.1, ENDING_S, call_s)[0] == 0.1


@pytest.mark.e2e
@needs_jupyter
def test_an_endless_cell_does_not_end_the_episode() -> None:
    """The default time limit of a cell may exceed a call's."""

    async def play(call_s: float) -> None:
        environment = Hosted(replace(PYTHON, arguments={}))
        await environment.open(TASK, seed=3)
        try:
            for code, why in (
                ("while True: pass", "Interrupted: a cell may run for"),
                ("import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass", "anew"),
            ):
                assert why in (await use(environment, "python", call_s, code=code)).text
        finally:
            await environment.close()

    within_some(lambda call_s: run(play(call_s)), (8.0, 20.0, 60.0))


@needs_jupyter
@pytest.mark.parametrize("more", [0, 1])
def test_long_temporary_paths_still_allow_sockets(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # which it sets
        monkeypatch.setenv(name, "")
    suffix_length = len("/kernel-12345678/k1000-5")
    long = tmp_path / ("x" * (107 + more - suffix_length - len(f"{tmp_path}/")))
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    interpreter = Interpreter()
    assert Path(interpreter._folder).parent == (Path("/tmp") if more else long)
    interpreter.close()
    assert not Path(interpreter._folder).exists() and not list(long.iterdir())


def test_a_long_output_loses_its_middle() -> None:
    output = _Said()
    for one in range(10_000):
        output.add("stream", {"text": f"{one}\n"})
    text = str(output)
    assert text.startswith("0\n1\n") and text.endswith("9998\n9999")
    assert MOST_CHARACTERS < len(text) < MOST_CHARACTERS + 50
    output = _Said()
    output.add("error", {"traceback": ["\x1b[0;31mKeyError\x1b[0m: 3"]})
    output.add("execute_result", {"data": {"text/plain": "x"}})
    assert str(output) == "KeyError: 3\nx"


@pytest.mark.e2e
def test_missing_packages_name_the_install_command(tmp_path: Path) -> None:
    (tmp_path / "ipykernel.py").write_text("import nobody_has_this\n")

    async def play() -> None:
        program = Program(target=PYTHON.target, env={"PYTHONPATH": str(tmp_path)})
        environment = Hosted(program)
        with pytest.raises(EnvironmentLost, match="pip install jupyter_client ipykernel"):
            await environment.open(TASK, seed=3)
        await environment.close()

    run(play())
