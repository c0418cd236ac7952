"""What GPUs can do, by their vendor's data sheets: peaks, of which `step_time.Rates` are shares."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs and their links. Rates in units a second; links in one direction."""

    name: str = "NVIDIA H200"
    flops: float = 989e12
    """bfloat16, dense."""
    memory_bytes: float = 4.8e12
    link_bytes: float = 450e9
    """Between GPUs of a node: NVLink's 900 GB/s is both directions."""
    network_bytes: float = 50e9
    """Of one GPU's network card: 400 Gb/s."""
    host_bytes: float = 44e9
    """Between a GPU and its host's pinned memory, each way: measured on PCIe 5. That of an older
    bus is assumed to be half as fast."""
    node_gpus: int = 8
    flash4: bool = True
    """Of the generations that FlashAttention-4 is for: Hopper and Blackwell."""

    def between(self, gpus: int) -> float:
        """Bytes a second, one way, where so many GPUs exchange: by links or by network cards."""
        return self.link_bytes if gpus <= self.node_gpus else self.network_bytes


FLASH4 = re.compile(r"\bG?[BH]\d(?!0\b)|\b[H]20\b")
"""Names of data-centre GPUs of these generations; Blackwell's for desks have other kernels."""
PCIE4, PCIE5 = 32.0, 64.0
SHEETS: tuple[tuple[str, float, float, float], ...] = (
    ("GB300", 2500, 8.0, 900),
    ("GB200", 2500, 8.0, 900),
    ("B300", 2250, 8.0, 900),
    ("B200", 2250, 8.0, 900),
    ("GH200", 989, 4.0, 450),
    ("H200 NVL", 836, 4.8, 450),
    ("H200", 989, 4.8, 450),
    ("H100 NVL", 836, 3.9, 300),
    ("H100 PCIe", 756, 2.0, PCIE5),
    ("H100", 989, 3.35, 450),
    ("H800", 989, 3.35, 200),
    ("H20", 148, 4.0, 450),
    ("A100 80GB PCIe", 312, 1.94, PCIE4),
    ("A100-PCIE-40GB", 312, 1.56, PCIE4),
    ("A100-SXM4-40GB", 312, 1.56, 300),
    ("A100", 312, 2.04, 300),
    ("A800", 312, 2.04, 200),
    ("L40S", 362, 0.864, PCIE4),
    ("L40", 181, 0.864, PCIE4),
    ("L4", 121, 0.3, PCIE4),
    ("A40", 150, 0.696, PCIE4),
    ("A10G", 70, 0.6, PCIE4),
    ("RTX 6000 Ada", 364, 0.96, PCIE4),
    ("RTX A6000", 155, 0.768, PCIE4),
    ("RTX 5090", 210, 1.79, PCIE5),
    ("RTX 4090", 165, 1.01, PCIE4),
)
"""Part of the name that the driver gives; dense bfloat16, TFLOP/s; memory, TB/s; link to the node's
other GPUs, GB/s in one direction. The first that fits."""


def machine_of(name: str) -> Machine:
    """name: as the driver says it; empty: of nobody's GPU. One that is not in the list gets the
    rates of an H200, and the name says so."""
    if not name:
        return Machine()
    for part, tflops, terabytes, link in SHEETS:
        if re.search(rf"\b{part}\b", name):
            new = bool(FLASH4.search(name))
            pcie5 = new or link == PCIE5
            return Machine(
                name=f"NVIDIA {part}",
                flops=1e12 * tflops,
                memory_bytes=1e12 * terabytes,
                link_bytes=1e9 * link,
                host_bytes=Machine().host_bytes / (1 if pcie5 else 2),
                flash4=new,
            )
    default = Machine()
    whose = f"{default.name} (Keel has no rates of {name})"
    return replace(default, name=whose, flash4=bool(FLASH4.search(name)))
