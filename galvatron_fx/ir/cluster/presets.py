"""What devices and links reach by datasheet or by a rough measurement: where no profile says better."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.cluster.overlap import Overlap, Skew
from galvatron_fx.ir.errors import ClusterError

__all__ = ["CPU_PRESET", "PRESETS", "Preset", "cpu_preset", "cuda_preset", "preset_called"]


# Kernels and NCCL share a GPU's multiprocessors and memory: both take about 1.3 times as long (Miao et al. 2022,
# Galvatron, section 3.4).
_GPU_OVERLAP = Overlap(1.3, 1.3, chunks=True)
# Processes whose collectives run on the cores that they compute on: nothing is gained by doing both at once.
_CPU_OVERLAP = Overlap(2.0, 2.0)


@dataclass(frozen=True)
class Preset:
    """A device, how many make a node, (latency_s, bandwidth_bytes_per_s) inside and between nodes, and the slowdown of
    computing and communicating at once.
    """

    device: Device
    inside: tuple[float, float]
    between: tuple[float, float]
    per_node: int = 8
    overlap: Overlap = _GPU_OVERLAP


# Fractions of the datasheet peaks that large kernels reach. 0.75 of the peak rate is what torch itself assumes
# (torch/utils/_runtime_estimation.py); 0.8 of the memory bandwidth is within what Deakin, Price, Martineau and
# McIntosh-Smith (2018, BabelStream) measured over GPUs. 5 us is the usual cost of launching one CUDA kernel from
# PyTorch. All three are starting points, which `galvatron-fx profile` replaces by measurements.
_MATMUL_EFFICIENCY, _MEMORY_EFFICIENCY, _LAUNCH_S = 0.75, 0.8, 5e-6

# Latencies of a hop: NCCL src/graph/tuning.cc, hardware latencies of a ring, protocol Simple: NVLink 3.4, PCI 5.7,
# network 14 us.
# Bandwidths: NCCL src/graph/topo.h, which holds what a link achieves: NVLink 20.0 GB/s a link on sm80 (12 links on an
# A100), 20.6 on sm90 (18 links on an H100), PCIe 3.0 x16 12 GB/s, 100 Gbit/s of network 12 GB/s.
_NVLINK_S, _PCIE_S, _NETWORK_S = 3.4e-6, 5.7e-6, 14e-6
_NET_100_GBIT = 12e9
# PCIe 4.0 x16 moves twice as much as 3.0, and 5.0 twice as much as that. To the host's memory each GPU has x16 lanes.
_GEN_3, _GEN_4, _GEN_5 = 12e9, 24e9, 48e9
_PCIE_4 = (_PCIE_S, _GEN_4)
_GIB = 2**30


def _gpu(
    name: str, memory_bytes: int, bandwidth: float, peak_flops: Mapping[str, float], host: float, host_gib: int = 0
) -> Device:
    """A GPU by its datasheet; ``bandwidth`` is that of its memory in bytes a second, ``host`` that of its link to the
    host, of whose memory ``host_gib`` are its share (0: hosts differ).
    """
    return Device(
        name,
        memory_bytes,
        peak_flops,
        bandwidth,
        _MATMUL_EFFICIENCY,
        _MEMORY_EFFICIENCY,
        _LAUNCH_S,
        host_bandwidth_bytes_per_s=host,
        host_memory_bytes=host_gib * _GIB,
    )


# Rates were compared in November 2026 with vendors' sheets as resellers and wikis quote them. Sheets give rates with
# sparsity, twice these: H200 1,979 TFLOPS of bfloat16, B200 4,500, L40S 733, L4 242, MI300X 2,615.
# Dense rates with tensor cores where a dtype has them without a change of meaning (float32 without TF32). Memory is in
# decimal bytes: an "80 GB" card has 80 GiB, and what lies between is left to the CUDA context and NCCL's buffers.
_A100 = {"float64": 19.5e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12}
_H100 = {"float64": 67e12, "float32": 67e12, "bfloat16": 989e12, "float16": 989e12}
_B200 = {"float64": 37e12, "float32": 75e12, "bfloat16": 2.25e15, "float16": 2.25e15}
# Ada and Ampere cards compute float64 at 1/64 of float32.
_L40S = {"float64": 1.43e12, "float32": 91.6e12, "bfloat16": 362e12, "float16": 362e12}
_A10G = {"float64": 0.55e12, "float32": 35e12, "bfloat16": 70e12, "float16": 70e12}
_L4 = {"float64": 0.47e12, "float32": 30.3e12, "bfloat16": 121e12, "float16": 121e12}
_RTX_4090 = {"float64": 1.29e12, "float32": 82.6e12, "bfloat16": 165.2e12, "float16": 165.2e12}
_MI300X = {"float64": 163.4e12, "float32": 163.4e12, "bfloat16": 1307.4e12, "float16": 1307.4e12}
_TITAN = {"float64": 0.51e12, "float32": 16.3e12, "float16": 130.5e12}
# Shares of the host's memory: an eighth of a DGX A100 (1 TB with 40 GB cards, 2 TB with 80 GB; datasheets of 2020-21),
# of a DGX H100, H200 or B200 (2 TB; datasheets of 2022-24), and of AWS g6e, g5 and g6.48xlarge (1536, 768, 768 GiB).
PRESETS = {
    # NVIDIA A100 datasheet (2021), SXM; DGX A100: one 200 Gbit/s HDR InfiniBand port a GPU.
    "A100-80GB": Preset(
        _gpu("A100-80GB", 80 * 10**9, 2.039e12, _A100, _GEN_4, 256),
        (_NVLINK_S, 12 * 20.0e9),
        (_NETWORK_S, 2 * _NET_100_GBIT),
    ),
    "A100-40GB": Preset(
        _gpu("A100-40GB", 40 * 10**9, 1.555e12, _A100, _GEN_4, 128),
        (_NVLINK_S, 12 * 20.0e9),
        (_NETWORK_S, 2 * _NET_100_GBIT),
    ),
    # NVIDIA H100 datasheet (2023), SXM, without sparsity; DGX H100: one 400 Gbit/s NDR InfiniBand port a GPU.
    "H100-80GB": Preset(
        _gpu("H100-80GB", 80 * 10**9, 3.35e12, _H100, _GEN_5, 256),
        (_NVLINK_S, 18 * 20.6e9),
        (_NETWORK_S, 4 * _NET_100_GBIT),
    ),
    # NVIDIA TITAN RTX product page and Turing whitepaper (2018), float64 at 1/32; PCIe 3.0 x16, and one 100 Gbit/s
    # InfiniBand port for the 8 GPUs of a node, as on the 64-GPU cluster of Miao et al. (2022, Galvatron, section 5).
    "TITAN-RTX-24GB": Preset(
        _gpu("TITAN-RTX-24GB", 24 * 10**9, 6.72e11, _TITAN, _GEN_3), (_PCIE_S, 12e9), (_NETWORK_S, _NET_100_GBIT / 8)
    ),
    # NVIDIA H200 datasheet (2024), SXM, without sparsity; HGX H200: one 400 Gbit/s port a GPU.
    "H200-141GB": Preset(
        _gpu("H200-141GB", 141 * 10**9, 4.8e12, _H100, _GEN_5, 256),
        (_NVLINK_S, 18 * 20.6e9),
        (_NETWORK_S, 4 * _NET_100_GBIT),
    ),
    # NVIDIA DGX B200 and HGX B200 datasheets (2024-25): an eighth of a machine, half of the rates with sparsity;
    # NCCL: 40.1 GB/s a link on sm100, 18 links; one 400 Gbit/s port a GPU.
    "B200-180GB": Preset(
        _gpu("B200-180GB", 180 * 10**9, 8e12, _B200, _GEN_5, 256),
        (_NVLINK_S, 18 * 40.1e9),
        (_NETWORK_S, 4 * _NET_100_GBIT),
    ),
    # NVIDIA L40S datasheet (2023), without sparsity; 400 Gbit/s for 8 GPUs, as on AWS g6e.48xlarge.
    "L40S-48GB": Preset(
        _gpu("L40S-48GB", 48 * 10**9, 8.64e11, _L40S, _GEN_4, 192), _PCIE_4, (_NETWORK_S, 4 * _NET_100_GBIT / 8)
    ),
    # NVIDIA GA102 whitepaper (2021): 512 flops of 16 bits, summed in float32, a clock and multiprocessor, of which an
    # A10G has 80 at 1.71 GHz; 69.5e12 were measured on one (torch-performance-test-data, issue 126, 2026). The A10's
    # 125e12 are not its (Baseten, "NVIDIA A10 vs A10G for ML model inference", 2023). 100 Gbit/s for 8, as on AWS
    # g5.48xlarge.
    "A10G-24GB": Preset(
        _gpu("A10G-24GB", 24 * 10**9, 6e11, _A10G, _GEN_4, 96), _PCIE_4, (_NETWORK_S, _NET_100_GBIT / 8)
    ),
    # NVIDIA L4 datasheet (2023), without sparsity; 100 Gbit/s for 8 GPUs, as on AWS g6.48xlarge.
    "L4-24GB": Preset(_gpu("L4-24GB", 24 * 10**9, 3e11, _L4, _GEN_4, 96), _PCIE_4, (_NETWORK_S, _NET_100_GBIT / 8)),
    # NVIDIA Ada GPU architecture whitepaper (2022), appendix A: half precision that is summed in float32. These GPUs
    # cannot reach each other: all is copied through the host, at half of what the link moves. 100 Gbit/s for 8.
    "RTX-4090-24GB": Preset(
        _gpu("RTX-4090-24GB", 24 * 10**9, 1.008e12, _RTX_4090, _GEN_4), (_PCIE_S, 12e9), (_NETWORK_S, _NET_100_GBIT / 8)
    ),
    # AMD Instinct MI300X datasheet (2023), without sparsity. RCCL src/graph/topo.h: 48 GB/s for each of the seven links
    # to the others of a node. Groups of fewer than eight use fewer links, which axes cannot say: profile the machine
    # where these matter. One 400 Gbit/s port a GPU, as in the MI300X platform's reference design.
    "MI300X-192GB": Preset(
        _gpu("MI300X-192GB", 192 * 10**9, 5.3e12, _MI300X, _GEN_5),
        (_NVLINK_S, 7 * 48e9),
        (_NETWORK_S, 4 * _NET_100_GBIT),
    ),
}
# A GPU that no preset names: rates of a small data-centre card, deliberately low; profile it for more.
GENERIC_GPU = Preset(
    _gpu("generic-gpu", 16 * 10**9, 3e11, {"float64": 2.5e11, "float32": 8e12, "float16": 6.5e13}, _GEN_3),
    (_PCIE_S, 12e9),
    (_NETWORK_S, _NET_100_GBIT / 8),
)
# One process of several on a CPU, talking through gloo over shared memory. Rough by design, measured on one core of an
# AMD EPYC with torch 2.13: matrix products reach 240 (float32, by oneDNN), 37 (float64) GFLOP/s, a copy moves 38 GB/s,
# an add takes 2 us. Halved, because the processes share cores and memory; bfloat16 is held to float32, which not every
# CPU beats.
_CPU_FLOPS = {"float64": 2e10, "float32": 1.2e11}
_CPU = Device(
    "cpu-process",
    10**9,
    _CPU_FLOPS,
    2e10,
    _MATMUL_EFFICIENCY,
    _MEMORY_EFFICIENCY,
    2e-6,
    host_bandwidth_bytes_per_s=8e9,  # a copy to another tensor: half of what its memory moves, as it reads and writes
)
# What gloo takes to start between processes of two cores, as those of a step find it, is 1 ms (an all-gather of a few
# bytes among two) and more.
_GLOO = (1e-3, 1e9)
CPU_PRESET = Preset(_CPU, _GLOO, _GLOO, per_node=2**62, overlap=_CPU_OVERLAP)
# Measured with four processes on two cores of the same machine.
_SHARED_CORES = Skew(late_s=17e-3, growth=0.45)


def _machine_bytes() -> int:
    """The memory of this machine (POSIX sysconf)."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_preset(ranks: int) -> Preset:
    """A CPU process with an equal share of the machine's memory, and of its cores if it has fewer."""
    skew = _SHARED_CORES if ranks > (os.cpu_count() or 1) else Skew()
    device = replace(_CPU, memory_bytes=max(1, _machine_bytes() // ranks))
    return replace(CPU_PRESET, device=device, overlap=replace(_CPU_OVERLAP, skew=skew))


def preset_called(name: str) -> Preset | None:
    """The preset of that name, or of that device where it has one size of memory ("H100"); None where there is none."""
    alike = [preset for known, preset in PRESETS.items() if name in (known, known.rpartition("-")[0])]
    return alike[0] if len(alike) == 1 else None


def cuda_preset() -> Preset:
    """The preset that fits the name and memory of GPU 0 of this machine, else a generic GPU of that name and memory.

    A preset keeps its own memory size, lest GPUs that differ by some bytes give their ranks different plans. The host's
    memory is this machine's, shared by its GPUs.
    """
    if not torch.cuda.is_available():
        raise ClusterError("a 'cuda' mesh on a machine without a GPU; plan for it with Cluster.preset instead")
    preset, ranks = _preset_of_gpu(), max(1, torch.cuda.device_count())
    return replace(preset, device=replace(preset.device, host_memory_bytes=_machine_bytes() // ranks))


def _preset_of_gpu() -> Preset:
    properties = torch.cuda.get_device_properties(0)
    words = set(properties.name.replace("-", " ").split())
    for name, preset in PRESETS.items():
        *model, size = name.split("-")
        nominal_bytes = int(size.removesuffix("GB")) * 10**9
        # An "80GB" card reports 85.0e9 bytes, a "40GB" one 42.4e9: within a tenth of the decimal size.
        if set(model) <= words and abs(properties.total_memory - nominal_bytes) < nominal_bytes / 10:
            has_nvlink = "PCIe" not in words
            return preset if has_nvlink else replace(preset, inside=GENERIC_GPU.inside, between=GENERIC_GPU.between)
    device = replace(GENERIC_GPU.device, name=properties.name, memory_bytes=properties.total_memory)
    return replace(GENERIC_GPU, device=device)
