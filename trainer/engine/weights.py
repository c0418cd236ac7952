"""How weights get into the ranks, and out of them to rollout engines and files: whole and under
their checkpoint names, however they are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.configs.schema import ConfigError
from keel.model.load import checkpoint_tensors, module_tensors, precision
from keel.trainer.engine.deepspeed_internals import deepspeed
from keel.trainer.engine.expert_parallel import ExpertLayers
from keel.weights.buckets import FlatBucket
from keel.weights.meta_model import from_outline, outline
from keel.weights.pack import BucketPacker

Load = Callable[[], PreTrainedModel]
"""Reads the model, into host memory."""


def read_once(
    load: Load, dtype: torch.dtype, *, readers: int, read: PreTrainedModel | None = None
) -> tuple[PreTrainedModel, bytes]:
    """The model in host memory, and an outline to make its twin of, for `copy_weights`. Collective.

    The first `readers` ranks `load` it, unless they have (`read`). On all others its weights are
    unset, and come with `zero.initialize`; without an outline (empty) they load it, too. There is
    none for a twin of a model with weights in more than `dtype`, which DeepSpeed rounds.

    What one rank cannot load is raised on all of them, a ConfigError as such.
    """
    model = read if read is not None and read.dtype == dtype else None
    failed: Exception | None = None
    if model is None and dist.get_rank() < readers:
        try:
            model = load()
        except Exception as error:  # the others wait to hear of it
            failed = error
    written = outline(model) if model is not None and dist.get_rank() == 0 else b""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        said, (written, failed and (isinstance(failed, ConfigError), str(failed)))
    )
    if failed:
        raise failed
    for rank, (_, trouble) in enumerate(said):
        if trouble:
            ours, text = trouble
            raise ConfigError(text) if ours else RuntimeError(f"rank {rank} read no model: {text}")
    written = said[0][0]
    if model is None:
        model = from_outline(written) if written else load()
    exact = all(weight.dtype == dtype for weight in model.parameters())
    return model, written if exact else b""


def twin(written: bytes, load: Load, device: torch.device | str) -> PreTrainedModel:
    """Another model of the kind that `read_once` has found, its weights unset and on `device`;
    loaded, if there is no outline."""
    return from_outline(written, device) if written else load()


def copy_weights(source: nn.Module, target: nn.Module, *, stage: int) -> None:
    """Between two models of one kind that DeepSpeed has both taken over, or at stages below 3 the
    first alone. Collective. stage: of ZeRO."""
    pairs = zip(source.named_parameters(), target.named_parameters(), strict=True)
    for (name, given), (other, taken) in pairs:
        if name != other:
            raise RuntimeError(f"{other} of the reference policy is {name} of the policy")
        with gathered([given], stage=stage), gathered([taken], stage=stage, modifier_rank=0):
            taken.data.copy_(given.data)


def gathered(
    parameters: Sequence[Tensor], *, stage: int, modifier_rank: int | None = None
) -> AbstractContextManager[Any]:
    """Within it these are whole on every rank. modifier_rank: whose changes to them stay."""
    return deepspeed.zero.GatheredParameters(
        list(parameters), modifier_rank=modifier_rank, enabled=stage == 3
    )


class Weights:
    """Of a model that DeepSpeed has taken over."""

    def __init__(self, model: PreTrainedModel, experts: ExpertLayers, *, stage: int) -> None:
        """`stage`: of ZeRO."""
        self._model, self._experts, self._stage = model, experts, stage
        self._packers: dict[tuple[int, torch.dtype], BucketPacker] = {}

    @property
    def gathered(self) -> bool:
        """Whether they are spread over ranks: then all of them must iterate together, to the end,
        in any of the following."""
        return self._stage == 3 or self._experts.spread

    def named(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint name and tensor, in `dtype` (see `keel.model.load.precision`)."""
        convert = precision(self._model, dtype)
        for name, tensor in checkpoint_tensors(self._model, whole=self._whole):
            yield name, convert(name, tensor)

    def buckets(self, dtype: torch.dtype, bucket_bytes: int) -> Iterator[FlatBucket]:
        """The same in buckets of this size, on this rank's device."""
        key = bucket_bytes, dtype
        if key not in self._packers:
            self._packers[key] = BucketPacker(self._model, dtype, bucket_bytes, whole=self._whole)
        return self._packers[key].buckets()

    def gather_along(self) -> None:
        """What a rank does that wants none while others iterate."""
        for _ in module_tensors(self._model, whole=self._whole) if self.gathered else ():
            pass

    @contextmanager
    def _whole(self, part: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        with gathered([*part.values()], stage=self._stage):
            yield self._experts.original(part)
