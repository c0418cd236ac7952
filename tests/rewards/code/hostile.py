"""Programs that cheat or do harm, and rounds that verify all of them.

    python -m tests.rewards.code.hostile [--rounds 5]

Each program answers a task in both of its forms, as a program that prints the sum of two numbers
and as a function `add`, without ever adding. The rounds print a JSON object: the number of
`programs` after a few for warming up, the names of `rewarded` ones, and the process's
footprint `before` and `after`. Nothing else runs here, so that the two can be compared exactly.
"""

import argparse
import gc
import json
import os
import tempfile
import threading
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from keel.configs.sections.rewards import CodeConfig
from keel.rewards.code.verifier import _CodeVerdict, code_verifier
from keel.rewards.sandbox.processes import adopt_orphans

ADD_STDIN = {"stdin": "20 22\n", "stdout": "42\n"}
ADD_CALL = {"call": "add", "args": [20, 22], "returns": 42}
HURRIED = CodeConfig(completion_s=0.8, time_s=0.1, memory_mib=256)
HOSTILE: dict[str, str] = {
    name: f"def add(*numbers):\n{indent(body, '    ')}\nif __name__ == '__main__':\n    add()\n"
    for name, body in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
"""Maps names to sources."""
SLEEPERS = {"sleeping", "sleeping deaf to signals", "stopping itself"}
"""Programs that always use up their time."""


def answer(source: str) -> str:
    return f"Here it is:\n\n```python\n{source}\n```\n"


def verify_code(
    spec: dict[str, Any], text: str, settings: CodeConfig | None = None
) -> _CodeVerdict:
    return code_verifier(spec, settings or CodeConfig())(text)


def footprint() -> dict[str, Any]:
    """Resources of this process."""
    gc.collect()
    own = Path(f"/proc/{os.getpid()}")
    children = [
        child
        for task in os.listdir(own / "task")
        for child in (own / "task" / task / "children").read_text().split()
    ]
    return {
        "files": len(os.listdir(own / "fd")),
        "processes": len(children),
        "threads": threading.active_count(),
        "folders": sorted(os.listdir(tempfile.gettempdir())),
        "resident": int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5, help="runs of each program")
    options = parser.parse_args()
    runs = [(n, test) for n in sorted(set(HOSTILE) - SLEEPERS) for test in (ADD_STDIN, ADD_CALL)]
    rewarded: list[str] = []

    def verify(runs: list[tuple[str, dict[str, Any]]]) -> None:
        for name, test in runs:
            spec = {"kind": "code", "tests": [test]}
            if verify_code(spec, answer(HOSTILE[name]), HURRIED).score:
                rewarded.append(name)

    # A private folder and a subreaper, so that everything the rounds leave behind is counted.
    with tempfile.TemporaryDirectory(prefix="keel-rounds-") as folder, adopt_orphans():
        tempfile.tempdir = folder
        verify(runs[::6])
        before = footprint()
        for _ in range(options.rounds):
            verify(runs)
        after = footprint()
    programs = len(runs) * options.rounds
    report = {"programs": programs, "rewarded": rewarded, "before": before, "after": after}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
