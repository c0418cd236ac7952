"""The environment of tasks that an author made: the policy has the tools, and submits an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keel.agents.env_runtime.errors import EnvironmentGone
from keel.agents.environments.general.child import Child, ChildEnded
from keel.agents.environments.general.folder import Folder, folders
from keel.agents.environments.general.parts import SUBMIT, answer_of, tools_child, verified

PRELOAD = tuple(f"keel.agents.environments.general.{name}" for name in ("checks", "desk"))


class General:
    """Task n of the environments in some folders, one after the other: of the prompt `name/n`, or
    the one that its `reward` names, `{"general": {"task": 3}}`.

    Tools and verifier run in processes of their own. That of the tools is forked before anything
    else is read, and can open no file: what the policy makes a tool do reaches no answer."""

    def __init__(self, folder: str | Sequence[str], verify_s: float = 20.0) -> None:
        """folder: one, or several: `keel.agents.environments.general.folder.folders`. verify_s:
        longest that a verifier may take; an answer it does not end with is wrong."""
        self._folders = folders([folder] if isinstance(folder, str) else folder)
        self._verify_s = verify_s
        self._tools: Child | None = None
        self._submitted: str | None = None
        self.offered: Sequence[Mapping[str, Any]] = ()
        self.done = False

    def opening(self, task: Mapping[str, Any], seed: int) -> str:
        self._folder, self._number = self._named(task)
        self._tools = tools_child(self._folder, seed)
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
        own = task.get("reward", {}).get("general", {}).get("task", name)
        if not str(own).isdecimal():
            raise ValueError(f"task {task.get('prompt_id')!r} does not end with a number")
        left = int(own)
        for folder in self._folders:
            count = len(folder.tasks())
            if left < count:
                return folder, left
            left -= count
        raise ValueError(f"there is no task {own}: the folders have {int(own) - left} (set `size`)")

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
        """`correct` (all that is demanded), and the `share` of it that is met."""
        if self._submitted is None:
            return {"correct": 0.0, "share": 0.0}, {"submitted": False}
        answer = answer_of(self._submitted)
        met = verified(self._folder, self._number, answer, self._verify_s)
        if isinstance(met, str):  # over what the policy wrote: every gate had it end
            return {"correct": 0.0, "share": 0.0}, {"submitted": True, "verifier": met}
        share = sum(met.values()) / len(met)
        missed = [name for name, ok in met.items() if not ok]
        return {"correct": float(not missed), "share": share}, {
            "submitted": True,
            "not met": missed,
        }

    def close(self) -> None:
        if self._tools is not None:
            self._tools.end()
