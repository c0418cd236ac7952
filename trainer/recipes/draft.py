"""A recipe as `keel new` writes it: what a user decides, with a comment where one helps."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from keel.configs.sections.model import EMBEDDED

COMMENTS_AT = 34
"""Column that comments begin in."""
_PLAIN = re.compile(r"[A-Za-z_~./][\w~./:-]*(?<!:)")
_TAKEN = ("null", "true", "false", "yes", "no", "on", "off", "inf", "nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the prompts come from, and what judges completions."""

    name: str
    said: str
    """In a sentence: what the policy learns from."""
    knobs: Mapping[str, object]
    """Of `data.sources[]`, in the order in which they are written."""
    comments: Mapping[str, str]
    """Knob → what to know of it."""
    max_prompt_tokens: int
    about_prompts: str = ""
    drop_long: bool = False
    """Rows that nobody has looked at may be longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """All that is decided."""

    path: str
    """The file."""
    model: str
    source: Source
    gpus: int
    """Of a machine; 0: none."""
    nodes: int
    gpu_gib: float
    """0: what the GPUs here have."""
    steps: int
    max_tokens: int
    think: bool

    @property
    def embedded(self) -> bool:
        return self.model == EMBEDDED


def text_of(draft: Draft) -> str:
    """The YAML."""
    return "\n".join(_aligned(_lines(draft))) + "\n"


def _lines(draft: Draft) -> Iterator[tuple[str, str]]:
    """Lines, and the comment of each."""
    all_gpus = draft.gpus * draft.nodes
    machine = f"{all_gpus} GPU{'s' * (all_gpus > 1)}" if all_gpus else "this machine's CPU"
    model = "the embedded model" if draft.embedded else draft.model.rstrip("/").rpartition("/")[2]
    learns = f"{model[:1].upper()}{model[1:]} learns {draft.source.said}, on {machine}."
    file = shlex.quote(draft.path)
    yield f"# {' '.join(learns.split())}", ""  # a path may have anything in it
    yield f"#   {' '.join(f'keel check {file}; keel train {file}; keel knobs NAME'.split())}", ""
    yield "run:", ""
    yield f"  dir: {scalar(f'runs/{draft.source.name}')}", "metrics, checkpoints, trained model"
    yield f"  steps: {draft.steps}", ""
    yield f"  eval_every: {max(1, draft.steps // 10)}", "steps between looks at what is held out"
    if not all_gpus:
        yield "  device: cpu", ""
    else:
        yield f"  gpus_per_node: {draft.gpus}", ""
        if draft.nodes > 1:
            yield f"  nodes: {draft.nodes}", ""
        if draft.gpu_gib:
            yield f"  gpu_gib: {draft.gpu_gib:g}", "memory of each, for `keel check` elsewhere"
    dtype = ", dtype: float32" * draft.embedded
    about = "built on the spot" if draft.embedded else "a folder, or a name of the hub"
    yield f"model: {{path: {scalar(draft.model)}{dtype}}}", about
    yield "data:", ""
    yield f"  max_prompt_tokens: {draft.source.max_prompt_tokens}", draft.source.about_prompts
    if draft.source.drop_long:
        yield "  long_prompts: drop", "counted, and left out"
    yield "  sources:", ""
    start = "    - "
    for knob, value in {"name": draft.source.name, **draft.source.knobs}.items():
        yield f"{start}{knob}: {flow(value)}", draft.source.comments.get(knob, "")
        start = "      "
    if not draft.embedded:
        thinks = "thinks first: wants more tokens" if draft.think else "answers at once"
        yield f"      thinking: {flow(draft.think)}", f"true or false; {thinks}"
    yield "rollout:", ""
    if draft.embedded:
        yield "  engines: 2", ""
    sampling = {"top_p": 0.95, "top_k": 64 if draft.embedded else 512}
    yield f"  sampling: {flow({**sampling, 'max_tokens': draft.max_tokens})}", ""
    prompts = 16 if draft.embedded else 32
    batch = {"prompts_per_step": prompts, "group_size": 8}
    yield f"algorithm: {flow(batch)}", f"{prompts * 8} completions a step"
    yield f"trainer: {{lr: {'2.0e-4' if draft.embedded else '1.0e-6'}}}", ""


def _aligned(lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    for line, comment in lines:
        yield f"{line:<{COMMENTS_AT - 1}} # {comment}" if comment else line


def flow(value: object) -> str:
    """On one line, as YAML (and OmegaConf) reads it back."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{scalar(str(k))}: {flow(v)}' for k, v in value.items())}}}"
    return scalar(value) if isinstance(value, str) else json.dumps(value)


def scalar(text: str) -> str:
    """A text, quoted where it could be read as something else."""
    if _PLAIN.fullmatch(text) and text.lower() not in _TAKEN and text != "~":
        return text
    return json.dumps(text.replace("${", "\\${"), ensure_ascii=False)
