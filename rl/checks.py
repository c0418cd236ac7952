"""Check the arguments of the losses. Errors name the invalid argument and, for an invalid value,
its row. Shapes and dtypes are always checked. Values are checked on the CPU only, because each
check would stall a GPU. During training, `keel.rl.packing.MicroBatch` has already checked the
values on the host."""

import torch
from torch import Tensor


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def require_rows(name: str, value: Tensor, ok: Tensor, rule: str) -> None:
    """Raise `ValueError` naming the first row of `value` where `ok` is False. GPU tensors are not
    checked."""
    if value.is_cpu and not bool(ok.all()):
        row = tuple(int(i) for i in (~ok).nonzero()[0])
        index = ", ".join(map(str, row))
        raise ValueError(f"{name}[{index}] = {value[row].item()}: {rule}")


def require_log_probs(logp: Tensor, **others: Tensor) -> None:
    """Check that all arguments are float32 or float64 vectors of the same length. Half precision is
    too coarse: near 10 nats, adjacent bfloat16 values are 0.06 apart."""
    for name, value in {"logp": logp, **others}.items():
        require(value.ndim == 1, f"{name} has shape {list(value.shape)}: must be 1-D, [R]")
        require(
            value.dtype in (torch.float32, torch.float64),
            f"{name} is {value.dtype}: must be float32 or float64",
        )
        require(len(value) == len(logp), f"{name} has {len(value)} rows for {len(logp)} of logp")


def require_sequences(sequence: Tensor, advantage: Tensor, num_sequences: int) -> None:
    """Check that all indices in `sequence` are in [0, `num_sequences`) and that `advantage` is
    finite."""
    require(num_sequences >= 0, f"num_sequences = {num_sequences}: must not be negative")
    require(sequence.dtype == torch.int64, f"sequence is {sequence.dtype}: must be int64")
    require(
        sequence.shape == advantage.shape,
        f"sequence has shape {list(sequence.shape)} for {len(advantage)} rows of advantage",
    )
    require_rows(
        "sequence",
        sequence,
        (sequence >= 0) & (sequence < num_sequences),
        f"out of range for {num_sequences} sequences",
    )
    require_rows("advantage", advantage, advantage.isfinite(), "must be finite")
