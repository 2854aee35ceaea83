"""What a plan is made for: one kind of device, and the links between devices as axes of prime size.

Every axis has its own latency and bandwidth, so that "tensor parallel inside a node, data parallel between nodes"
is a choice of axes. Axes go from the outermost (slowest) to the innermost (fastest), and rank = row-major position.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import sympy
import torch
from jsonschema import Draft202012Validator
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.errors import ClusterError
from galvatron_fx.ir.units import parse_bytes

__all__ = ["CLUSTER_VERSION", "Axis", "Cluster", "Device"]

CLUSTER_VERSION = 1
_MAX_TEXT = 1_000_000
_MOST_DEVICES = 10_000_000
_FLOATS = ("float64", "float32", "bfloat16", "float16")


def _check_positive(what: str, value: object, *, zero: bool = False) -> float:
    """Return ``value`` as a float; refuse what is not a finite number above zero (``zero``: of at least zero)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    if not is_number or (value == 0 and not zero):
        raise ClusterError(f"{what} is {value!r:.80}; give a finite number {'of at least' if zero else 'above'} 0")
    return float(value)  # type: ignore[arg-type]


def _make_float(record: Axis | Device, field: str, *, zero: bool = False) -> None:
    """Check a field and keep it as a float, so that equal clusters have equal JSON."""
    value = _check_positive(f"{field} of '{record.name}'", getattr(record, field), zero=zero)
    object.__setattr__(record, field, value)


@dataclass(frozen=True)
class Axis:
    """One mesh axis of ``size`` devices, a prime or 1.

    ``latency_s``: seconds before the first byte arrives at a neighbour on this axis; ``bandwidth_bytes_per_s``: what
    one device can send, in one direction, while every other device sends along this axis too (so a network card
    shared by 8 devices gives each an eighth). Raises ClusterError for a size that is not prime and for bad numbers.
    """

    name: str
    size: int
    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        whole = isinstance(self.size, int) and 1 <= self.size <= _MOST_DEVICES
        if not whole or (self.size != 1 and not sympy.isprime(self.size)):
            raise ClusterError(f"axis '{self.name}' has size {self.size!r:.80}; split it into axes of prime size")
        _make_float(self, "latency_s", zero=True)
        _make_float(self, "bandwidth_bytes_per_s")


@dataclass(frozen=True)
class Device:
    """One kind of device.

    ``peak_flops``: floating-point operations a second for matrix products, by dtype name ("float64", "float32",
    "bfloat16", "float16"); given as a mapping, kept as sorted pairs so that a device can be hashed.
    ``matmul_efficiency`` and ``memory_efficiency``: the fraction, above 0 and up to 1, of the peak rate and of
    ``memory_bandwidth_bytes_per_s`` that large operations reach. ``launch_overhead_s``: what every operation takes
    besides its work. Raises ClusterError for anything else.
    """

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float] | tuple[tuple[str, float], ...]
    memory_bandwidth_bytes_per_s: float
    matmul_efficiency: float
    memory_efficiency: float
    launch_overhead_s: float

    def __post_init__(self) -> None:
        rates = dict(self.peak_flops)
        if not rates or not set(rates) <= set(_FLOATS):
            raise ClusterError(f"peak_flops of '{self.name}' has keys {sorted(rates)}; give some of {_FLOATS}")
        checked = {dtype: _check_positive(f"peak_flops['{dtype}'] of '{self.name}'", rates[dtype]) for dtype in rates}
        object.__setattr__(self, "peak_flops", tuple(sorted(checked.items())))
        if not isinstance(self.memory_bytes, int):
            raise ClusterError(f"memory_bytes of '{self.name}' is {self.memory_bytes!r}; give a whole number of bytes")
        _check_positive(f"memory_bytes of '{self.name}'", self.memory_bytes)
        for field in ("memory_bandwidth_bytes_per_s", "matmul_efficiency", "memory_efficiency"):
            _make_float(self, field)
        _make_float(self, "launch_overhead_s", zero=True)
        if max(self.matmul_efficiency, self.memory_efficiency) > 1:
            raise ClusterError(f"an efficiency of '{self.name}' is above 1; give fractions of the peak rates")

    def flops_per_s(self, dtype: str) -> float:
        """Return the peak rate for ``dtype`` ("bfloat16", "torch.float32", "int64", ...), in operations a second.

        A dtype without a rate of its own takes that of the closest wider one that has it, since that is what it would
        be computed in: 8-bit floats go to bfloat16 or float16, half precision to float32, that to float64. Integers,
        booleans and complex numbers count as floats of their width (of their real part's width); those below 32
        bits count as float32. Raises ClusterError if nothing as wide is listed.
        """
        rates = dict(self.peak_flops)
        name = dtype.removeprefix("torch.")
        for candidate in _fallbacks(name):
            if candidate in rates:
                return rates[candidate]
        raise ClusterError(f"'{self.name}' lists no rate for {name} or wider; add one to peak_flops {sorted(rates)}")


