"""Lets vLLM use Triton's interpreter on a CPU, so that GPU kernels can be tested there."""

from types import SimpleNamespace
from typing import Any


def lend_triton() -> None:
    import numpy as np  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.backends import backends  # noqa: PLC0415
    from triton.runtime.interpreter import TensorHandle  # noqa: PLC0415

    none: Any = SimpleNamespace(is_active=lambda: False)
    backends["cpu"] = SimpleNamespace(driver=none, compiler=None)  # type: ignore[assignment]

    import vllm.v1.sample.ops.topk_topp_sampler as truncation  # noqa: PLC0415
    import vllm.v1.worker.cpu.shm  # noqa: F401, PLC0415  (vLLM's stand-ins for CUDA)

    truncation.HAS_TRITON = False  # the interpreter lacks a method it calls

    def sort(x: Any, dim: None = None, descending: bool = False) -> Any:
        """Sort with numpy, because the interpreter takes seconds for a thousand numbers."""
        data = np.sort(x.handle.data)
        data = data[::-1].copy() if descending else data
        return tl.core.tensor(TensorHandle(data, x.handle.dtype), x.type)

    tl.sort = sort  # type: ignore[assignment]
