"""Heavy imports of engines; `tests.rollout.remote_engine` forks engines after importing this."""

from keel.model.imports import heavy_imports

with heavy_imports():
    from keel.rollout.engine import shims, vllm_engine  # noqa: F401
    from keel.rollout.vllm_fast.scheduler import FastScheduler  # noqa: F401