def _fallbacks(dtype: str) -> tuple[str, ...]:
    """The dtypes whose rate may stand for that of ``dtype``, closest first."""
    if dtype in ("float64", "int64", "uint64", "complex128"):
        return ("float64",)
    if dtype in ("float16", "bfloat16"):
        return (dtype, "float32", "float64")
    if dtype.startswith("float8"):
        return ("bfloat16", "float16", "float32", "float64")
    return ("float32", "float64")


@dataclass(frozen=True)
class _Preset:
    """A device, how many make a node, and (latency_s, bandwidth_bytes_per_s) inside and between nodes."""

    device: Device
    inside: tuple[float, float]
    between: tuple[float, float]
    per_node: int = 8


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


def _gpu(name: str, memory_bytes: int, bandwidth: float, peak_flops: Mapping[str, float]) -> Device:
    """A GPU by its datasheet; ``bandwidth`` is that of its memory in bytes a second."""
    return Device(name, memory_bytes, peak_flops, bandwidth, _MATMUL_EFFICIENCY, _MEMORY_EFFICIENCY, _LAUNCH_S)


# Dense rates with tensor cores where a dtype has them without a change of meaning (float32 without TF32). Memory is in
# decimal bytes: an "80 GB" card has 80 GiB, and what lies between is left to the CUDA context and NCCL's buffers.
_A100 = {"float64": 19.5e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12}
_H100 = {"float64": 67e12, "float32": 67e12, "bfloat16": 989e12, "float16": 989e12}
_TITAN = {"float64": 0.51e12, "float32": 16.3e12, "float16": 130.5e12}
_PRESETS = {
    # NVIDIA A100 datasheet (2021), SXM; DGX A100: one 200 Gbit/s HDR InfiniBand port a GPU.
    "A100-80GB": _Preset(
        _gpu("A100-80GB", 80 * 10**9, 2.039e12, _A100), (_NVLINK_S, 12 * 20.0e9), (_NETWORK_S, 2 * _NET_100_GBIT)
    ),
    "A100-40GB": _Preset(
        _gpu("A100-40GB", 40 * 10**9, 1.555e12, _A100), (_NVLINK_S, 12 * 20.0e9), (_NETWORK_S, 2 * _NET_100_GBIT)
    ),
    # NVIDIA H100 datasheet (2023), SXM, without sparsity; DGX H100: one 400 Gbit/s NDR InfiniBand port a GPU.
    "H100-80GB": _Preset(
        _gpu("H100-80GB", 80 * 10**9, 3.35e12, _H100), (_NVLINK_S, 18 * 20.6e9), (_NETWORK_S, 4 * _NET_100_GBIT)
    ),
    # NVIDIA TITAN RTX product page and Turing whitepaper (2018), float64 at 1/32; PCIe 3.0 x16, and one 100 Gbit/s
    # InfiniBand port for the 8 GPUs of a node, as on the 64-GPU cluster of Miao et al. (2022, Galvatron, section 5).
    "TITAN-RTX-24GB": _Preset(
        _gpu("TITAN-RTX-24GB", 24 * 10**9, 6.72e11, _TITAN), (_PCIE_S, 12e9), (_NETWORK_S, _NET_100_GBIT / 8)
    ),
}
# A GPU that no preset names: rates of a small data-centre card, deliberately low; profile it for more.
_GENERIC_GPU = _Preset(
    _gpu("generic-gpu", 16 * 10**9, 3e11, {"float64": 2.5e11, "float32": 8e12, "float16": 6.5e13}),
    (_PCIE_S, 12e9),
    (_NETWORK_S, _NET_100_GBIT / 8),
)
# One process of several on a CPU, talking through gloo over shared memory. Rough by design, measured on one core of an
# AMD EPYC with torch 2.13: matrix products reach 84 (float32), 37 (float64) GFLOP/s, a copy moves 38 GB/s, an add takes
# 2 us. Halved, because the processes share cores and memory; bfloat16 is held to float32, which not every CPU beats.
_CPU_FLOPS = {"float64": 2e10, "float32": 4e10}
_CPU = Device("cpu-process", 10**9, _CPU_FLOPS, 2e10, _MATMUL_EFFICIENCY, _MEMORY_EFFICIENCY, 2e-6)
_CPU_PRESET = _Preset(_CPU, (1e-4, 1e9), (1e-4, 1e9), per_node=2**62)


