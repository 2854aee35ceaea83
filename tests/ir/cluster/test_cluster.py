"""Clusters: presets, meshes, JSON there and back, and every refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from galvatron_fx.errors import ClusterError, InputError
from galvatron_fx.ir.cluster.cluster import Axis, Cluster, Device
from galvatron_fx.ir.plan.units import format_bytes, format_seconds, parse_bytes
from galvatron_fx.runtime.binding import _dim_names
from galvatron_fx.search_settings import SearchSettings

NAMES = ["A100-80GB", "A100-40GB", "H100-80GB", "TITAN-RTX-24GB"]
DEVICE: dict[str, Any] = {
    "name": "d",
    "memory_bytes": 10**9,
    "peak_flops": {"float32": 1e12, "bfloat16": 4e12},
    "memory_bandwidth_bytes_per_s": 1e11,
    "matmul_efficiency": 0.5,
    "memory_efficiency": 0.5,
    "launch_overhead_s": 0.0,
}
AXIS: dict[str, Any] = {"name": "a0", "size": 2, "latency_s": 0.0, "bandwidth_bytes_per_s": 1e9}

UNMEASURED: dict[str, Any] = {"curves": [], "calls": {}, "view_s": 0, "sharing": {}}
LINK: dict[str, Any] = {"curves": [], "contention": 1}


@contextmanager
def world(ranks: int) -> Iterator[None]:
    """A process group of ``ranks`` ranks that send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def described(shape: tuple[int, ...], kind: str = "cpu", memory_bytes: str | int | None = None) -> Cluster:
    """The cluster of a mesh of this shape."""
    with world(math.prod(shape)):
        ranks = torch.arange(math.prod(shape)).reshape(shape)
        return Cluster.from_mesh(DeviceMesh(kind, ranks, _init_backend=False), memory_bytes)


@given(st.sampled_from(NAMES), st.one_of(st.integers(1, 8), st.integers(1, 512).map(lambda nodes: 8 * nodes)))
def test_presets_have_the_devices_asked_for_on_prime_axes_slowest_first(name, count) -> None:
    cluster = Cluster.preset(f"{count}x{name}")
    assert cluster.num_devices == math.prod(cluster.shape) == count
    assert count == 1 or all(sympy.isprime(size) for size in cluster.shape)
    assert cluster.axis_names == tuple(f"a{index}" for index in range(len(cluster.axes)))
    speeds = [axis.bandwidth_bytes_per_s for axis in cluster.axes]
    assert speeds == sorted(speeds)
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_a_node_of_eight_is_three_axes_within_the_links_of_the_node() -> None:
    cluster = Cluster.preset("64xA100-80GB")
    assert cluster.shape == (2,) * 6
    assert [axis.bandwidth_bytes_per_s for axis in cluster.axes] == [24e9] * 3 + [240e9] * 3
    assert cluster.axis("a5") == cluster.axes[5]
    assert Cluster.preset("8xTITAN-RTX-24GB").shape == (2, 2, 2)
    assert Cluster.preset("24xH100-80GB").shape == (3, 2, 2, 2)
    assert Cluster.preset("6xH100-80GB").shape == (3, 2)
    assert Cluster.preset("1xH100-80GB").shape == (1,)


@pytest.mark.parametrize("text", ["12xA100-80GB", "9xA100-80GB", "100xH100-80GB"])
def test_a_node_half_empty_is_refused(text) -> None:
    with pytest.raises(
        ClusterError, match="would leave a node half empty; take up to 8 devices, or a multiple such as"
    ):
        Cluster.preset(text)


def test_memory_may_be_left_out_of_a_device_that_has_one_size_of_it() -> None:
    assert Cluster.preset("16xRTX-4090") == Cluster.preset("16xRTX-4090-24GB")
    assert Cluster.from_nodes([("H100", 8)]) == Cluster.from_nodes([("H100-80GB", 8)])


@pytest.mark.parametrize(
    "text",
    ["", "A100-80GB", "8xA100", "8xRTX", "0xA100-80GB", "-8xA100-80GB", "8xV100", "8 x A100-80GB", "٨xA100-80GB"],
)
def test_an_unknown_preset_is_refused(text) -> None:
    with pytest.raises(ClusterError, match="is no preset; write a count, 'x', and one of A100-80GB"):
        Cluster.preset(text)


