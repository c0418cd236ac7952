"""What every engine imports, once: `tests.rollout.remote_engine` forks them from the process that
has loaded this."""

from keel.model.imports import heavy_imports

with heavy_imports():
    from keel.rollout.engine import shims, vllm_engine  # noqa: F401
    from keel.rollout.vllm_fast.scheduler import FastScheduler  # noqa: F401