def _primes(size: int) -> list[int]:
    """The prime factors of ``size``, largest first, so that the innermost axes are the smallest."""
    return sorted(sympy.factorint(size, multiple=True), reverse=True)


def _axes(sized: Iterable[tuple[int, tuple[float, float]]]) -> tuple[Axis, ...]:
    """Name axes a0, a1, ... outermost first; a cluster of one device keeps one axis of size 1."""
    kept = list(sized)
    if not kept:
        return (Axis("a0", 1, *_CPU_PRESET.inside),)
    return tuple(Axis(f"a{index}", size, *link) for index, (size, link) in enumerate(kept))


@dataclass(frozen=True)
class Cluster:
    """Equal devices on a mesh of prime ``axes``, outermost (slowest) first; the ranks are its row-major positions.

    Raises ClusterError without axes and for two axes of one name.
    """

    device: Device
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        if not self.axes or len(set(self.axis_names)) < len(self.axes):
            raise ClusterError(f"a cluster has the axes {self.axis_names}; give it some, each with a name of its own")

    @property
    def num_devices(self) -> int:
        """The product of the axes' sizes."""
        return math.prod(self.shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, outermost first."""
        return tuple(axis.size for axis in self.axes)

    def axis(self, name: str) -> Axis:
        """Return the axis called ``name``; raises ClusterError if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise ClusterError(f"there is no axis '{name}' in this cluster; use one of {', '.join(self.axis_names)}")

    @classmethod
    def preset(cls, text: str) -> Cluster:
        """Return ``"<count>x<device>"``, such as ``"64xA100-80GB"``: nodes of 8, linked as in their usual machines.

        Raises ClusterError for an unknown device, and for a count above 8 that is not a multiple of 8.
        """
        found = re.fullmatch(r"([1-9]\d{0,6})x(.+)", text, re.ASCII)
        if found is None or found[2] not in _PRESETS:
            raise ClusterError(f"'{text[:80]}' is no preset; write a count, 'x', and one of {', '.join(_PRESETS)}")
        count, preset = int(found[1]), _PRESETS[found[2]]
        nodes, rest = divmod(count, preset.per_node)
        if nodes and rest:
            raise ClusterError(
                f"'{text}' would leave a node half empty; take up to {preset.per_node} devices, or a multiple such as "
                f"{nodes * preset.per_node} or {(nodes + 1) * preset.per_node}"
            )
        outer = [(size, preset.between) for size in _primes(max(nodes, 1))]
        inner = [(size, preset.inside) for size in _primes(preset.per_node if nodes else count)]
        return cls(preset.device, _axes(outer + inner))

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, memory_bytes: str | int | None = None) -> Cluster:
        """Describe ``mesh``: its dims split into prime axes in order, so that flattening it gives the same ranks.

        An axis has the links inside a node if no step along it leaves a node: ``LOCAL_WORLD_SIZE`` (torchrun sets it)
        consecutive ranks make a node, else as many as the preset has. A "cuda" mesh takes the preset that fits the name
        and memory of GPU 0, else a generic GPU; a "cpu" mesh takes a rough process whose memory is its share of the
        machine's. ``memory_bytes`` ("12GiB" or an int) overrides the memory of a device.

        Raises:
            ClusterError: for a mesh of another device type; describe its devices by hand instead.
            InputError: for a ``memory_bytes`` that cannot be read.
        """
        if mesh.device_type not in ("cpu", "cuda"):
            raise ClusterError(f"no description for '{mesh.device_type}' devices; build a Cluster by hand or from JSON")
        preset = _cpu_preset(mesh.size()) if mesh.device_type == "cpu" else _cuda_preset()
        device = preset.device
        if memory_bytes is not None:
            device = replace(device, memory_bytes=parse_bytes(memory_bytes))
        sizes = [prime for size in mesh.mesh.shape for prime in _primes(size)]
        crossing = _leaves_node(mesh.mesh.reshape(sizes), _ranks_per_node(preset))
        links = [preset.between if leaves else preset.inside for leaves in crossing]
        return cls(device, _axes(zip(sizes, links, strict=True)))

    def to_json(self) -> str:
        """Return the cluster as JSON, byte-identical from run to run."""
        document = {
            "version": CLUSTER_VERSION,
            "device": {**asdict(self.device), "peak_flops": dict(self.device.peak_flops)},
            "axes": [asdict(axis) for axis in self.axes],
        }
        return json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Return the cluster that :meth:`to_json` wrote; the text is checked and never evaluated.

        Raises ClusterError, which names the place in the text, for everything else.
        """
        document = _parse(text)
        return cls(Device(**document["device"]), tuple(Axis(**axis) for axis in document["axes"]))


def _cpu_preset(ranks: int) -> _Preset:
    """A CPU process, with an equal share of the machine's memory (POSIX sysconf)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return replace(_CPU_PRESET, device=replace(_CPU, memory_bytes=max(1, total // ranks)))