@pytest.mark.parametrize(
    ("shape", "primes"), [((1,), (1,)), ((8,), (2, 2, 2)), ((6, 1, 4), (3, 2, 2, 2)), ((7,), (7,))]
)
def test_a_mesh_is_split_into_primes_in_order(shape, primes) -> None:
    cluster = described(shape)
    assert cluster.shape == primes
    assert cluster.device.name == "cpu-process"
    assert cluster.to_json() == described(shape).to_json()


def test_a_mesh_keeps_the_names_of_its_dims() -> None:
    with world(24):
        mesh = DeviceMesh("cpu", torch.arange(24).reshape(3, 1, 8), mesh_dim_names=("dp", "cp", "tp"))
        cluster = Cluster.from_mesh(mesh)
        assert cluster.axis_names == ("dp", "tp.0", "tp.1", "tp.2")
        assert Cluster.from_json(cluster.to_json()) == cluster
        merged = [(0, 1), (1, 2, 3), (1, 3), (0, 1, 2, 3)], ["dp_tp.0", "tp", "tp.0_tp.2", "dp_tp"]
        assert _dim_names(mesh, cluster, merged[0]) == merged[1]
        assert _dim_names(mesh, Cluster.preset("24xA100-80GB"), [(0, 1)]) == ["dp_tp.0"]
        assert _dim_names(mesh, described_by_hand := Cluster(cluster.device, cluster.axes[::-1]), [(0,)]) == ["tp.2"]
        assert described_by_hand.shape != cluster.shape


def test_constraints_on_dims_of_one_rank_change_nothing() -> None:
    """A script keeps its constraints where a dim has one rank; other names and roles are still looked at."""
    kept = {"tp": "tensor", "layers.0": ("zero", "tensor"), "dp": "tensr", "pp": "zero"}
    given = {**kept, "cp": "context", "layers.*": {"cp": "context", "tp": "tensor"}, "head": {"cp": "zero"}}
    with world(24):
        mesh = DeviceMesh("cpu", torch.arange(24).reshape(3, 1, 8), mesh_dim_names=("dp", "cp", "tp"))
        settings = SearchSettings(constraints=given).on_mesh(mesh)
        assert settings.constraints == {**kept, "layers.*": {"tp": "tensor"}, "head": {}}
        assert SearchSettings(constraints=given).on_mesh(DeviceMesh("cpu", torch.arange(24))).constraints is given


def test_memory_is_shared_by_ranks_or_as_given() -> None:
    assert described((2,)).device.memory_bytes == pytest.approx(described((4,)).device.memory_bytes * 2, abs=4)
    assert described((2,), memory_bytes="3GiB").device.memory_bytes == 3 * 2**30
    with pytest.raises(InputError, match="is not a size in bytes"):
        described((2,), memory_bytes="plenty")
    with pytest.raises(ClusterError, match=r"memory_bytes of 'cpu-process' is 0; give a finite number above 0"):
        described((2,), memory_bytes=0)


