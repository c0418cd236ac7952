"""Load weights on the ranks, and yield the full weights under their checkpoint names."""

import io
import json
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from keel.configs.schema import ConfigError, ModelConfig
from keel.model.load import checkpoint_tensors, is_tied, module_tensors, precision, tokenizer_with
from keel.trainer.engine.deepspeed_internals import deepspeed
from keel.trainer.engine.expert_parallel import ExpertLayers
from keel.trainer.run.manifest import Entry, seal, sizes
from keel.weights.channel import FlatBucket
from keel.weights.sender import BucketPacker

_LOG = logging.getLogger(__name__)

Load = Callable[[], PreTrainedModel]  # a function that reads the model into host memory


class _OutlinePickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Parameter):  # the pickle's memo keeps tied weights tied
            return _empty_parameter, (tuple(obj.shape), obj.dtype, obj.requires_grad)
        return NotImplemented


def _empty_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=requires_grad)


def outline(model: PreTrainedModel) -> bytes:
    data = io.BytesIO()
    try:
        _OutlinePickler(data, protocol=5).dump(model)
    except Exception:  # pickles fail in many ways
        _LOG.warning("the model cannot be pickled, so every rank reads it", exc_info=True)
        return b""
    return data.getvalue()


def _from_outline(data: bytes, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Build a model with uninitialized weights, which take up no host memory until they are
    written. `data` must come from this run, because unpickling can run arbitrary code."""
    with torch.device(device):
        return pickle.loads(data)


def read_once(
    load: Load, dtype: torch.dtype, *, readers: int, loaded: PreTrainedModel | None = None
) -> tuple[PreTrainedModel, bytes]:
    """Load the model from disk on as few ranks as possible. Every rank must call this.

    The first `readers` ranks load the model, unless they already have it (`loaded`). The other
    ranks build it with uninitialized weights from rank 0's outline, and `zero.initialize` fills
    them in. If the model has no outline, they load it too. If loading fails on one rank, all ranks
    raise an error.

    Returns the model in host memory, along with the outline from which `build_from_outline` can
    build another copy. The outline is empty if any weights aren't in `dtype`, because DeepSpeed
    would round them.
    """
    model = loaded if loaded is not None and loaded.dtype == dtype else None
    failed: Exception | None = None
    if model is None and dist.get_rank() < readers:
        try:
            model = load()
        except Exception as error:  # the others wait in the collective below
            failed = error
    data = outline(model) if model is not None and dist.get_rank() == 0 else b""
    reports: list[Any] = [None] * dist.get_world_size()
    problem = failed and (isinstance(failed, ConfigError), str(failed))
    dist.all_gather_object(reports, (data, problem))
    if failed:
        raise failed
    for rank, (_, problem) in enumerate(reports):
        if problem:
            of_config, text = problem
            error = f"rank {rank} read no model: {text}"
            raise ConfigError(text) if of_config else RuntimeError(error)
    data = reports[0][0]
    if model is None:
        model = _from_outline(data) if data else load()
    exact = all(weight.dtype == dtype for weight in model.parameters())
    return model, data if exact else b""


def build_from_outline(data: bytes, load: Load, device: torch.device | str) -> PreTrainedModel:
    """Build another copy of the model with uninitialized weights on `device`. If the outline `data`
    is empty, the model is loaded again instead."""
    return _from_outline(data, device) if data else load()


def copy_weights(source: nn.Module, target: nn.Module, *, stage: int) -> None:
    """Copy weights from `source` to `target`. Every rank must call this."""
    for weight, copy in zip(source.parameters(), target.parameters(), strict=True):
        with gathered([weight], stage=stage), gathered([copy], stage=stage, modifier_rank=0):
            copy.data.copy_(weight.data)


def gathered(
    parameters: Sequence[Tensor], *, stage: int, modifier_rank: int | None = None
) -> AbstractContextManager[Any]:
    """Return a context in which ZeRO-3 parameters are unsharded. Only `modifier_rank` may modify
    them."""
    return deepspeed.zero.GatheredParameters(
        list(parameters), modifier_rank=modifier_rank, enabled=stage == 3
    )


class Weights:
    """Iterates over the full weights of a model initialized by DeepSpeed."""

    def __init__(self, model: PreTrainedModel, experts: ExpertLayers, *, stage: int) -> None:
        self._model, self._experts, self._stage = model, experts, stage
        self._packer: BucketPacker | None = None

    @property
    def sharded(self) -> bool:
        """True if no rank has all weights, so that all ranks have to iterate over them together."""
        return self._stage == 3 or self._experts.spread

    def named(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield each full tensor with its name in the checkpoint. Tensors are cast to `dtype` by
        `keel.model.load.precision`."""
        convert = precision(self._model, dtype)
        for name, tensor in checkpoint_tensors(self._model, whole=self._whole):
            yield name, convert(name, tensor)

    def buckets(self, dtype: torch.dtype, bucket_bytes: int) -> Iterator[FlatBucket]:
        if self._packer is None:
            self._packer = BucketPacker(self._model, dtype, bucket_bytes, whole=self._whole)
        return self._packer.buckets()

    def gather_along(self) -> None:
        """Help gather the weights while rank 0 iterates over them."""
        for _ in module_tensors(self._model, whole=self._whole) if self.sharded else ():
            pass

    @contextmanager
    def _whole(self, part: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        with gathered([*part.values()], stage=self._stage):
            yield self._experts.original(part)


_SHARD_BYTES = 4 * 2**30


def export_model(
    folder: Path, model: PreTrainedModel, weights: Weights, config: ModelConfig, path: str
) -> dict[str, Entry]:
    """Write a model folder and return the manifest entries for this rank's files. Every rank must
    call this."""
    first = dist.get_rank() == 0
    if first:
        named = weights.named(getattr(torch, config.dtype))
        end = _write_tokenizer(folder, config.tokenizer or path, config.chat_template)
        write_model(folder, model, named, dtype=config.dtype, end=end)
    else:
        weights.gather_along()
    dist.barrier()
    return seal(folder, sizes(folder)) if first else {}


def _write_tokenizer(folder: Path, source: str, chat_template: str = "") -> int | None:
    tokenizer = tokenizer_with(chat_template, source)
    tokenizer.save_pretrained(folder)
    return tokenizer.eos_token_id


def write_model(
    folder: Path,
    model: PreTrainedModel,
    weights: Iterable[tuple[str, Tensor]],
    *,
    dtype: str,
    end: int | None = None,
) -> None:
    """Write a model's config files and its `weights`, given as (name, tensor) pairs. Only one shard
    is held in host memory at a time. `end` is the tokenizer's EOS token id."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    part: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        shard = folder / f"shard-{len(shards)}.safetensors"
        save_file(part, shard, metadata={"format": "pt"})
        shard.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it private to its owner
        shards.append(list(part))

    for name, tensor in weights:
        count = tensor.numel() * tensor.element_size()
        if part and size + count > _SHARD_BYTES:
            flush()
            part, size = {}, 0
        part[name] = tensor.detach().cpu().clone()  # save_file refuses views of one storage
        size, total = size + count, total + count
    flush()
    files: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        (folder / f"shard-{index}.safetensors").rename(folder / file)
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")
    # The flag must tell readers of a head that is no longer tied.
    config = model.config.to_dict() | {"dtype": dtype, "tie_word_embeddings": is_tied(model)}
    type(model.config).from_dict(config).save_pretrained(folder)
    if model.can_generate():
        # Not by `save_pretrained`, which refuses what some published models contain, such as a
        # temperature without `do_sample`.
        generation = deepcopy(model.generation_config)
        ids: Any = generation.eos_token_id
        known = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        if end is not None and end not in known:  # it may be missing in a base model
            generation.eos_token_id = [end, *known] if known else end
        generation.to_json_file(folder / GENERATION_CONFIG_NAME)
