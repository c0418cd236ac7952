"""Cost of attention by position of a context, dense and sparse: the curve of Figure 3 in the report
on DeepSeek-V3.2 (2025).

    python -m benchmarks.sparse.cost                          one layer of DeepSeek-V3.2, to 128k
    python -m benchmarks.sparse.cost --small                  a tiny one, to see that it runs

Times a block of queries that ends at each position: the indexer with its selection, sparse
attention to what it selected, and dense attention to everything before; each forward, and forward
and backward. The tensors are those that `keel.model.sparse` works on, with random numbers; queries
go by chunks, so that nothing of queries × keys is held for more than one. Prints a table and, with
--out, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.revision import commit
from keel.model.sparse.attention import CHUNK_BYTES, Chunk, chunk_size, selection
from keel.model.sparse.chunks import by_chunks


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    latent: int
    rope: int
    index_heads: int
    index_size: int
    top_k: int
    queries: int
    """Of a block, timed together."""
    positions: tuple[int, ...]


TO_128K = tuple(1024 * n for n in (4, 8, 16, 32, 64, 96, 128))
LARGE = Shape(128, 512, 64, 64, 128, 2048, 512, TO_128K)
SMALL = Shape(4, 32, 16, 4, 32, 32, 16, (64, 128, 256))
COLUMNS = ("index", "sparse", "dense", "sparse, training", "dense, training")


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [1, L, …] at the end of a context of s keys [1, s, …]."""

    query: Tensor
    index_q: Tensor
    weight: Tensor
    key: Tensor
    index_k: Tensor

    @staticmethod
    def of(shape: Shape, position: int, device: torch.device) -> Block:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        width = shape.latent + shape.rope

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(1, *sizes, device=device, dtype=dtype, requires_grad=True)

        count = shape.queries
        return Block(
            drawn(count, shape.heads, width),
            drawn(count, shape.index_heads, shape.index_size),
            drawn(count, shape.index_heads),
            drawn(position, width),
            drawn(position, shape.index_size),
        )

    @property
    def queries(self) -> list[Tensor]:
        return [self.query, self.index_q, self.weight]

    @property
    def keys(self) -> list[Tensor]:
        return [self.key, self.index_k]


def measure(shape: Shape, position: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Microseconds a query, by column."""
    block = Block.of(shape, position, device)
    first = position - shape.queries
    size = min(
        shape.queries,
        chunk_size(block.query, block.index_q, position, shape.top_k),
    )
    scaling = (shape.latent + shape.rope) ** -0.5

    def chunked(dense: bool, chosen: Sequence[Tensor] = (), *, loss: bool = False) -> Tensor:
        chunk = Chunk(scaling, shape.latent, shape.top_k, loss)
        run = chunk.dense if dense else chunk.chosen
        outputs = by_chunks(run, [*block.queries, *chosen], block.keys, size=size, first=first)
        return outputs[0].float().square().mean() + outputs[1].mean()

    def select() -> Tensor:
        return selection(block.index_q, block.weight, block.index_k, shape.top_k, size, first=first)

    def trained(dense: bool) -> None:
        chunked(dense, () if dense else (select(),), loss=not dense).backward()

    def without_graph(run: Callable[[], object]) -> Callable[[], object]:
        return torch.no_grad()(run)

    chosen = select()
    runs: dict[str, Callable[[], object]] = {
        "index": select,
        "sparse": without_graph(lambda: chunked(False, (chosen,))),
        "dense": without_graph(lambda: chunked(True)),
        "sparse, training": lambda: trained(False),
        "dense, training": lambda: trained(True),
    }
    found = {name: seconds(run, device, repeats) for name, run in runs.items()}
    return {name: 1e6 * spent / shape.queries for name, spent in found.items()}


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of `repeats`, after one to warm up."""
    times: list[float] = []
    for _ in range(repeats + 1):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of attention by position")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    shape = SMALL if options.small else LARGE
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, commit {commit()}, chunks within {CHUNK_BYTES[device.type] >> 20} MiB")
    print(f"{shape}\nmicroseconds a query, one layer\n{'position':>10}", end="")
    print("".join(f"{column:>20}" for column in COLUMNS), flush=True)
    rows: dict[int, dict[str, float]] = {}
    for position in shape.positions:
        rows[position] = measure(shape, position, device, options.repeats)
        line = "".join(f"{rows[position][column]:>20.1f}" for column in COLUMNS)
        print(f"{position:>10}{line}", flush=True)
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")
    if options.out:
        what = {"machine": name, "commit": commit(), "shape": asdict(shape), "rows": rows}
        options.out.write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
