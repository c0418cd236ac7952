"""Seeds from what they are for: the same in every process and every run."""

from __future__ import annotations

from hashlib import blake2b


def seed_of(*of: object) -> int:
    """A seed in [0, 2⁶³) from the texts of its parts; a text that may hold a slash comes last."""
    key = "/".join(map(str, of)).encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1