def cuda(monkeypatch: pytest.MonkeyPatch, name: str, total_memory: int) -> None:
    """Pretend that GPU 0 is this one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name=name, total_memory=total_memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


@pytest.mark.parametrize(
    ("name", "total_memory", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 85_095_874_560, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 42_298_834_944, "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", 85_029_158_912, "H100-80GB"),
        ("NVIDIA TITAN RTX", 25_396_838_400, "TITAN-RTX-24GB"),
    ],
)
def test_a_known_gpu_takes_its_preset(monkeypatch, name, total_memory, expected) -> None:
    cuda(monkeypatch, name, total_memory)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("galvatron_fx.ir.cluster.presets._machine_bytes", lambda: 10**12)
    preset = Cluster.preset(f"16x{expected}")
    assert described((4, 4), "cuda") == replace(preset, device=replace(preset.device, host_memory_bytes=10**12))


def test_nodes_are_as_large_as_torchrun_says(monkeypatch) -> None:
    cuda(monkeypatch, "NVIDIA H100 80GB HBM3", 85_029_158_912)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [axis.bandwidth_bytes_per_s for axis in described((8,), "cuda").axes] == [48e9, 48e9, 370.8e9]


def test_other_gpus_are_generic_and_pcie_cards_have_no_nvlink(monkeypatch) -> None:
    cuda(monkeypatch, "NVIDIA Mystery", 10**10)
    device = described((2,), "cuda").device
    assert (device.name, device.memory_bytes) == ("NVIDIA Mystery", 10**10)
    cuda(monkeypatch, "NVIDIA A100 80GB PCIe", 85_095_874_560)
    cluster = described((2,), "cuda")
    assert cluster.device.name == "A100-80GB"
    assert cluster.axes[0].bandwidth_bytes_per_s == 12e9


def test_a_gpu_mesh_without_gpus_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ClusterError, match=r"without a GPU; plan for it with Cluster\.preset"):
        described((2,), "cuda")


def test_other_device_types_are_refused() -> None:
    with pytest.raises(ClusterError, match="no description for 'meta' devices; build a Cluster by hand"):
        described((2,), "meta")


def test_rates_fall_back_to_wider_dtypes() -> None:
    device = Device(**DEVICE)
    assert hash(device) == hash(Device(**DEVICE))
    assert device.peak_flops == (("bfloat16", 4e12), ("float32", 1e12))
    assert device.flops_per_s("torch.bfloat16") == device.flops_per_s("float8_e4m3fn") == 4e12
    assert {device.flops_per_s(dtype) for dtype in ("float16", "float32", "int8", "bool", "complex64")} == {1e12}
    for dtype in ("float64", "int64", "complex128"):
        with pytest.raises(ClusterError, match=rf"'d' lists no rate for {dtype} or wider; add one to peak_flops"):
            device.flops_per_s(dtype)


@pytest.mark.parametrize("size", [0, -2, 4, 6, 2.0, "2", 10**4000])
def test_an_axis_of_no_prime_size_is_refused(size) -> None:
    with pytest.raises(ClusterError, match=r"axis 'a0' has size .*; split it into axes of prime size"):
        Axis(**{**AXIS, "size": size})


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, True, "1", None, 10**400])
@pytest.mark.parametrize(
    ("make", "known", "field"),
    [
        (Axis, AXIS, "latency_s"),
        (Axis, AXIS, "bandwidth_bytes_per_s"),
        (Device, DEVICE, "memory_bandwidth_bytes_per_s"),
        (Device, DEVICE, "matmul_efficiency"),
        (Device, DEVICE, "memory_efficiency"),
        (Device, DEVICE, "launch_overhead_s"),
    ],
)
def test_a_number_that_is_none_is_refused(make, known, field, value) -> None:
    with pytest.raises(ClusterError, match=rf"{field} of '{known['name']}' is .*; give a finite number"):
        make(**{**known, field: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes of 'd' is 0; give a finite number above 0"),
        ({"memory_bytes": 1e9}, "give a whole number of bytes"),
        ({"peak_flops": {}}, "give some of"),
        ({"peak_flops": {"int8": 1e12}}, r"peak_flops of 'd' has keys \['int8'\]"),
        ({"peak_flops": {"float32": 0.0}}, r"peak_flops\['float32'\] of 'd' is 0.0; give a finite number above 0"),
        ({"matmul_efficiency": 1.5}, "an efficiency of 'd' is above 1"),
        ({"view_s": -1.0}, "view_s of 'd' is -1.0; give a finite number of at least 0"),
        ({"calls": {"mm()": 0.0}}, r"calls\['mm\(\)'\] of 'd' is 0.0; give a finite number above 0"),
    ],
)
def test_a_device_that_cannot_be_is_refused(change, message) -> None:
    with pytest.raises(ClusterError, match=message):
        Device(**{**DEVICE, **change})


def test_axes_are_some_and_have_names_of_their_own() -> None:
    for axes in ((), (Axis(**AXIS), Axis(**AXIS))):
        with pytest.raises(ClusterError, match="give it some, each with a name of its own"):
            Cluster(Device(**DEVICE), axes)
    with pytest.raises(ClusterError, match="no axis 'b' in this cluster; use one of a0"):
        Cluster(Device(**DEVICE), (Axis(**AXIS),)).axis("b")


def document(**changes: Any) -> str:
    """The JSON of a small cluster that was not measured, with some members changed; None removes one."""
    members = {
        "version": 5,
        "device": DEVICE | UNMEASURED,
        "axes": [AXIS | LINK],
        "overlap": {"compute": 1.0, "communication": 1.0, "skew": {"late_s": 0.0, "growth": 0.5}},
        **changes,
    }
    return json.dumps({name: value for name, value in members.items() if value is not None} | {"origin": None})


def test_equal_clusters_have_equal_json() -> None:
    first = Cluster.from_json(document())
    second = Cluster.from_json(document(axes=[{**AXIS, **LINK, "latency_s": 0, "bandwidth_bytes_per_s": 10**9}]))
    assert first == second
    assert first.to_json() == second.to_json() == Cluster.from_json(first.to_json()).to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the cluster is not JSON"),
        ("[" * 100_000, "the cluster is not JSON"),
        ("1" * 5000, "the cluster is not JSON"),
        (" " * 20_000_001, "JSON text of at most 20000000 characters"),
        (b"{}", "JSON text of at most"),
        ("[]", r"bad cluster at \$: \[\] is not of type 'object'"),
        ('{"version": 1, "version": 1}', "repeats a key"),
        ('{"version": NaN}', "the cluster holds NaN; give a finite number"),
        (document(version=1), "cluster of version 1; this release reads 5: measure the machine again"),
        (document(device=None), "'device' is a required property"),
        (document(extra=1), "'extra' was unexpected"),
        (
            document(axes=[{**AXIS, **LINK, "size": "2"}]),
            r"bad cluster at \$\.axes\[0\]\.size: '2' is not of type 'integer'",
        ),
        (document(axes=[{**AXIS, **LINK, "size": True}]), "True is not of type 'integer'"),
        (document(axes=[{**AXIS, **LINK, "size": 2.0}]), "size: 2.0 is not of type .integer."),
        (document(axes=[{**AXIS, **LINK, "size": 4}]), "split it into axes of prime size"),
        (document(axes=[{**AXIS, **LINK, "latency_s": 1e308}]).replace("1e+308", "1e999"), "latency_s of 'a0' is inf"),
        (document(axes=[]), "give it some"),
        (document(device={**DEVICE, **UNMEASURED, "peak_flops": {"__import__('os')": 1}}), "give some of"),
    ],
)
def test_text_that_is_no_cluster_is_refused(text, message) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_json(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_whatever_json_comes_in_only_cluster_errors_come_out(value) -> None:
    for text in (json.dumps(value), document(device=value), document(axes=[value])):
        with pytest.raises(ClusterError):
            Cluster.from_json(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * 2**30),
        ("500MB", 500_000_000),
        ("1e9", 10**9),
        (" 1.5 TB ", 1_500_000_000_000),
        ("0.5KiB", 512),
        ("3kB", 3000),
        ("3KB", 3000),
        (7, 7),
        ("0", 0),
    ],
)
def test_sizes_are_read(text, size) -> None:
    assert parse_bytes(text) == size


@given(st.integers(0, 2**63 - 1))
def test_whole_numbers_are_read_exactly(size) -> None:
    assert parse_bytes(size) == parse_bytes(str(size)) == parse_bytes(f"{size} B") == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a size in bytes; write a number and a unit"),
        ("-1GB", "is not a size in bytes"),
        ("nan", "is not a size in bytes"),
        ("12 G B", "is not a size in bytes"),
        ("12Gb", "unknown unit 'Gb'; use one of B, kB, MB"),
        ("12G", "unknown unit 'G'"),
        ("1e99", "more than 2\\*\\*63 - 1 bytes"),
        (2**63, "more than 2\\*\\*63 - 1 bytes"),
        (-1, "cannot be negative"),
        (True, "is an int or text such as '12GiB', not True"),
        (1.5, "is an int or text such as '12GiB', not 1.5"),
        (None, "not None"),
    ],
)
def test_sizes_that_cannot_be_read_are_refused(text, message) -> None:
    with pytest.raises(InputError, match=message):
        parse_bytes(text)


@given(st.integers(1, 10**18))
def test_written_sizes_are_read_back_to_three_digits(size) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=5.1e-3)


def test_sizes_and_times_are_written_as_people_do() -> None:
    assert [format_bytes(x) for x in (0, 999, 12_500_000_000, 999_600_000)] == ["0 B", "999 B", "12.5 GB", "1 GB"]
    assert [format_seconds(x) for x in (0, 1.5, 0.0123, 4.2e-6, 3e-10)] == [
        "0 s",
        "1.5 s",
        "12.3 ms",
        "4.2 us",
        "0.3 ns",
    ]
