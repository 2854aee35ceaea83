"""Unlike nodes: their links by axis, part and pipeline rank; their JSON; what is refused."""

from __future__ import annotations

import json

import pytest

from galvatron_fx.cli.main import main
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.presets import PRESETS
from galvatron_fx.ir.errors import ClusterError

FAST, SLOW = "A100-80GB", "L4-24GB"
UNLIKE = Cluster.from_nodes([(FAST, 4), (FAST, 4), (SLOW, 4)])
PAIRS = Cluster.from_nodes(
    [(FAST, 2), (FAST, 2)],
    latency_s=[[1e-6, 5e-6], [7e-6, 2e-6]],
    bandwidth_bytes_per_s=[[100e9, 10e9], [12e9, 50e9]],
)


def text_of(**changed: object) -> str:
    """A file of two nodes, with other members."""
    document = {"version": 5, "nodes": [{"device": FAST, "count": 2}, {"device": SLOW, "count": 2}], **changed}
    return json.dumps(document)


def test_axes_have_the_slowest_of_their_links_either_way():
    assert PAIRS.shape == (2, 2)
    assert [(axis.latency_s, axis.bandwidth_bytes_per_s) for axis in PAIRS.axes] == [(7e-6, 10e9), (2e-6, 50e9)]


def test_an_order_moves_links_between_axes():
    crossed = PAIRS.ordered([0, 2, 1, 3])
    assert [axis.bandwidth_bytes_per_s for axis in crossed.axes] == [50e9, 10e9]
    assert crossed.rank_order == (0, 2, 1, 3)
    assert PAIRS.rank_order == ()


def test_parts_have_their_own_kind_and_links_and_the_rest_the_weakest():
    assert UNLIKE.shape == (3, 2, 2)
    assert [part.device.name for part in UNLIKE.parts(1)] == [FAST, FAST, SLOW]
    assert [part.axes[1].bandwidth_bytes_per_s for part in UNLIKE.parts(1)] == [240e9, 240e9, 24e9]
    assert [UNLIKE.hop(1, *ranks).bandwidth_bytes_per_s for ranks in ((0, 1), (1, 2), (2, 0))] == [24e9, 1.5e9, 1.5e9]
    assert UNLIKE.device.memory_bytes == 24 * 10**9
    assert UNLIKE.device.flops_rate == PRESETS[SLOW].device.flops_rate


def test_equal_devices_are_one_part_whatever_the_axes():
    cluster = Cluster.preset("16xA100-80GB")
    assert cluster.parts(1) == (cluster, cluster)
    assert cluster.hop(1, 0, 1) == cluster.axes[0]


def test_unlike_devices_in_a_stage_are_refused():
    with pytest.raises(ClusterError, match=r"unlike kinds \(A100-80GB and L4-24GB\) would share pipeline rank 0 of 12"):
        UNLIKE.parts(0)
    with pytest.raises(ClusterError, match="as many stages that each holds one kind"):
        UNLIKE.ordered([0, 1, 2, 8, 4, 5, 6, 7, 3, 9, 10, 11]).parts(1)


def test_outer_axes_part_kinds_where_counts_of_nodes_would_not():
    nodes = [(FAST, 2)] * 3 + [(SLOW, 2)] * 3
    assert Cluster.from_nodes(nodes).shape == (2, 3, 2)


def test_a_slower_device_takes_as_many_times_as_long():
    half = PRESETS[FAST].device.slower(2)
    assert half.flops_per_s("bfloat16") == PRESETS[FAST].device.flops_per_s("bfloat16") / 2
    assert half.launch_overhead_s == 10e-6
    assert half.name == "A100-80GB x2 slower"


@pytest.mark.parametrize("cluster", [UNLIKE, PAIRS, PAIRS.ordered([3, 2, 1, 0])])
def test_json_is_read_as_it_was_written(cluster):
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_json_names_presets_or_devices_of_its_own():
    own = Cluster.from_nodes(
        [(FAST, 2), (PRESETS[FAST].device.slower(2, "half"), 2)],
        latency_s=[[0, 0]] * 2,
        bandwidth_bytes_per_s=[[1, 1]] * 2,
    )
    assert [device["name"] for device in json.loads(own.to_json())["devices"]] == ["half"]
    assert Cluster.from_json(own.to_json()) == own
    assert Cluster.from_json(text_of()).kinds == tuple(PRESETS[name].device for name in (FAST, SLOW))


def test_a_cluster_prints_its_nodes_and_links():
    text = str(UNLIKE.ordered([*range(8, 12), *range(8)]))
    assert "Cluster of 8 A100-80GB and 4 L4-24GB in 3 nodes, mesh of 3×2×2, slowest links first" in text
    assert "2      8-11          4   L4-24GB      24 GB   90.8 Tflop/s" in text
    assert "0      240 GB/s, 3.4 us     24 GB/s, 14 us   1.5 GB/s, 14 us" in text
    assert "rank order  8-11, 0-7" in text
    assert "a0         2     14 us     24 GB/s" in str(Cluster.preset("16xA100-80GB"))


def test_memory_of_all_nodes_can_be_another():
    assert {kind.memory_bytes for kind in UNLIKE.having(memory_bytes="8GB").kinds} == {8 * 10**9}
    with pytest.raises(ClusterError, match="links of nodes are a matrix"):
        UNLIKE.having(between_bytes_per_s=1e9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes": []}, r"bad cluster at \$.nodes"),
        ({"nodes": [{"device": FAST}]}, "'count' is a required property"),
        ({"nodes": [{"device": FAST, "count": 0}]}, "a node has 0 devices"),
        ({"nodes": [{"device": "Z100", "count": 2}]}, "'Z100' is no preset of a device; give a Device, or one of"),
        ({"latency_s": [[1e-6]]}, r"latency_s has 1 rows of \[1\] numbers for 2 nodes; give 2 rows of 2"),
        ({"bandwidth_bytes_per_s": [[1e9, 0], [1e9, 1e9]]}, "bandwidth_bytes_per_s from node 0 to node 1 is 0"),
        ({"order": [0, 1, 2, 2]}, "name each of the 4 devices, 0 to 3, once"),
        ({"order": "0123"}, r"bad cluster at \$.order"),
        ({"speed": 1}, "'speed' was unexpected"),
    ],
)
def test_bad_files_are_refused_with_the_place(changed, message):
    with pytest.raises(ClusterError, match=message):
        Cluster.from_json(text_of(**changed))


def test_bad_nodes_are_refused():
    with pytest.raises(ClusterError, match="give a list of pairs"):
        Cluster.from_nodes(FAST)
    with pytest.raises(ClusterError, match="give a device and a count"):
        Cluster.from_nodes([FAST])
    with pytest.raises(ClusterError, match="links are not known: give latency_s as a matrix"):
        Cluster.from_nodes([(PRESETS[FAST].device.slower(2), 2)])
    with pytest.raises(ClusterError, match=r"describe them with Cluster\.from_nodes"):
        Cluster.preset("2xA100-80GB").ordered([1, 0])
    with pytest.raises(ClusterError, match="above 0"):
        PRESETS[FAST].device.slower(0)


def test_the_command_line_reads_unlike_nodes(tmp_path, capsys):
    path = tmp_path / "cluster.json"
    path.write_text(text_of(order=[0, 1, 2]))
    assert main(["plan", "--model", "llama", "--cluster", str(path)]) == 3
    assert "name each of the 4 devices" in capsys.readouterr().err
