"""Patches of vLLM that an engine needs, chosen from its spec and installed before it is built."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module

from keel.rollout.recording.base import RecorderName
from keel.rollout.spec import EngineSpec

CASCADE = "keel.rollout.vllm_fast.cascade.backend"
RESIDUAL = "keel.rollout.engine.residual"


def share_prompts(spec: EngineSpec, recorder: RecorderName) -> bool:
    """Install or remove attention that reads a group's prompt once.

    Returns whether engines built from now on use it where the model's layers allow it.
    """
    plain = not spec.batch_invariant and spec.dtype != "float32"
    wanted = recorder == "packed" and plain and spec.config.cascades(full_attention=True)
    if wanted or CASCADE in sys.modules:
        import_module(CASCADE).install(wanted=wanted)
    return wanted


def invariant_layers(spec: EngineSpec) -> None:
    """Install faster batch-invariant kernels that return the same bits as vLLM's."""
    if spec.batch_invariant:
        from keel.rollout.engine.invariant import install  # noqa: PLC0415

        install()


@contextmanager
def residual_layers(spec: EngineSpec, layers: int) -> Iterator[None]:
    """Build engines of `layers` layers with the residual stream of `spec.residual_dtype`."""
    wanted = spec.wide_residual
    if wanted or RESIDUAL in sys.modules:
        import_module(RESIDUAL).install(wanted=wanted)
    yield
    if wanted:
        import_module(RESIDUAL).check_built(layers)


def quick_start(architectures: Sequence[str], *, gpu: bool) -> AbstractContextManager[None]:
    """Build engines without the parts of vLLM's warm-up that Keel does not use.

    architectures: classes of the model to load in this process, or none.
    """
    from keel.rollout.engine.skip_warmup import known_here, plain_warm_up  # noqa: PLC0415

    known_here(architectures)
    return plain_warm_up() if gpu else nullcontext()
