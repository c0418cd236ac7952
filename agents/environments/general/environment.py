"""The environment for tasks that an author model wrote: the policy uses the author's tools and
submits an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keel.agents.env_runtime.tool_objects import EnvironmentGone
from keel.agents.environments.general.author_code import (
    SUBMIT,
    Child,
    ChildEnded,
    Folder,
    parse_answer,
    resolve_folders,
    run_verifier,
    start_tools,
)


class General:
    """An environment that an author model wrote, with tools and a verifier.

    Tasks are numbered across all folders. The number is given by the name of the prompt (`name/n`)
    or by its `reward` (`{"general": {"task": 3}}`). The tools run in a process that is forked
    before anything else is read and that cannot open files. Therefore, not even a tool that the
    policy controls can read an answer.
    """

    def __init__(self, folder: str | Sequence[str], verify_s: float = 20.0) -> None:
        """Load the environments in `folder`. An answer counts as wrong if its verifier takes longer
        than `verify_s` seconds."""
        self._folders = resolve_folders([folder] if isinstance(folder, str) else folder)
        self._verify_s = verify_s
        self._tools: Child | None = None
        self._submitted: str | None = None
        self.offered: Sequence[Mapping[str, Any]] = ()
        self.done = False

    def opening(self, task: Mapping[str, Any], seed: int) -> str:
        self._folder, self._number = self._named(task)
        self._tools = start_tools(self._folder, seed)
        chosen = self._folder.tasks()[self._number]
        specs: dict[str, Any] = self._asked({"do": "describe"})
        if missing := [name for name in chosen["tools"] if name not in specs]:
            raise ValueError(f"{self._folder.path}: tools.py has no {missing[0]!r}")
        keys = ("name", "description", "parameters")
        self.offered = [
            *({key: specs[name][key] for key in keys} for name in chosen["tools"]),
            SUBMIT,
        ]
        return chosen["question"]

    def _named(self, task: Mapping[str, Any]) -> tuple[Folder, int]:
        name = str(task.get("prompt_id", "")).rpartition("/")[2]
        number = task.get("reward", {}).get("general", {}).get("task", name)
        if not str(number).isdecimal():
            raise ValueError(f"task {task.get('prompt_id')!r} does not end with a number")
        index = int(number)
        for folder in self._folders:
            count = len(folder.tasks())
            if index < count:
                return folder, index
            index -= count
        count = int(number) - index
        raise ValueError(f"there is no task {number}: the folders have {count} (set `size`)")

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        if name == SUBMIT["name"]:
            if self._submitted is None:
                self._submitted = arguments["answer_text"]
            self.done = True
            return "Submitted."
        return self._asked({"do": "call", "name": name, "arguments": arguments})

    def _asked(self, request: dict[str, Any]) -> Any:
        assert self._tools is not None
        try:
            return self._tools.ask(request)
        except ChildEnded as error:
            raise EnvironmentGone(f"the tools: {error}") from error

    def verdict(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Verify the submitted answer. `share` is the fraction of requirements that are met, and
        `correct` is 1 only if all are."""
        if self._submitted is None:
            return {"correct": 0.0, "share": 0.0}, {"submitted": False}
        answer = parse_answer(self._submitted)
        met = run_verifier(self._folder, self._number, answer, self._verify_s)
        if isinstance(met, str):  # caused by the answer: the pipeline checked the verifier
            return {"correct": 0.0, "share": 0.0}, {"submitted": True, "verifier": met}
        share = sum(met.values()) / len(met)
        unmet = [name for name, ok in met.items() if not ok]
        return {"correct": float(not unmet), "share": share}, {"submitted": True, "not met": unmet}

    def close(self) -> None:
        if self._tools is not None:
            self._tools.end()
