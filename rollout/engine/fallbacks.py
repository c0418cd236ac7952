"""What an engine does without when vLLM has changed under it: decided before it is built, each with
one loud line. `keel.rollout.vllm_contract` knows what each part leans on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module

import vllm

from keel.configs.schema import RolloutConfig
from keel.rollout.engine.begin import Begin, BeginAsVllm, BeginLikeTheLast
from keel.rollout.recording.base import RecorderName, recorder_name
from keel.rollout.spec import EngineSpec
from keel.rollout.vllm_contract import WRITTEN_FOR, Part, changes

_LOG = logging.getLogger(__name__)
RIGHT = f"vLLM {WRITTEN_FOR}"
SWITCHED_OFF = "it is switched off"
CASCADE = "keel.rollout.fastpath.cascade.backend"
RESIDUAL = "keel.rollout.engine.residual"


def require(*parts: Part) -> None:
    """Raises RuntimeError where vLLM lacks what an engine cannot do without."""
    if why := _changed(*parts):
        raise RuntimeError(f"{why}. There is no way around it: install {RIGHT}")


def choose_recorder(
    config: RolloutConfig, *, gpu: bool, full_attention: bool = True
) -> RecorderName:
    """As `recorder_name`, and native in place of packed where vLLM has changed under that. One that
    the recipe names is never replaced: that is a `ValueError`."""
    name = recorder_name(config, gpu=gpu, full_attention=full_attention)
    if name != "packed":
        return name
    if config.recorder == "packed" and (why := _changed("packed")):
        raise ValueError(
            f"rollout.recorder = 'packed': {why}. Set rollout.recorder to auto, which then takes "
            f"native, or install {RIGHT}"
        )
    lost = _lost(
        "packed",
        so="rollout.recorder = 'auto' takes native in place of packed, with vLLM's own scheduler "
        "and sampler: completions are the same in kind, and come more slowly",
        cure="set rollout.recorder to native",
    )
    return "native" if lost else name


def share_prompts(spec: EngineSpec, recorder: RecorderName) -> bool:
    """Have attention read a group's prompt once, in engines that are built in this process from now
    on, or as vLLM has it. Returns whether it will, where the model's layers are such."""
    plain = not spec.batch_invariant and spec.dtype != "float32"
    wanted = recorder == "packed" and plain and spec.config.cascades(full_attention=True)
    wanted = wanted and not _lost(
        "cascade",
        so="Attention reads a prompt once for each of its completions, which is slower",
        cure="set rollout.cascade_attention to false",
    )
    if wanted or CASCADE in sys.modules:  # which has vLLM's attention loaded
        import_module(CASCADE).install(wanted=wanted)
    return wanted


def invariant_layers(spec: EngineSpec) -> None:
    """Have batch-invariant layers computed by faster kernels that give the same bits, in engines
    that are built in this process from now on."""
    so = "Batch-invariant layers are vLLM's own, which is slower"
    if spec.batch_invariant and not _lost("invariant", so=so):
        from keel.rollout.engine.invariant import install  # noqa: PLC0415

        install()


@contextmanager
def residual_layers(spec: EngineSpec, layers: int) -> Iterator[None]:
    """Around building an engine of so many layers: they add up in float32, or as vLLM has them.
    Raises RuntimeError where this vLLM's cannot."""
    wanted = spec.wide_residual
    if wanted:
        require("residual")
    if wanted or RESIDUAL in sys.modules:
        import_module(RESIDUAL).install(wanted=wanted)
    yield
    if wanted:
        import_module(RESIDUAL).check_built(layers)


def takes_over_rows() -> bool:
    """Whether a decoding step with the rows of the one before is not prepared anew."""
    so = "Every decoding step is prepared anew, which is slower where sequences are few"
    return not _lost("steady", so=so)


def takes_bursts() -> bool:
    """Whether several decoding steps may be begun at once."""
    so = "Every decoding step waits for the host, which is slower where sequences are few"
    return not _lost("bursts", so=so)


def no_copies(config: RolloutConfig) -> str:
    """Why weights are not to be copied past vLLM's loader; empty if they are."""
    if not config.copy_weights:
        return SWITCHED_OFF
    return _lost(
        "copies",
        so="Weight updates go through vLLM's loader, tensor by tensor, which is slower",
        cure="set rollout.copy_weights to false",
    )


def bounds_kv_cache() -> bool:
    """Whether the KV cache can be kept to what an engine's completions can fill."""
    if why := _changed("kv_cache"):
        warn_of_large_cache(why)
    return not why


def quick_start(architectures: Sequence[str], *, gpu: bool) -> AbstractContextManager[None]:
    """Around building an engine: without what none of Keel's needs of a start. architectures: of
    its model, where that is all in this process."""
    parts: tuple[Part, ...] = ("start", "warm_up") if gpu else ("start",)
    if _lost(*parts, so="Engines start half a minute later on a new machine"):
        return nullcontext()
    from keel.rollout.engine.quick_start import known_here, plain_warm_up  # noqa: PLC0415

    known_here(architectures)
    return plain_warm_up() if gpu else nullcontext()


def begin_requests(engine: vllm.LLMEngine) -> Begin:
    """How requests of this engine begin."""
    so = "Turns of conversations begin as all requests of vLLM do, which is slower"
    return BeginAsVllm(engine) if _lost("begin", so=so) else BeginLikeTheLast(engine)


def warn_of_large_cache(why: str) -> None:
    _LOG.warning(
        "%s. The KV cache has vLLM's own size, all of rollout.gpu_memory_utilization, and not what "
        "rollout.max_num_seqs completions can fill; with rollout.sleep each update takes longer. "
        "Install %s, or lower rollout.gpu_memory_utilization",
        why,
        RIGHT,
    )


def warn_of_small_share(added_gib: float) -> None:
    _LOG.warning(
        "rollout.gpu_memory_utilization left no room for the keys and values of one completion. "
        "The KV cache takes %.1f GiB more, which was free on the GPU: raise the knob by as much, "
        "or leave it out",
        added_gib,
    )


def _lost(*parts: Part, so: str, cure: str = "") -> str:
    """As `_changed`, and a warning of it: what is `so` then, and what else than the right vLLM
    would be a `cure`."""
    if why := _changed(*parts):
        cures = f"Install {RIGHT}{cure and ', or '}{cure}"
        _LOG.warning("%s. %s. %s to have it said no more", why, so, cures)
    return why


def _changed(*parts: Part) -> str:
    """What these lean on and vLLM no longer has; empty: all is there."""
    lost = [change for part in parts for change in changes(part)]
    return f"vLLM {vllm.__version__} has changed: {'; '.join(lost)}" if lost else ""
