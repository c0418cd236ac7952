"""Choose the trajectories to save in each step, and write the token files for `keel report`.

Each line of `step_000001.tokens.jsonl.gz` is one group. (By contrast, `step_000001.jsonl`, which is
for `keel sft`, has one trajectory per line.) Each trajectory of the group has these fields:

always                     reward by parts with explanations, answer, length and finish reason
chosen for either file     messages
within `run.save_tokens`   tokens as text; for sampled ones log-probability, ratio, size of the
                           sampling mask, routing overlap and weight version
"""

import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.configs.paths import write_whole
from keel.configs.schema import RunConfig
from keel.rl.types import ScoredGroup, Segment, TokenNumbers, Trajectory

TOKENS = ".tokens.jsonl.gz"
"""File suffix. It differs from `.jsonl` so that `keel sft` does not train on these files."""
_MAX_LOG_RATIO = 20.0  # log-ratios are clipped to this limit, as in the loss
_PARTIAL = "\N{REPLACEMENT CHARACTER}"
_MAX_TOKENS_PER_CHARACTER = 4
"""Maximum number of tokens per character, because UTF-8 uses at most four bytes."""
_REFERENCE_CHARACTERS = 2_000
Place = tuple[ScoredGroup, int]  # a trajectory, identified by its group and its index in the group


def saved_segments(groups: Sequence[ScoredGroup], run: RunConfig) -> list[Segment]:
    """Return the segments whose tokens will be saved, in the order in which ranks number them."""
    places = _select_tokens(groups, run)
    return [s for group, index in places for s in group.group.trajectories[index].segments]


def _select_tokens(groups: Sequence[ScoredGroup], run: RunConfig) -> list[Place]:
    """Choose which trajectories to save along with their tokens, within the budget of
    `run.save_tokens`. Those of `run.save_trajectories` come first, then their siblings."""
    text = choose_trajectories(groups, run.save_trajectories)
    chosen = {(id(group), index) for group, index in text}
    siblings = [
        (group, index)
        for group in _distinct_groups(text)
        for index in range(len(group.group.trajectories))
        if (id(group), index) not in chosen
    ]
    budget, tokens = run.save_tokens, list[Place]()
    for group, index in (*text, *siblings):
        if (size := group.group.trajectories[index].total_tokens) <= budget:
            budget -= size
            tokens.append((group, index))
    return tokens


def choose_trajectories(groups: Sequence[ScoredGroup], count: int) -> list[Place]:
    """Choose the best and worst completions of each group, up to `count` in total. Groups with the
    largest reward spread come first."""
    chosen: list[Place] = []
    scored = [group for group in groups if len(group.rewards_G)]
    for group in sorted(scored, key=lambda g: -float(g.rewards_G.std())):
        ends = {group.rewards_G.argmax(), group.rewards_G.argmin()}
        chosen += [(group, int(i)) for i in ends]
    return chosen[:count]


def _distinct_groups(places: Sequence[Place]) -> list[ScoredGroup]:
    return list({id(group): group for group, _ in places}.values())


