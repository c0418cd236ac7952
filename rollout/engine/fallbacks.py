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
SWITCHED_OFF = "it is switched off"
CASCADE = "keel.rollout.fastpath.cascade.backend"
RESIDUAL = "keel.rollout.engine.residual"


def require(*parts: Part) -> None:
    """Raises RuntimeError where vLLM lacks what an engine cannot do without."""
    if lost := [change for part in parts for change in changes(part)]:
        raise RuntimeError(f"{_changed(lost)}. There is no way around it: install {_right()}")


def choose_recorder(
    config: RolloutConfig, *, gpu: bool, full_attention: bool = True
) -> RecorderName:
    """As `recorder_name`, and native in place of packed where vLLM has changed under that. One that
    the recipe names is never replaced: that is a `ValueError`."""
    name = recorder_name(config, gpu=gpu, full_attention=full_attention)
    lost = changes("packed") if name == "packed" else []
    if not lost:
        return name
    if config.recorder == "packed":
        raise ValueError(
            f"rollout.recorder = 'packed': {_changed(lost)}. Set rollout.recorder to auto, which "
            f"then takes native, or install {_right()}"
        )
    _LOG.warning(
        "%s. rollout.recorder = 'auto' takes native in place of packed, with vLLM's own scheduler "
        "and sampler: completions are the same in kind, and come more slowly. Install %s, or set "
        "rollout.recorder to native to have it said no more",
        _changed(lost),
        _right(),
    )
    return "native"


def share_prompts(spec: EngineSpec, recorder: RecorderName) -> bool:
    """Have attention read a group's prompt once, in engines that are built in this process from now
    on, or as vLLM has it. Returns whether it will, where the model's layers are such."""
    plain = not spec.batch_invariant and spec.dtype != "float32"
    wanted = recorder == "packed" and plain and spec.config.cascades(full_attention=True)
    lost = changes("cascade") if wanted else []
    if lost:
        _LOG.warning(
            "%s. Attention reads a prompt once for each of its completions, which is slower. "
            "Install %s, or set rollout.cascade_attention to false to have it said no more",
            _changed(lost),
            _right(),
        )
    wanted = wanted and not lost
    if wanted or CASCADE in sys.modules:  # which has vLLM's attention loaded
        import_module(CASCADE).install(wanted=wanted)
    return wanted


def invariant_layers(spec: EngineSpec) -> None:
    """Have batch-invariant layers computed by faster kernels that give the same bits, in engines
    that are built in this process from now on."""
    own = "Batch-invariant layers are vLLM's own"
    if spec.batch_invariant and _fits("invariant", own, where=""):
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
    return _fits("steady", "Every decoding step is prepared anew")


def takes_bursts() -> bool:
    """Whether several decoding steps may be begun at once."""
    return _fits("bursts", "Every decoding step waits for the host")


def _fits(part: Part, without: str, where: str = " where sequences are few") -> bool:
    """Whether this vLLM is what a part of decoding leans on, or a warning of what is `without`."""
    if lost := changes(part):
        _LOG.warning(
            "%s. %s, which is slower%s. Install %s to have it said no more",
            _changed(lost),
            without,
            where,
            _right(),
        )
    return not lost


def no_copies(config: RolloutConfig) -> str:
    """Why weights are not to be copied past vLLM's loader; empty if they are."""
    if not config.copy_weights:
        return SWITCHED_OFF
    if lost := changes("copies"):
        _LOG.warning(
            "%s. Weight updates go through vLLM's loader, tensor by tensor, which is slower. "
            "Install %s, or set rollout.copy_weights to false to have it said no more",
            _changed(lost),
            _right(),
        )
        return _changed(lost)
    return ""


def bounds_kv_cache() -> bool:
    """Whether the KV cache can be kept to what an engine's completions can fill."""
    if lost := changes("kv_cache"):
        warn_of_large_cache(_changed(lost))
    return not lost


def quick_start(architectures: Sequence[str], *, gpu: bool) -> AbstractContextManager[None]:
    """Around building an engine: without what none of Keel's needs of a start. architectures: of
    its model, where that is all in this process."""
    parts: tuple[Part, ...] = ("start", "warm_up") if gpu else ("start",)
    if lost := [change for part in parts for change in changes(part)]:
        _LOG.warning(
            "%s. Engines start half a minute later on a new machine. Install %s to have it said no "
            "more",
            _changed(lost),
            _right(),
        )
        return nullcontext()
    from keel.rollout.engine.quick_start import known_here, plain_warm_up  # noqa: PLC0415

    known_here(architectures)
    return plain_warm_up() if gpu else nullcontext()


def begin_requests(engine: vllm.LLMEngine) -> Begin:
    """How requests of this engine begin."""
    if lost := changes("begin"):
        _LOG.warning(
            "%s. Turns of conversations begin as all requests of vLLM do, which is slower. Install "
            "%s to have it said no more",
            _changed(lost),
            _right(),
        )
        return BeginAsVllm(engine)
    return BeginLikeTheLast(engine)


def warn_of_large_cache(why: str) -> None:
    _LOG.warning(
        "%s. The KV cache has vLLM's own size, all of rollout.gpu_memory_utilization, and not what "
        "rollout.max_num_seqs completions can fill; with rollout.sleep each update takes longer. "
        "Install %s, or lower rollout.gpu_memory_utilization",
        why,
        _right(),
    )


def warn_of_small_share(added_gib: float) -> None:
    _LOG.warning(
        "rollout.gpu_memory_utilization left no room for the keys and values of one completion. "
        "The KV cache takes %.1f GiB more, which was free on the GPU: raise the knob by as much, "
        "or leave it out",
        added_gib,
    )


def _changed(lost: list[str]) -> str:
    return f"vLLM {vllm.__version__} has changed: {'; '.join(lost)}"


def _right() -> str:
    return f"vLLM {WRITTEN_FOR}"