def _cuda_preset() -> _Preset:
    """The preset that fits the name and memory of GPU 0 of this machine, else a generic GPU of that name and memory.

    A preset keeps its own memory size, lest GPUs that differ by some bytes give their ranks different plans.
    """
    if not torch.cuda.is_available():
        raise ClusterError("a 'cuda' mesh on a machine without a GPU; plan for it with Cluster.preset instead")
    properties = torch.cuda.get_device_properties(0)
    words = set(properties.name.replace("-", " ").split())
    for name, preset in _PRESETS.items():
        *model, size = name.split("-")
        nominal_bytes = int(size.removesuffix("GB")) * 10**9
        # An "80GB" card reports 85.0e9 bytes, a "40GB" one 42.4e9: within a tenth of the decimal size.
        if set(model) <= words and abs(properties.total_memory - nominal_bytes) < nominal_bytes / 10:
            has_nvlink = "PCIe" not in words
            return preset if has_nvlink else replace(preset, inside=_GENERIC_GPU.inside, between=_GENERIC_GPU.between)
    device = replace(_GENERIC_GPU.device, name=properties.name, memory_bytes=properties.total_memory)
    return replace(_GENERIC_GPU, device=device)


def _ranks_per_node(preset: _Preset) -> int:
    """Ranks on one node, as torchrun says, else as the preset has."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() and int(given) > 0 else preset.per_node


def _leaves_node(ranks: torch.Tensor, per_node: int) -> list[bool]:
    """Tell of every dim of ``ranks`` (shape: the axes' sizes) whether a step along it goes from one node to another."""
    nodes = ranks.long().div(per_node, rounding_mode="floor")
    return [bool((nodes.amax(dim) != nodes.amin(dim)).any()) for dim in range(ranks.ndim)]


_NUMBER, _TEXT = {"type": "number"}, {"type": "string", "minLength": 1, "maxLength": 200}


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with these members, all of them, and no others."""
    return {"type": "object", "additionalProperties": False, "required": sorted(properties), "properties": properties}


_AXIS_SCHEMA = _closed(
    {"name": _TEXT, "size": {"type": "integer"}, "latency_s": _NUMBER, "bandwidth_bytes_per_s": _NUMBER}
)
_DEVICE_SCHEMA = _closed(
    {
        "name": _TEXT,
        "memory_bytes": {"type": "integer"},
        "peak_flops": {"type": "object", "additionalProperties": _NUMBER},
        "memory_bandwidth_bytes_per_s": _NUMBER,
        "matmul_efficiency": _NUMBER,
        "memory_efficiency": _NUMBER,
        "launch_overhead_s": _NUMBER,
    }
)
_SCHEMA = _closed(
    {"version": {"const": CLUSTER_VERSION}, "device": _DEVICE_SCHEMA, "axes": {"type": "array", "items": _AXIS_SCHEMA}}
)


def _parse(text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``, checked against the schema."""
    if not isinstance(text, str) or len(text) > _MAX_TEXT:
        raise ClusterError(f"a cluster is JSON text of at most {_MAX_TEXT} characters; write it again with to_json")
    try:
        document = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except ClusterError:
        raise
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"the cluster is not JSON: {str(error)[:200]}; write it again with to_json") from None
    if isinstance(document, dict) and document.get("version") != CLUSTER_VERSION:
        raise ClusterError(f"cluster of version {document.get('version')!r:.80}; this release reads {CLUSTER_VERSION}")
    for flaw in Draft202012Validator(_SCHEMA).iter_errors(document):
        raise ClusterError(f"bad cluster at {flaw.json_path}: {flaw.message[:200]}; write it again with to_json")
    assert isinstance(document, dict)
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ClusterError(f"the cluster holds {name}; give a finite number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, refusing a repeated key, of which JSON would keep the last in silence."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ClusterError(f"the cluster repeats a key among {sorted(key for key, _ in pairs)}; keep each once")
    return members