class TokenTexts:
    """Decodes a token sequence into the text added by each token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop the space of the first token, so one is put in front.
        self._prefix: list[int] = tokenizer.encode("a", add_special_tokens=False)[:1]
        self._cache: dict[int, str] = {}
        self._skip = len(self._decode([]))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            [*self._prefix, *ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def text(self, ids: Sequence[int]) -> str:
        return self._decode(ids)[self._skip :]

    def texts(self, ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        pending: list[int] = []
        for token in ids:
            if not pending and token not in self._cache:
                self._cache[token] = self.text([token])
            text = self.text([*pending, token]) if pending else self._cache[token]
            if text.endswith(_PARTIAL) and len(pending) + 1 < _MAX_TOKENS_PER_CHARACTER:
                pending.append(token)
                texts.append("")
            else:
                pending = []
                texts.append(text)
        if pending:
            texts[-1] = self.text(pending)
        return texts


class TokenFile:
    def __init__(
        self,
        run: RunConfig,
        texts: TokenTexts,
        numbers: Callable[[], Mapping[int, TokenNumbers]],
        answer: Callable[[Trajectory], str] = lambda _: "",
    ) -> None:
        self._run, self._texts, self._numbers, self._answer = run, texts, numbers, answer

    def write(self, path: Path, groups: Sequence[ScoredGroup]) -> None:
        chosen = choose_trajectories(groups, self._run.save_trajectories)
        if not self._run.save_tokens or not chosen:
            return
        selected = _select_tokens(groups, self._run)
        numbers, first = self._numbers() if selected else {}, 0
        contexts: dict[tuple[int, int], list[list[Any]]] = {}
        for group, index in selected:
            segments = group.group.trajectories[index].segments
            contexts[id(group), index] = [
                self._context(segment, numbers.get(first + place))
                for place, segment in enumerate(segments)
            ]
            first += len(segments)
        text = {(id(group), index) for group, index in chosen}
        lines = [
            finite_json(_group_record(group, text, contexts, self._answer))
            for group in _distinct_groups(chosen)
        ]
        data = "".join(line + "\n" for line in lines).encode()
        write_whole(path, gzip.compress(data, compresslevel=1, mtime=0))

    def _context(self, segment: Segment, seen: TokenNumbers | None) -> list[Any]:
        """Split a context into runs of sampled tokens and runs of other tokens. A run of sampled
        tokens becomes an object with lists of values, and a run of other tokens becomes a
        string."""
        ids = segment.token_ids_T.tolist()
        runs: list[Any] = []
        for sampled, places in groupby(range(len(ids)), key=segment.trainable_T.__getitem__):
            span = list(places)
            here = slice(span[0], span[-1] + 1)
            if not sampled:
                runs.append(self._texts.text(ids[here]))
                continue
            logp = segment.logp_old_T[here]
            run: dict[str, Any] = {
                "text": self._texts.texts(ids[here]),
                "logp": _round_values(logp, 4),
            }
            if seen is not None:
                log_ratio = np.clip(seen.logp_T[here] - logp, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
                run["ratio"] = _round_values(np.exp(log_ratio), 5)
                run["overlap"] = _round_values(seen.overlap_T[here], 3)
            if (sizes := segment.mask_sizes_T) is not None:
                run["kept"] = sizes[here].tolist()
            run["version"] = segment.version_T[here].tolist()
            runs.append({name: value for name, value in run.items() if value})
        return runs


def _round_values(values: NDArray[Any], digits: int) -> list[float | None]:
    rounded = [round(v, digits) if math.isfinite(v) else None for v in values.tolist()]
    return rounded if any(value is not None for value in rounded) else []


def _group_record(
    scored: ScoredGroup,
    text: set[tuple[int, int]],
    contexts: Mapping[tuple[int, int], list[list[Any]]],
    answer: Callable[[Trajectory], str],
) -> dict[str, Any]:
    """Build a group's record. In `text` and `contexts`, a trajectory is identified by its group's
    `id()` and its index."""
    prompt, group = scored.group.prompt, scored.group
    trajectories: list[dict[str, Any]] = []
    for index, trajectory in enumerate(group.trajectories):
        record: dict[str, Any] = {
            "sibling": trajectory.sibling,
            "reward": round(float(scored.rewards_G[index]), 6),
            "advantage": round(float(scored.advantages_G[index]), 6),
            "parts": {name: round(value, 6) for name, value in scored.parts_G[index].items()},
            "finish": trajectory.finish_reason,
            "tokens": trajectory.sampled_tokens,
            "answer": answer(trajectory)[:_REFERENCE_CHARACTERS],
        }
        if scored.notes_G and scored.notes_G[index]:
            record["notes"] = dict(scored.notes_G[index])
        if trajectory.usage is not None:
            record["usage"] = asdict(trajectory.usage)
        if trajectory.verdict is not None and trajectory.verdict.facts:
            record["facts"] = dict(trajectory.verdict.facts)
        if (place := (id(scored), index)) in contexts or place in text:
            record |= {"messages": trajectory.messages, "opening": trajectory.opening}
            record["contexts"] = contexts.get(place, [])
        trajectories.append(record)
    return {
        "prompt": prompt.prompt_id,
        "domain": prompt.domain,
        "messages": () if prompt.environment else prompt.messages,
        "reference": prompt.expected[:_REFERENCE_CHARACTERS],
        "dropped": group.dropped,
        "trajectories": trajectories,
    }


def finite_json(value: Any) -> str:
    """Return ASCII JSON for browsers. Numbers that JSON can't represent become null."""
    try:
        return json.dumps(value, allow_nan=False, default=str, separators=(",", ":"))
    except ValueError:  # rare, and slow: every value is visited
        return json.dumps(_finite(value), allow_nan=False, default=str, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
