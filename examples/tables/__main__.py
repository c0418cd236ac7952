"""Write code-interpreter tasks about generated tables: `python -m keel.examples.tables --count 2000
tables.jsonl`.

Each line contains a question, the rule for its answer, and the text of the files. The seed is
random unless given, because the policy can read this code and could recompute the answers from a
known seed.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keel.examples.tables import shop, stations
from keel.examples.tables.task import Answer, Files

MARK = "Put the final answer in \\boxed{}."
MOST_DRAWS = 200
SCENES: dict[str, tuple[Callable[[random.Random], Any], Callable[[Any], Files], str, Any]] = {
    "shop": (shop.draw_shop, shop.files_of, shop.ABOUT, shop.QUESTIONS),
    "stations": (stations.draw_network, stations.files_of, stations.ABOUT, stations.QUESTIONS),
}
"""For each kind of data, the functions that draw it, write it, and ask about it."""


def tasks(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` JSONL lines, cycling through all kinds of questions. The same seed gives the
    same lines."""
    kinds = [(scene, ask) for scene, (_, _, _, questions) in SCENES.items() for ask in questions]
    for number in range(count):
        scene, ask = kinds[number % len(kinds)]
        make, write, about, _ = SCENES[scene]
        draw = random.Random(f"{seed}/{number}")
        data, answer = _draw_answer(make, ask, draw)
        yield {
            "id": f"{scene}-{ask.__name__}-{number}",
            "prompt": f"{about}\n\n{answer.question} {MARK}",
            **answer.rule,
            "environment": {"files": write(data)},
        }


def _draw_answer(
    make: Callable[[random.Random], Any],
    ask: Callable[[Any, random.Random], Answer | None],
    draw: random.Random,
) -> tuple[Any, Answer]:
    """Draw data repeatedly until the question has one clear answer."""
    for _ in range(MOST_DRAWS):
        data = make(draw)
        if (answer := ask(data, draw)) is not None and answer.clear:
            return data, answer
    raise RuntimeError(f"{ask.__name__}: no clear answer in {MOST_DRAWS} draws")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keel.examples.tables", description=__doc__)
    parser.add_argument("file", type=Path, help="the JSONL file to write")
    parser.add_argument("--count", type=int, default=1000, help="tasks (1000)")
    parser.add_argument("--seed", type=int, help="drawn by chance unless given, and then no secret")
    value = parser.parse_args(arguments)
    if value.count < 1:
        parser.error("--count must be at least 1")
    seed = secrets.randbits(64) if value.seed is None else value.seed
    try:
        with value.file.open("x", encoding="utf-8") as file:
            for task in tasks(value.count, seed):
                file.write(json.dumps(task, ensure_ascii=False) + "\n")
    except OSError as error:
        print(f"{value.file}: {error.strerror}; name a new file", file=sys.stderr)
        return 2
    print(f"{value.count:,} tasks in {value.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
