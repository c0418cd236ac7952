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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from keel.examples.tables import shop

_BOXED = "Put the final answer in \\boxed{}."


def tasks(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` JSONL lines that cycle through all kinds of questions. The same seed always
    gives the same lines."""
    for number in range(count):
        ask = shop.QUESTIONS[number % len(shop.QUESTIONS)]
        draw = random.Random(f"{seed}/{number}")
        data = shop.draw_shop(draw)
        while (answer := ask(data, draw)) is None or not answer.clear:
            data = shop.draw_shop(draw)  # until the question has one clear answer
        yield {
            "id": f"shop-{ask.__name__}-{number}",
            "prompt": f"{shop.ABOUT}\n\n{answer.question} {_BOXED}",
            **answer.rule,
            "environment": {"files": shop.files_of(data)},
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keel.examples.tables", description=__doc__)
    parser.add_argument("file", type=Path, help="the JSONL file to write")
    parser.add_argument("--count", type=int, default=1000, help="tasks (1000)")
    parser.add_argument("--seed", type=int, help="drawn by chance unless given, and then no secret")
    value = parser.parse_args(arguments)
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
