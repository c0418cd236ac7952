"""Computes reward parts with verifiers, judges and user functions, and combines them into a score.

`scorer.py` scores a group. It sends the completions to verifiers in other processes (`pool.py`,
`worker.py`, `rules/verifiers.py`, `code/verifier.py`) or to a judge (`judge/service.py`), and
`compose.py` weights the parts.
"""
