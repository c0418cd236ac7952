"""Tracing of vLLM's layerwise reload by `keel.weights.copy_plan`, on small modules with similar
loaders. The tests import vLLM, not this module."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keel.rl.recordings import NO_ROUTE
from keel.weights.channel import HostData
from tests.buckets import data_of, pack_buckets
from tests.rollout.remote_engine import update_kind

pytestmark = pytest.mark.e2e
H, E, INNER, RANK, RANKS, WORDS = 16, 4, 8, 1, 2, 11
"""Hidden size, experts, their inner size, tensor-parallel rank and size, vocabulary."""
BF16 = torch.bfloat16


def parameter(*shape: int, loader: Any = None, dtype: torch.dtype = BF16) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)
    if loader is not None:
        made.weight_loader = loader  # type: ignore[attr-defined]
    return made


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(16, H, loader=self.load)

    @staticmethod
    def load(param: Tensor, loaded: Tensor) -> None:
        param[: len(loaded)].data.copy_(loaded)
        param[len(loaded) :].data.fill_(0)


class Qkv(nn.Module):
    """Fused, with a bias, which vLLM loads without a temporary tensor."""

    rows: ClassVar = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(16, H, loader=self.load)
        self.bias = parameter(16, loader=self.load)

    def load(self, param: Tensor, loaded: Tensor, shard: str) -> None:
        param.data.narrow(0, *self.rows[shard]).copy_(loaded)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(E, H, dtype=torch.float32)


class Experts(nn.Module):
    """One tensor-parallel rank of per-expert tensors; columns of the last one are strided."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = parameter(E, INNER, H, loader=self.load)
        self.w2 = parameter(E, H, INNER // RANKS, loader=self.load)

    def load(self, param: Tensor, loaded: Tensor, shard: str, expert: int) -> None:
        here = INNER // RANKS
        to = param.data[expert]
        if shard == "w2":
            to.copy_(loaded.narrow(1, RANK * here, here))
        else:
            to.narrow(0, 0 if shard == "w1" else here, here).copy_(
                loaded.narrow(0, RANK * here, here)
            )


class WholeExperts(nn.Module):
    """The experts of one rank under expert parallelism. As in vLLM, its loader returns at once for
    experts of other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = parameter(E // RANKS, 2 * INNER, H, loader=self.load)
        self.w2 = parameter(E // RANKS, H, INNER, loader=self.load)

    def load(self, param: Tensor, loaded: Tensor, shard: str, expert: int) -> None:
        rank, local = divmod(expert, E // RANKS)
        if rank == RANK:
            start = INNER if shard == "w3" else 0
            param.data[local].narrow(0, start, len(loaded)).copy_(loaded)


class Toy(nn.Module):
    """A model whose shards and experts have separate checkpoint names."""

    def __init__(self, *extra: tuple[str, nn.Module]) -> None:
        super().__init__()
        self.embed, self.qkv, self.gate, self.experts = Embedding(), Qkv(), Gate(), Experts()
        for name, module in extra:
            self.add_module(name, module)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "head.weight":  # tied
                continue
            module, *key, leaf = name.split(".")
            param = getattr(getattr(self, module), leaf)
            loader = getattr(param, "weight_loader", None)
            if loader is None:
                from vllm.model_executor.model_loader.weight_utils import default_weight_loader  # noqa: PLC0415

                default_weight_loader(param, tensor)
            elif module == "experts":
                loader(param, tensor, key[1], int(key[0]))
            else:
                loader(param, tensor, *key)


def checkpoint(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (WORDS, H), "gate.weight": (E, H)}
    for shard, (_, rows) in Qkv.rows.items():
        shapes |= {f"qkv.{shard}.weight": (rows, H), f"qkv.{shard}.bias": (rows,)}
    for e in range(E):
        shapes |= {f"experts.{e}.{w}.w13": (INNER, H) for w in ("w1", "w3")}
        shapes[f"experts.{e}.w2.w2"] = (H, INNER)
    shapes["head.weight"] = (WORDS, H)
    return {name: torch.randn(shape).to(BF16) for name, shape in shapes.items()}


class Worker:
    def __init__(self, *extra: tuple[str, nn.Module]) -> None:
        from vllm.config import VllmConfig  # noqa: PLC0415
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading  # noqa: PLC0415

        from keel.weights.loader import WeightsExtension  # noqa: PLC0415

        self.model = Toy(*extra)
        record_metadata_for_reloading(self.model)
        self.extension: Any = WeightsExtension()
        self.extension.rank, self.extension.device = 0, torch.device("cpu")
        self.extension.model_runner = SimpleNamespace(get_model=lambda: self.model)
        config: Any = VllmConfig()
        config.model_config = SimpleNamespace(dtype=BF16)
        self.extension.vllm_config = config

    def update(self, tensors: dict[str, Tensor], *, copies: bool = True, size: int = 900) -> str:
        """Send an update whose blocks end within layers; returns the method of the next update."""
        self.extension.keel_begin_update(copies)
        planned = update_kind(self.extension) == "copies"
        for bucket in pack_buckets(tensors.items(), size):
            data = np.array(data_of(bucket))
            copy = type(bucket)(entries=bucket.entries, data=HostData(data))
            self.extension.keel_load_bucket(copy)
            if planned:
                data[:] = 0x55  # the owner may reuse the bucket
        self.extension.keel_finish_update(None)
        return update_kind(self.extension)

    def weights(self) -> dict[str, Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}

    def scribble(self) -> None:
        for tensor in self.model.parameters():
            tensor.data.fill_(float("nan"))


def assert_equal(actual: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert actual.keys() == right.keys()
    for name, tensor in right.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


def loaded(tensors: dict[str, Tensor], *extra: tuple[str, nn.Module]) -> dict[str, Tensor]:
    worker = Worker(*extra)
    assert worker.update(tensors, copies=False) == "rollout.copy_weights is false"
    return worker.weights()


@pytest.mark.parametrize("size", [900, 10**6])
def test_copies_equal_the_loader(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    worker = Worker()
    addresses = {name: p.data_ptr() for name, p in worker.model.named_parameters()}
    assert worker.update(checkpoint(1), size=size) == "copies"
    assert_equal(worker.weights(), loaded(checkpoint(1)))
    rights = [loaded(checkpoint(seed)) for seed in (2, 3)]
    assert not torch.equal(rights[0]["experts.w2"], rights[1]["experts.w2"])
    monkeypatch.setattr(Toy, "load_weights", None)  # vLLM's loader is not used any more
    for seed, right in zip((2, 3), rights, strict=True):
        worker.scribble()
        assert worker.update(checkpoint(seed), size=size) == "copies"
        assert_equal(worker.weights(), right)
    assert {name: p.data_ptr() for name, p in worker.model.named_parameters()} == addresses


def test_whole_experts_are_copied_on_their_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(("experts", WholeExperts()))
    for seed in (1, 2, 3):
        tensors = checkpoint(seed)
        assert worker.update(tensors) == "copies"
        held = worker.weights()
        for local, expert in enumerate(range(RANK * E // RANKS, (RANK + 1) * E // RANKS)):
            gate_up = [tensors[f"experts.{expert}.{shard}.w13"] for shard in ("w1", "w3")]
            assert torch.equal(held["experts.w13"][local], torch.cat(gate_up))
            assert torch.equal(held["experts.w2"][local], tensors[f"experts.{expert}.w2.w2"])
        monkeypatch.setattr(Toy, "load_weights", None)  # vLLM's loader is not used any more
        worker.scribble()


def test_unfinished_update_leaves_no_plan() -> None:
    worker = Worker()
    worker.extension.keel_begin_update()
    assert worker.update(checkpoint(1)) == "an earlier update did not finish"
    assert_equal(worker.weights(), loaded(checkpoint(1)))


class Single(nn.Module):
    """A layer with one weight and a hook after loading."""

    def __init__(self, after: Callable[[Any], None] | None = None, rows: int = 8) -> None:
        super().__init__()
        self.weight = parameter(8, H)
        if rows < 8:
            self.weight.weight_loader = self.load_part  # type: ignore[attr-defined]
            self.rows = rows
        if after is not None:
            self.quant_method = after_loading(after)

    def load_part(self, param: Tensor, tensor: Tensor) -> None:
        param.data[: self.rows].copy_(tensor)


def after_loading(act: Callable[[Any], None]) -> Any:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # noqa: PLC0415

    class Method(QuantizeMethodBase):
        def create_weights(self, *args: Any, **kwargs: Any) -> None: ...

        def apply(self, *args: Any, **kwargs: Any) -> Any: ...

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            act(layer)

    return Method()


def single(seed: int, rows: int = 8) -> dict[str, Tensor]:
    return checkpoint(seed) | {"single.weight": torch.randn(rows, H).to(BF16)}


def derives(layer: Any) -> None:
    layer.handle = layer.weight.data * 2


def shuffles_unseen(layer: Any) -> None:
    """Writes without a PyTorch operation, as a custom kernel may."""
    rows = layer.weight.data.view(torch.int16).numpy()
    rows[:] = rows[::-1].copy()


REFUSED = {
    "derives": (derives, 8, "aten.mul.Tensor reads"),
    "shuffles_unseen": (shuffles_unseen, 8, "single.weight is not what was copied to it"),
    "partial": (None, 6, "single.weight: 96 of its 128 elements are loaded"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_derived_weights_are_left_to_the_loader(kind: str) -> None:
    after, rows, why = REFUSED[kind]
    worker = Worker(("single", Single(after, rows)))
    assert why in worker.update(single(1, rows))
    for seed in (1, 2):
        tensors = single(seed, rows)
        assert why in worker.update(tensors)
        right, actual = loaded(tensors, ("single", Single(after, rows))), worker.weights()
        for each in (right, actual):
            each["single.weight"] = each["single.weight"][:rows]  # the rest is undefined
        assert_equal(actual, right)


def attention(source: Callable[[], nn.Module]) -> nn.Module:
    """Derives a product from another layer's weight after every load, as MLA does."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: PLC0415

    class Attention(nn.Module, AttentionLayerBase):
        def __init__(self) -> None:
            super().__init__()
            self.absorbed = parameter(H, 8)

        def get_attn_backend(self) -> Any: ...

        def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            self.absorbed.data.copy_(source().weight.data.t() * 2)

    return Attention()


def test_attention_derives_state_in_every_update() -> None:
    latent = Single()
    worker = Worker(("single", latent), ("attention", attention(lambda: latent)))
    address = worker.model.get_parameter("attention.absorbed").data_ptr()
    assert worker.update(single(1)) == "copies"
    for seed in (2, 3):
        worker.scribble()
        tensors = single(seed)
        worker.update(tensors)
        absorbed = worker.model.get_parameter("attention.absorbed")
        assert torch.equal(absorbed, tensors["single.weight"].t() * 2)
        assert absorbed.data_ptr() == address
    assert "process_weights_after_loading" not in worker.model.attention.__dict__


CPU = torch.device("cpu")


def test_unfiled_slots_have_no_route() -> None:
    from keel.rollout.vllm_fast.install import _SlotRoutes  # noqa: PLC0415

    captured = torch.zeros((4, 3, 2), dtype=torch.int32)
    routes = _SlotRoutes(captured, torch.tensor([5, 6, 0, 0]), layers=[0, 2], size=8)
    routes.store(2)  # both tokens use expert 0 only, also under capture
    rows = routes.rows(np.array([5, 6, 7]))
    assert (rows[:2] == 0).all() and (rows[2] == NO_ROUTE).all()


def test_cache_is_bounded_by_completions() -> None:
    from vllm.v1.engine import core  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: PLC0415

    from keel.rollout.engine import patches as cache  # noqa: PLC0415

    shape: Any = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=32)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    page = 2 * 16 * 2 * 64 * 2  # keys and values of 16 tokens
    _enough = cache.SPARE * 8 * 2 * (7 + cache._SPARE_PAGES) * page  # 100 tokens are 7 pages
    calls: list[list[float]] = []

    def record(vllm_config: Any, kv_cache_specs: Any, available_memory: list[float]) -> str:
        calls.append(available_memory)
        return "configs"

    before, core.get_kv_cache_configs = core.get_kv_cache_configs, record
    try:
        with cache.cap_kv_cache():
            both, mixed = {"0": full, "1": full}, {"0": full, "1": window}
            memory = [int(10 * _enough), int(_enough / 2), 10**12]
            built = core.get_kv_cache_configs(config, [both, both, mixed], memory)
        with cache.cap_kv_cache(conversations=20):
            core.get_kv_cache_configs(config, [both], memory[:1])
        assert core.get_kv_cache_configs is record
    finally:
        core.get_kv_cache_configs = before
    assert built == "configs" and calls[0] == [_enough, int(_enough / 2), 10**12]
    assert calls[1:] == [[_enough * 20 / 8]], "room for conversations that wait for a tool"
