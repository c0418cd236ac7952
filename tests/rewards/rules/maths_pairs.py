"""Draws pairs of plain answers, and compares `keel.rewards.rules.plain_maths` with math-verify on
them.

python -m tests.rewards.rules.maths_pairs [--count 20000] [--seed 0]
"""

from __future__ import annotations

import argparse
import logging
import random
from collections import Counter
from collections.abc import Iterator

from math_verify import parse, verify

from keel.rewards.rules.plain_maths import Number, reading, same

UNITS = (
    "\\text{ cm}",
    "\\,\\text{kg}",
    " \\mathrm{m}^2",
    "\\text{ apples}",
    "^\\circ",
    "^{\\circ}",
)
DECIMALS = ("0", "5", "25", "50", "75", "10", "125", "333333", "3333333", "1234565", "0000006")


def number(rng: random.Random) -> str:
    whole = rng.choice([rng.randint(0, 12), rng.randint(0, 2_000), rng.randint(0, 10**7)])
    below = rng.randint(1, 12)
    separated = f"{whole:,}"
    ways = [f"{whole}"] * 3 + [f"{whole}.{rng.choice(DECIMALS)}", f".{rng.choice(DECIMALS)}"]
    ways += [f"{whole}/{below}", f"\\frac{{{whole}}}{{{below}}}", f"\\dfrac{{-{whole}}}{{{below}}}"]
    ways += [separated, separated.replace(",", "{,}"), f"0{whole}", f"{whole % 10}.5/{below}"]
    return rng.choice(["", "", "", "-", "+"]) + rng.choice(ways)


def dressed(rng: random.Random, text: str) -> str:
    name = rng.choice("xynkabtzMPfdg") + rng.choice([" = ", "="])
    ways = [text + rng.choice(["\\%", "%"]), f"\\${text}", f"${text}$", name + text]
    ways += [text + rng.choice(UNITS)]
    return rng.choice([*ways, *[text] * 8])


def again(rng: random.Random, text: str) -> str:
    """About the same number in another form."""
    found = reading(text)
    if not isinstance(found, Number):
        return number(rng)
    value = found.value
    if value.denominator == 1:
        return rng.choice([f"{value}", f"{value}.0", f"{int(value):,}"])
    top, below = value.numerator, value.denominator
    ways = [f"\\frac{{{top}}}{{{below}}}", f"{top}/{below}", f"{float(value):.3f}"]
    return rng.choice([*ways, f"{float(value):.6f}", f"{float(value):.7f}"])


def several(rng: random.Random) -> str:
    items = [f"{rng.randint(-9, 9)}" for _ in range(rng.choice([1, 2, 2, 2, 3, 4]))]
    items = [item + rng.choice(["", "", f"/{rng.randint(1, 5)}"]) for item in items]
    if len(items) == 2:
        items[0] = rng.choice([items[0], items[0], "-\\infty"])
        items[1] = rng.choice([items[1], items[1], "\\infty"])
    ways = [("\\{", "\\}"), ("(", ")"), ("\\left(", "\\right)"), ("[", "]"), ("[", ")"), ("(", "]")]
    opening, closing = rng.choice(ways)
    return opening + rng.choice([",", ", "]).join(items) + closing


def varied(rng: random.Random, text: str) -> str:
    """The same elements in another order, or between other brackets."""
    if text.startswith("\\{"):
        items = text[2:-2].split(",")
        return "\\{" + ",".join(rng.sample(items, len(items))) + "\\}"
    return text.replace(*rng.choice([("(", "["), ("[", "("), (")", "]"), (" ", "")]))


def pairs(seed: int, count: int) -> Iterator[tuple[str, str]]:
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.6:
            plain = number(rng)
            other = again(rng, plain) if rng.random() < 0.6 else number(rng)
            yield dressed(rng, plain), dressed(rng, other)
        else:
            right = several(rng)
            yield right, varied(rng, right) if rng.random() < 0.6 else several(rng)


def compared(seed: int, count: int) -> tuple[Counter[str], list[tuple[str, str]]]:
    """How many pairs were found alike, different or left alone; and where math-verify differs."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    counts: Counter[str] = Counter()
    wrong: list[tuple[str, str]] = []
    for right, given in pairs(seed, count):
        left, other = reading(right), reading(given)
        verdict = same(left, other) if left is not None and other is not None else None
        counts[{True: "alike", False: "different", None: "left alone"}[verdict]] += 1
        if verdict is not None:
            read = [parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (right, given)]
            if verify(*read, timeout_seconds=0) != verdict:
                wrong.append((right, given))
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, wrong = compared(options.seed, options.count)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    print(f"{len(wrong)} not as math-verify", *wrong, sep="\n")


if __name__ == "__main__":
    main()
