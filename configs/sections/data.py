"""Where prompts come from, and what each completion is worth."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from keel.configs.sections.agents import EnvironmentConfig
from keel.configs.sections.base import require, require_gradient, require_pass_rates
from keel.configs.sections.evaluation import BOXED
from keel.configs.system_prompts import SystemTemplate

PLACEHOLDER = re.compile(r"(?<!\{)\{\w[\w .-]*\}")
ROWS = ("jsonl", "file", "hub")
"""Sources whose prompts are rows of files."""
OF_ROWS = f"belongs to source: {', '.join(ROWS)}"
MOST = 10_000_000
"""Prompts of a source, all in memory; and its weight, of which sums are formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthConfig:
    """What the length of a completion costs it, compared with its siblings: `rewards/length.py`."""

    linear: float = 0.0
    """Cost of reaching `limit`, growing linearly from `target` on, in units of reward."""
    overlong: float = 0.0
    """Cost of reaching `limit`, growing over the last `margin` tokens before it, in units of
    reward."""
    overlong_charges: Literal["all", "right"] = "all"
    """Whom `overlong` charges: every completion that is too long, as in DAPO; or right ones alone,
    and then a wrong one loses nothing by being cut off."""
    target: int = 0
    """Tokens that cost nothing (`linear`)."""
    limit: int = 0
    """Tokens; 0: rollout.sampling.max_tokens; in an environment agents.max_sampled_tokens, or the
    window."""
    margin: int = 0
    """Tokens; 0: a fifth of `limit`."""
    correct_threshold: float = 0.999
    """A completion counts as right from this value of `correct` on. Lower it for rubrics."""
    wrong_too: bool = False
    """Compare wrong completions with each other, too. A policy may then learn to give up early."""
    may_outweigh: bool = False
    """Let a short wrong completion beat a long right one."""
    truncated: Literal["keep", "zero", "drop"] = "keep"
    """A completion that was cut off: scored like any other; worth 0; or left out of training."""

    def __post_init__(self) -> None:
        knob = "data.sources[].length"
        for name in ("linear", "overlong", "target", "limit", "margin"):
            value = getattr(self, name)
            require(value >= 0, f"{knob}.{name}", value, "must not be negative")
        require(
            0 < self.correct_threshold <= 1,
            f"{knob}.correct_threshold",
            self.correct_threshold,
            "must be in (0, 1]",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """What a completion, or a trajectory in an environment, may take in this domain. 0: what the
    run's own knob says, which is the most that engines have room for."""

    max_tokens: int = 0
    """Tokens of a completion, or of a turn; at most rollout.sampling.max_tokens."""
    window: int = 0
    """Environment: tokens of a context with what is sampled after it; at most agents.window."""
    max_turns: int = 0
    """Environment: as agents.max_turns, more or fewer."""
    max_sampled_tokens: int = 0
    """Environment: as agents.max_sampled_tokens, more or fewer."""
    call_s: float = 0.0
    """Environment: as agents.call_s, longer or shorter."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "window", "max_turns", "max_sampled_tokens", "call_s"):
            value = getattr(self, name)
            require(value >= 0, f"data.sources[].budget.{name}", value, "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """One source of prompts."""

    name: str
    """Name of the source; held-out sets appear as `eval/<name>/pass@1`."""
    source: Literal["reasoning_gym", "jsonl", "file", "hub", "environment"]
    """jsonl: JSON lines. file: a file of any kind, or a folder of them. hub: a dataset of the
    Hugging Face hub. environment: tasks that the environment itself makes from a seed, numbers
    0 … size − 1. docs/data.md"""
    task: str = ""
    """reasoning_gym: name of the task."""
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """reasoning_gym: the task's own options."""
    path: str = ""
    """jsonl: the file. file: a `.jsonl`, `.json`, `.csv`, `.tsv` (each may be `.gz`), `.parquet` or
    `.arrow` file, or a folder as the hub has it or `save_to_disk` writes it. hub: owner/name. A row
    holds `prompt` (text) or `messages`, and one of `answer`, `criteria`, `tests` and `reward`.
    Relative to the current folder; a `configs/…` that is not there is looked up in what came with
    Keel."""
    split: str = ""
    """file, hub: the split of a folder or dataset; empty: train."""
    subset: str = ""
    """file, hub: the subset of a folder or dataset that has several."""
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    """jsonl, file, hub: key → column, such as `{prompt: question, answer: solution}`; a dot looks
    into an object. '': the key is not in the file, whatever a column is called."""
    template: str = ""
    """jsonl, file, hub: the prompt's words, with `{column}` where a column's go and `{{x}}` for
    {x}. boxed: `{prompt}`, and a line that asks to reason step by step and to put the answer within
    `\\boxed{}` (`eval.variants[].ask`). Empty: the prompt as it is."""
    answer_after: str = ""
    """jsonl, file, hub: `answer` is what follows the last such mark; GSM8K's is ####."""
    raw: bool = False
    """The prompt goes to the model as it is, without a chat template, as base models want it.
    `rollout.sampling.stop` says where completions end."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """What the policy works in, over many turns (`agents`). With source: jsonl each line is a task
    for it; with reasoning_gym it has the tools, and the task's own verifier grades."""
    pass_rates: str = ""
    """Table of `keel filter` (`pass_rates.jsonl`): train on the prompts alone whose pass rate there
    is from `least_pass_rate` to `most_pass_rate`, and above 0. Held-out sets stay as they are."""
    least_pass_rate: float = 0.0
    """`pass_rates`: the lowest pass rate to train on."""
    most_pass_rate: float = 1.0
    """`pass_rates`: the highest pass rate to train on."""
    size: int = 0
    """reasoning_gym, environment: number of prompts. The others: read at most this many rows (0:
    all)."""
    holdout: int | Literal["all"] = 0
    """Prompts set aside for evaluation. They never train. all: the source is an evaluation set."""
    weight: float = 1.0
    """Share of the mix, relative to the other sources. 0: the source is for evaluation alone and
    needs a holdout."""
    domain: str = ""
    """Metrics and rewards are kept by domain; empty: the source's name."""
    kl_coef: float = 0.0
    """β, coefficient of the KL term for this domain. 0 is normal for mathematics."""
    thinking: bool = True
    """Whether the policy may think before it answers."""
    system: str = ""
    """System message put before each prompt; empty: none."""
    system_template: SystemTemplate = "none"
    """A system prompt of Keel's, put before `system` or what an environment opens with:
    reasoning (think first, then answer), tools, or tools-in-thinking (`agents.tools_in_thinking`).
    After the cold start of DeepSeek-V3.2, Tables 6 to 8."""
    on_bad_line: Literal["error", "skip"] = "error"
    """jsonl, file, hub: what to do with a malformed line or row. Skipped ones are counted and
    reported."""
    rewards: Mapping[str, float] = field(default_factory=lambda: {"correct": 1.0})
    """Reward parts and their weights: `correct`, `format` and the others of docs/rewards.md, or
    functions of your own by dotted name."""
    length: LengthConfig = field(default_factory=LengthConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)

    def __post_init__(self) -> None:
        knob = f"data.sources[{self.name or '?'}]"
        require(bool(self.name), f"{knob}.name", self.name, "must not be empty")
        require("/" not in self.name, f"{knob}.name", self.name, "must not contain '/'")
        if self.source == "reasoning_gym":
            require(bool(self.task), f"{knob}.task", self.task, "name a reasoning_gym task")
            require(self.size >= 1, f"{knob}.size", self.size, "must be at least 1 prompt")
            require(not self.path, f"{knob}.path", self.path, OF_ROWS)
        elif self.source == "environment":
            require(
                self.environment.given,
                f"{knob}.environment",
                "",
                "name one: environment: {target: module:Class}, or {program: …}",
            )
            require(
                self.environment.grades,
                f"{knob}.source",
                self.source,
                "an MCP server makes no tasks and grades none; use source: jsonl, with an answer, "
                "tests, criteria or a reward on each line",
            )
            require(self.size >= 1, f"{knob}.size", self.size, "must be at least 1 task")
            require(not self.path, f"{knob}.path", self.path, OF_ROWS)
            require(not self.task, f"{knob}.task", self.task, "belongs to source: reasoning_gym")
            require(
                not self.system,
                f"{knob}.system",
                self.system,
                "the environment opens the conversation itself",
            )
        else:
            named = "a dataset of the hub: owner/name" if self.source == "hub" else "a file"
            require(bool(self.path), f"{knob}.path", self.path, f"name {named}")
            require(not self.task, f"{knob}.task", self.task, "belongs to source: reasoning_gym")
        template = f"{knob}.system_template"
        require(
            self.environment.given or "tools" not in self.system_template,
            template,
            self.system_template,
            "there are no tools without an environment",
        )
        require(
            self.thinking or self.system_template in ("none", "tools"),
            template,
            self.system_template,
            "asks the policy to think; set thinking: true",
        )
        require(0 <= self.size <= MOST, f"{knob}.size", self.size, f"must be 0 to {MOST}")
        held = 0 if self.holdout == "all" else self.holdout
        require(held >= 0, f"{knob}.holdout", held, "must not be negative (all: every prompt)")
        self._check_rows(knob)
        require(
            self.source == "reasoning_gym" or not self.params,
            f"{knob}.params",
            dict(self.params),
            "belongs to source: reasoning_gym",
        )
        require(
            self.size == 0 or held < self.size or self.weight == 0,
            f"{knob}.holdout",
            self.holdout,
            f"must leave prompts to train on out of size = {self.size} (or set weight: 0)",
        )
        require_pass_rates(knob, self.least_pass_rate, self.most_pass_rate)
        bounds = (self.least_pass_rate, self.most_pass_rate)
        require(
            bool(self.pass_rates) or bounds == (0, 1),
            f"{knob}.pass_rates",
            self.pass_rates,
            "name the table that least_pass_rate and most_pass_rate are about",
        )
        require(0 <= self.weight <= MOST, f"{knob}.weight", self.weight, f"must be 0 to {MOST}")
        require(
            self.weight > 0 or self.holdout != 0,
            f"{knob}.weight",
            self.weight,
            "the source neither trains nor is evaluated on; set holdout: all to evaluate on it, or "
            "leave it out (data.only)",
        )
        require(self.kl_coef >= 0, f"{knob}.kl_coef", self.kl_coef, "must not be negative")
        for name in ("window", "max_turns", "max_sampled_tokens", "call_s"):
            require(
                self.environment.given or not getattr(self.budget, name),
                f"{knob}.budget.{name}",
                getattr(self.budget, name),
                "belongs to a source with an environment; budget.max_tokens is a completion's",
            )
        require(bool(self.rewards), f"{knob}.rewards", dict(self.rewards), "name at least one")
        for name, weight in self.rewards.items():
            require(math.isfinite(weight), f"{knob}.rewards.{name}", weight, "must be finite")

    def _check_rows(self, knob: str) -> None:
        """What is for prompts from files."""
        for name in ("on_bad_line", "columns", "template", "answer_after", "split", "subset"):
            of = ("file", "hub") if name in ("split", "subset") else ROWS
            value = getattr(self, name)
            said = f"belongs to source: {', '.join(of)}"
            unset = not value or value == "error"
            require(unset or self.source in of, f"{knob}.{name}", value, said)
        ending = self.path.rpartition(".")[2].lower()
        require(
            self.source != "jsonl" or ending not in ("csv", "tsv", "parquet", "arrow"),
            f"{knob}.source",
            self.source,
            f"reads JSON lines; set source: file for {self.path!r}",
        )
        require(
            self.source != "hub" or bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.path)),
            f"{knob}.path",
            self.path,
            "must be a dataset's name, owner/name; for a folder or a file set source: file",
        )
        require(
            not self.template or bool(PLACEHOLDER.search(self.template_text)),
            f"{knob}.template",
            self.template,
            "must have a {column} in it, such as {prompt}, or be boxed",
        )
        said = "cannot be with raw: true, which has no chat template to put it into; leave it out"
        for name, default in (("system", ""), ("system_template", "none")):
            value = getattr(self, name)
            require(not self.raw or value == default, f"{knob}.{name}", value, said)
        require(
            not self.raw or not self.environment.given,
            f"{knob}.raw",
            self.raw,
            "is for one completion of a text; an environment's turns need a chat template. Leave "
            "it out",
        )

    @property
    def has_rows(self) -> bool:
        """Whether its prompts are rows of files."""
        return self.source in ROWS

    @property
    def template_text(self) -> str:
        return f"{{prompt}}\n{BOXED}" if self.template == "boxed" else self.template

    @property
    def domain_name(self) -> str:
        return self.domain or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which prompts are trained on, and which are held out."""

    sources: tuple[SourceConfig, ...] = ()
    only: tuple[str, ...] = ()
    """Names of the sources to train on, as in a specialist's recipe; the others are left out as if
    they were not there. Empty: all."""
    train_on: tuple[str, ...] = ()
    """Names of the sources to train on; of the others the held-out sets alone are asked, which says
    what carries over to them. The tiny model's cold start teaches all. Empty: all."""
    max_prompt_tokens: int = 256
    """Longest prompt, chat template included, in tokens."""
    long_prompts: Literal["error", "drop"] = "error"
    """A prompt over `max_prompt_tokens`: name it and stop, or drop it and count it."""

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        repeated = sorted({name for name in names if names.count(name) > 1})
        require(not repeated, "data.sources", repeated, "each source needs a name of its own")
        self._require_known("data.only", self.only, names)
        if self.only:
            chosen = tuple(source for source in self.sources if source.name in self.only)
            object.__setattr__(self, "sources", chosen)
            names = [source.name for source in chosen]
        self._require_known("data.train_on", self.train_on, names)
        for source in self.sources:
            require(
                not self.train_on or source.name in self.train_on or bool(source.holdout),
                f"data.sources[{source.name}].holdout",
                source.holdout,
                "must be above 0: data.train_on leaves the source out, so all that could be asked "
                "are held-out prompts (or name it there, or leave it out by data.only)",
            )
        require(
            not names or any(self.weight_of(source) > 0 for source in self.sources),
            "data.sources",
            names,
            "at least one source needs a weight above 0"
            + " among those of data.train_on" * bool(self.train_on),
        )
        for source in self.sources:
            if self.weight_of(source) > 0:
                others = (source.length.linear, source.length.overlong, source.kl_coef)
                require_gradient(f"data.sources[{source.name}]", source.rewards, *others)
            first = self.rewards_by_domain[source.domain_name]
            require(
                dict(source.rewards) == dict(first),
                f"data.sources[{source.name}].rewards",
                dict(source.rewards),
                f"domain {source.domain_name!r} has {dict(first)} already; give this source a "
                "domain of its own, or the same rewards",
            )
            for name, others in (
                ("length", self.lengths_by_domain),
                ("budget", self.budgets_by_domain),
            ):
                require(
                    getattr(source, name) == others[source.domain_name],
                    f"data.sources[{source.name}].{name}",
                    getattr(source, name),
                    f"domain {source.domain_name!r} has another; give this source a domain of its "
                    f"own, or the same {name}",
                )
        require(
            self.max_prompt_tokens >= 1,
            "data.max_prompt_tokens",
            self.max_prompt_tokens,
            "must be at least 1",
        )

    @staticmethod
    def _require_known(knob: str, chosen: Sequence[str], names: Sequence[str]) -> None:
        for name in chosen:
            nearest = get_close_matches(name, names, n=1, cutoff=0.0)
            hint = f"; the nearest: {nearest[0]}" if nearest else ""
            require(name in names, knob, name, f"no source of that name{hint}")

    def weight_of(self, source: SourceConfig) -> float:
        """Its share in training: 0 where `train_on` leaves it out, or all of it is held out."""
        trained = not self.train_on or source.name in self.train_on
        return source.weight if trained and source.holdout != "all" else 0.0

    @property
    def rewards_by_domain(self) -> dict[str, Mapping[str, float]]:
        """Domain → reward part → weight."""
        return {source.domain_name: source.rewards for source in reversed(self.sources)}

    @property
    def domains_with_environments(self) -> frozenset[str]:
        return frozenset(s.domain_name for s in self.sources if s.environment.given)

    @property
    def lengths_by_domain(self) -> dict[str, LengthConfig]:
        return {source.domain_name: source.length for source in reversed(self.sources)}

    @property
    def budgets_by_domain(self) -> dict[str, BudgetConfig]:
        return {source.domain_name: source.budget for source in reversed(self.sources)}
