"""Deterministic seeds, identical in every process and every run."""

from hashlib import blake2b


def seed_of(*of: object) -> int:
    """Derive a seed in [0, 2⁶³) from a hash of the parts. Only the last part may
    contain a slash."""
    key = "/".join(map(str, of)).encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1
