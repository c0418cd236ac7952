"""The current weights of the policy, for the rollout engines and for files: whole and under their
checkpoint names, however they are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.model.load import checkpoint_tensors, module_tensors, precision
from keel.model.weight_transfer.buckets import FlatBucket
from keel.model.weight_transfer.pack import BucketPacker
from keel.trainer.engine.deepspeed_internals import deepspeed
from keel.trainer.engine.expert_parallel import ExpertLayers


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
        gathered = deepspeed.zero.GatheredParameters(list(part.values()), enabled=self._stage == 3)
        with gathered:
            yield self._experts.original(part)
