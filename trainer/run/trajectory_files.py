"""Trajectories of a step that are kept, and the file in which `keel report` finds their tokens.

A line of `step_000001.tokens.jsonl.gz` is a group. (`step_000001.jsonl` is for `keel sft`, a
trajectory a line.) What stands there of each of its trajectories:

always                     its reward, by parts, and why; its answer, its length and how it ended
in the text, or budgeted   its messages
within `run.save_tokens`   its tokens as text; of sampled ones log-probability, ratio, size of the
                           sampling mask, routing overlap and version of the weights
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.configs.schema import RunConfig
from keel.rl.types import ScoredGroup, Segment, TokenNumbers, Trajectory

TOKENS = ".tokens.jsonl.gz"
"""What the file's name ends with: unpacked, it is not taken for what `keel sft` learns from."""
BOUND = 20.0
"""Largest log-ratio, as in the loss."""
PARTIAL = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Bytes of one in UTF-8, and so tokens that may share it."""
REFERENCE = 2_000
"""Characters of a reference answer, and of an extracted one, that are kept."""


@dataclass(frozen=True, slots=True)
class Saved:
    """By place: group, and trajectory inside it."""

    text: Sequence[tuple[ScoredGroup, int]]
    """In the readable text."""
    tokens: Sequence[tuple[ScoredGroup, int]]
    """With the numbers of each token."""

    @property
    def segments(self) -> list[Segment]:
        """Of `tokens`, in order: the ranks number them so."""
        return [s for group, index in self.tokens for s in group.group.trajectories[index].segments]


def saved(groups: Sequence[ScoredGroup], run: RunConfig) -> Saved:
    """What is kept of a step; the same for the same groups."""
    text = choose(groups, run.save_trajectories)
    chosen = {(id(group), index) for group, index in text}
    others = [
        (group, index)
        for group in unique([group for group, _ in text])
        for index in range(len(group.group.trajectories))
        if (id(group), index) not in chosen
    ]
    left, tokens = run.save_tokens, list[tuple[ScoredGroup, int]]()
    for group, index in (*text, *others):
        if (size := group.group.trajectories[index].total_tokens) <= left:
            left -= size
            tokens.append((group, index))
    return Saved(text, tokens)


def choose(groups: Sequence[ScoredGroup], count: int) -> list[tuple[ScoredGroup, int]]:
    """The best and worst completions of the groups in turn: the pairs that the step learns from."""
    chosen: list[tuple[ScoredGroup, int]] = []
    for group in sorted(
        groups, key=lambda g: -float(g.rewards_G.std()) if len(g.rewards_G) else 0.0
    ):
        if len(group.rewards_G):
            chosen += [
                (group, int(i)) for i in {group.rewards_G.argmax(), group.rewards_G.argmin()}
            ]
    return chosen[:count]


def unique(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    return list({id(group): group for group in groups}.values())


class TokenTexts:
    """What each token adds to a text, by a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop the space of a text's first token.
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False)[:1]
        self._known: dict[int, str] = {}
        self._skip = len(self._decode([]))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            [*self._before, *ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def text(self, ids: Sequence[int]) -> str:
        return self._decode(ids)[self._skip :]

    def texts(self, ids: Sequence[int]) -> list[str]:
        """One for each of `ids`. A character of several tokens stands at its last."""
        found: list[str] = []
        open_: list[int] = []
        for token in ids:
            if not open_ and token not in self._known:
                self._known[token] = self.text([token])
            text = self.text([*open_, token]) if open_ else self._known[token]
            if text.endswith(PARTIAL) and len(open_) + 1 < LONGEST_CHARACTER:
                open_.append(token)
                found.append("")
            else:
                open_ = []
                found.append(text)
        if open_:
            found[-1] = self.text(open_)
        return found


class TokenFile:
    """Writes the groups of a step. `numbers`: what the ranks saw, by the number of the segment."""

    def __init__(
        self,
        run: RunConfig,
        texts: TokenTexts,
        numbers: Callable[[], Mapping[int, TokenNumbers]],
        answer: Callable[[Trajectory], str] = lambda _: "",
    ) -> None:
        """answer: extracts the answer of a completion; "" if there is none."""
        self._run, self._texts, self._numbers, self._answer = run, texts, numbers, answer

    def write(self, path: Path, groups: Sequence[ScoredGroup]) -> None:
        """Whole or not at all: others may be reading along. Raises OSError."""
        kept = saved(groups, self._run)
        if not self._run.save_tokens or not kept.text:
            return
        numbers, first = self._numbers() if kept.tokens else {}, 0
        contexts: dict[tuple[int, int], list[list[Any]]] = {}
        for group, index in kept.tokens:
            segments = group.group.trajectories[index].segments
            contexts[id(group), index] = [
                self._context(segment, numbers.get(first + place))
                for place, segment in enumerate(segments)
            ]
            first += len(segments)
        text = {(id(group), index) for group, index in kept.text}
        lines = [
            json.dumps(described(group, text, contexts, self._answer), default=str)  # in ASCII
            for group in unique([group for group, _ in kept.text])
        ]
        fresh = path.with_suffix(".tmp")
        data = "".join(line + "\n" for line in lines).encode()
        fresh.write_bytes(gzip.compress(data, compresslevel=1, mtime=0))
        fresh.replace(path)

    def _context(self, segment: Segment, seen: TokenNumbers | None) -> list[Any]:
        """The runs of a segment, in order: text for tokens that nobody sampled, an object for
        sampled ones, with a number a token."""
        ids = segment.token_ids_T.tolist()
        runs: list[Any] = []
        for sampled, places in groupby(range(len(ids)), key=segment.trainable_T.__getitem__):
            span = list(places)
            here = slice(span[0], span[-1] + 1)
            if not sampled:
                runs.append(self._texts.text(ids[here]))
                continue
            logp = segment.logp_old_T[here]
            run: dict[str, Any] = {"text": self._texts.texts(ids[here]), "logp": rounded(logp, 4)}
            if seen is not None:
                ratio = np.exp(np.clip(seen.logp_T[here] - logp, -BOUND, BOUND))
                run |= {"ratio": rounded(ratio, 5), "overlap": rounded(seen.overlap_T[here], 3)}
            if segment.sampling_mask is not None:
                run["kept"] = segment.sampling_mask.sizes()[here].tolist()
            run["version"] = segment.version_T[here].tolist()
            runs.append({name: value for name, value in run.items() if value})
        return runs


def rounded(values: NDArray[Any], digits: int) -> list[float | None]:
    """Null where a value is not known; nothing if none is."""
    found = [round(v, digits) if math.isfinite(v) else None for v in values.tolist()]
    return found if any(value is not None for value in found) else []


def described(
    scored: ScoredGroup,
    text: set[tuple[int, int]],
    contexts: Mapping[tuple[int, int], list[list[Any]]],
    answer: Callable[[Trajectory], str],
) -> dict[str, Any]:
    """A line of the file. text, contexts: by `id` of the group, and trajectory."""
    prompt, group = scored.group.prompt, scored.group
    trajectories: list[dict[str, Any]] = []
    for index, trajectory in enumerate(group.trajectories):
        about: dict[str, Any] = {
            "sibling": trajectory.sibling,
            "reward": round(float(scored.rewards_G[index]), 6),
            "advantage": round(float(scored.advantages_G[index]), 6),
            "parts": {name: round(value, 6) for name, value in scored.parts_G[index].items()},
            "finish": trajectory.finish_reason,
            "tokens": trajectory.sampled_tokens,
            "answer": answer(trajectory)[:REFERENCE],
        }
        if scored.notes_G and scored.notes_G[index]:
            about["notes"] = dict(scored.notes_G[index])
        if trajectory.usage is not None:
            about["usage"] = asdict(trajectory.usage)
        if trajectory.verdict is not None and trajectory.verdict.facts:
            about["facts"] = dict(trajectory.verdict.facts)
        if (place := (id(scored), index)) in contexts or place in text:
            about |= {"messages": trajectory.messages, "opening": trajectory.opening}
            about["contexts"] = contexts.get(place, [])
        trajectories.append(about)
    return {
        "prompt": prompt.prompt_id,
        "domain": prompt.domain,
        "messages": () if prompt.environment else prompt.messages,
        "reference": prompt.expected[:REFERENCE],
        "dropped": group.dropped,
        "trajectories": trajectories,
    }
