"""Imports the slow modules that engines need. `tests.rollout.remote_engine` imports this module
once and then forks a process for each engine."""

from keel.model.imports import heavy_imports

with heavy_imports():
    from keel.rollout.engine import shims, vllm_engine  # noqa: F401
    from keel.rollout.vllm_fast.scheduler import _FastPath  # noqa: F401
