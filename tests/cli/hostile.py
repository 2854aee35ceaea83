"""Files that mean harm, or were damaged: plans, clusters and configurations changed by hypothesis, and by hand."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from galvatron_fx import Cluster, Pipelining, Plan, Strategy
from galvatron_fx.cli.constraints import constraints_of
from galvatron_fx.cli.files import read_cluster, read_plan
from galvatron_fx.cli.model_config import config_from_file
from galvatron_fx.errors import GalvatronError
from galvatron_fx.ir.cluster.cluster import Axis, Overlap
from galvatron_fx.ir.cluster.curves import COLLECTIVE_KINDS, CollectiveCurve, OperatorCurve
from galvatron_fx.ir.cluster.device import UPDATE
from galvatron_fx.ir.cluster.provenance import Origin
from galvatron_fx.ir.plan.schedule import make_schedule
from tests.cli.oracle import ORACLES

LIMIT_S = 10.0
MOST_MESSAGE = 5000  # characters

READERS: dict[str, Callable[[Path], object]] = {
    "plan": read_plan,
    "cluster": read_cluster,
    "constraints": lambda path: constraints_of(str(path), ()),
    "config": config_from_file,
}


def _plans() -> list[str]:
    table = Pipelining.by_hand(make_schedule("1f1b", 2, 2, 4))
    return [
        Plan.uniform((8,), ["zero"], recompute=True).to_json(),
        Plan.from_roles(
            (2, 3), [Strategy(("data", "tensor")), Strategy(("zero", "sequence"), keep_gathered=True)]
        ).to_json(),
        Plan.uniform((2, 2), ["pipeline", "zero"], pipelining=Pipelining(4, 8, "zbv")).to_json(),
        Plan.uniform((2, 2), ["pipeline", "data"], num_blocks=6, pipelining=table).to_json(),
    ]


def _profile() -> str:
    """A measured cluster, with a value for everything that a profile may hold."""
    ramp = ((1e3, 1e-5), (1e6, 2e-4), (1e9, 0.1))
    curves = tuple(OperatorCurve(kind, "float32", 1e-11, 1e-10, ramp, 0.05) for kind in ("matmul", "pointwise", UPDATE))
    device = replace(
        Cluster.preset("4xA100-80GB").device,
        curves=curves,
        calls={"aten.mm.default|float32[8,8],float32[8,8]": 3e-6, "aten.exp.default|float64[4]": 1e-6},
        view_s=1e-7,
        sharing={1: 0.5, 2: 0.8, 4: 1.0},
    )
    inner = [CollectiveCurve(kind, ("a1",), ramp, 1e-5, 1e9, 0.1) for kind in COLLECTIVE_KINDS]
    both = CollectiveCurve("all_reduce", ("a0", "a1"), ramp, 2e-5, 5e8, 0.2)
    axes = Axis("a0", 2, 2e-5, 5e8, (both,), 1.5), Axis("a1", 2, 1e-5, 1e9, tuple(inner))
    origin = Origin("2026-11-21", "a processor", "cpu", "2.13.0", 1, 4)
    return Cluster(device, axes, Overlap(1.2, 1.1), origin).to_json()


def _configs() -> list[str]:
    llama = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "torch_dtype": "bfloat16",
    }
    vision = {"model_type": "vit", "image_size": 32, "patch_size": 8, "num_labels": 2, "id2label": {"0": "a", "1": "b"}}
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "dtype": "float32"}
    seq2seq = {"model_type": "t5", "d_model": 32, "num_layers": 2, "num_decoder_layers": 2, "is_encoder_decoder": True}
    tower = {"hidden_size": 32, "num_attention_heads": 4}
    nested = {"model_type": "clip", "text_config": tower, "vision_config": tower}
    return [json.dumps(config) for config in (llama, vision, experts, seq2seq, nested)]


VALID: dict[str, list[str]] = {
    "plan": _plans(),
    "cluster": [
        *(Cluster.preset(text).to_json() for text in ("64xA100-80GB", "6xTITAN-RTX-24GB", "1xH100-80GB")),
        *[_profile()] * 3,  # drawn as often as the presets
    ],
    "constraints": [
        '{"model.layers.0": ["tensor", "data"], "lm_head": {"roles": ["zero", "zero"], "recompute": true}}',
        "{}",
    ],
    "config": _configs(),
}

_DEEP = 100_000
BY_HAND: dict[str, bytes] = {
    "empty": b"",
    "a zero byte": b"\0",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "utf-16": '{"version": 2}'.encode("utf-16"),
    "half a character": b'{"model_type": "\xc3',
    "a pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "deep lists": b"[" * _DEEP,
    "deep lists, closed": b"[" * _DEEP + b"]" * _DEEP,
    "deep objects": b'{"a":' * _DEEP + b"1" + b"}" * _DEEP,
    "deep inside": b'{"model_type": "llama", "x": ' + b"[" * 900 + b"]" * 900 + b"}",
    "many digits": b'{"version": ' + b"9" * 100_000 + b"}",
    "an infinite float": b'{"version": 1e999999}',
    "not a number": b'{"version": NaN}',
    "a key twice": b'{"version": 2, "version": 2}',
    "many keys": b"{" + b",".join(b'"%d": 0' % i for i in range(200_000)) + b', "0": 1}',
    "a long string": b'{"model_type": "' + b"a" * 3_000_000 + b'"}',
    "a long list": b'{"model_type": "llama", "layer_types": [' + b"0," * 1_000_000 + b"0]}",
    "code": b'__import__("os").system("true")',
    "code in a name": b"{\"model_type\": \"__import__('os').system('true')\"}",
    "a path": b'{"model_type": "../../../../etc/passwd"}',
    "a class": b'{"model_type": "llama", "__class__": "os.system", "__reduce__": ["os.system", "true"]}',
    "remote code": b'{"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "evil/repo--modeling.Evil"}}',
    "unknown remote code": b'{"model_type": "evil", "auto_map": {"AutoConfig": "configuration.Evil"}}',
    "a hub kernel": b'{"model_type": "llama", "attn_implementation": "evil/kernel", "_attn_implementation": "e/k"}',
    "a dtype that is a function": b'{"model_type": "llama", "dtype": "load", "torch_dtype": "hub.load"}',
    "a method": b'{"model_type": "llama", "to_dict": 1, "from_dict": 2, "push_to_hub": "x"}',
    "layers without end": b'{"model_type": "qwen3", "num_hidden_layers": 1000000000000}',
    "labels without end": b'{"model_type": "bert", "num_labels": 100000000000}',
    "layers without end, nested": b'{"model_type": "gemma3", "text_config": {"num_hidden_layers": 4000000000}}',
    "a list of layers without end": b'{"model_type": "swin", "depths": [2, 2000000000000]}',
    "fewer than no layers": b'{"model_type": "llama", "num_hidden_layers": -5}',
    "lone surrogates": b'{"model_type": "\\ud800", "version": "\\udfff"}',
    "escape codes": b'{"model_type": "\\u001b[2J\\u001b]0;evil\\u0007"}',
    "a number for all": b"7",
    "null": b"null",
}

_NASTY = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308, -0.0, "", "a", "\x00", "\ud800",
    "../../etc/passwd", "/dev/zero", "__class__", "os.system('true')", "{0.__class__}", "%s%n", "${HOME}", "\x1b[2J",
    "x" * 10_000, [], {}, [[]], [None], {"__class__": "x"}, [0] * 1000, {"": {}}, "nan", "1e999", "llama", "pipeline",
)  # fmt: skip

_JSON = st.recursive(
    st.sampled_from(_NASTY) | st.integers() | st.floats() | st.text(max_size=20),
    lambda inside: st.lists(inside, max_size=5) | st.dictionaries(st.text(max_size=10), inside, max_size=5),
    max_leaves=10,
)


@st.composite
def damaged(draw: st.DrawFn, kind: str) -> bytes:
    """A file of ``kind`` with a few changes of structure or of bytes, or JSON that never was one."""
    how = draw(st.integers(0, 9))
    if how == 0:
        return _encoded(draw(_JSON))
    text = draw(st.sampled_from(VALID[kind]))
    if how <= 6:
        document = json.loads(text)
        for _ in range(draw(st.integers(1, 3))):
            _change(draw, document)
        return _encoded(document)
    return _scrambled(draw, text.encode())


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def _change(draw: st.DrawFn, document: Any) -> None:
    """Replace, drop, add or rename one value, somewhere inside."""
    holder = draw(st.sampled_from(_holders(document)))
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    what = draw(st.sampled_from(("replace", "drop", "add", "rename", "wrap")))
    value = deepcopy(draw(st.sampled_from(_NASTY) | _JSON))  # a later change may be inside it
    if what == "add" or not keys:
        if isinstance(holder, dict):
            holder[
                draw(st.sampled_from(("__class__", "version", "auto_map", "", "num_layers")) | st.text(max_size=10))
            ] = value
        else:
            holder.append(value)
        return
    key = draw(st.sampled_from(keys))
    if what == "replace":
        holder[key] = value
    elif what == "wrap":
        holder[key] = draw(st.sampled_from(([holder[key]], {"value": holder[key]}, str(holder[key]))))
    else:
        old = holder.pop(key)
        if what == "rename" and isinstance(holder, dict):
            holder[draw(st.text(max_size=10))] = old


def _holders(value: Any) -> list[Any]:
    """All objects and lists in a document, itself first."""
    if not isinstance(value, (dict, list)):
        return []
    inside = value.values() if isinstance(value, dict) else value
    return [value, *(holder for item in inside for holder in _holders(item))]


def _scrambled(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes flipped, cut out, doubled or added."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(1, 40))
        how = draw(st.integers(0, 4))
        if how == 0:
            del data[at : at + length]
        elif how == 1:
            data[at:at] = draw(st.binary(max_size=8))
        elif how == 2:
            data[at:at] = data[at : at + length]
        elif how == 3:
            del data[at:]
        elif at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


_ACTS = (
    "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "subprocess", "socket", "pickle", "os.remove",
    "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "os.chmod", "os.chown", "os.utime",
    "os.setxattr", "os.removexattr", "os.chdir", "os.kill", "shutil", "tempfile",
)  # fmt: skip


def _opens_to_write(event: str, arguments: Sequence[Any]) -> bool:
    if event != "open":
        return False
    _, mode, flags = arguments
    by_flags = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
    return bool(set(mode) & set("wax+")) if isinstance(mode, str) else by_flags


@dataclass
class Watch:
    """Notes what a process does that reading a file never should: run programs, connect, unpickle, write, evaluate."""

    seen: list[str]
    active: bool = False

    def install(self) -> None:
        """Begin to listen; Python has no way to stop, so a process does it once.

        Imports write no compiled files from then on.
        """
        sys.dont_write_bytecode = True
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: Sequence[Any]) -> None:
        if not self.active:
            return
        if _opens_to_write(event, arguments) or event.startswith(_ACTS):
            self.seen.append(f"{event}{arguments!r:.200}")


def outcome(kind: str, path: Path, content: bytes, watch: Watch) -> str:
    """Read ``content`` as a file: "read", or the name of the error that refused it.

    Raises AssertionError for any other error, more than LIMIT_S seconds, an unclear message, acts that reading does not
    need, a file that is not as it was, and for what was read where the oracle says that the file means something else.
    """
    path.write_bytes(content)
    before, value = _file_state(path), None
    watch.active, start = True, time.perf_counter()
    try:
        value = READERS[kind](path)
        result = "read"
    except GalvatronError as error:
        result = type(error).__name__
        assert str(path) in str(error), f"the message does not name the file: {error}"
        assert len(str(error)) < MOST_MESSAGE, f"a message of {len(str(error))} characters"
    finally:
        watch.active = False
    took_s = time.perf_counter() - start
    assert took_s < LIMIT_S, f"{took_s:.1f} s to read {content[:200]!r}"
    assert not watch.seen, f"reading {content[:200]!r} did {watch.seen}"
    assert path.exists() and _file_state(path) == before, f"reading {content[:200]!r} changed the file"
    assert [inside.name for inside in path.parent.iterdir()] == [path.name], "reading left something beside the file"
    if result == "read":
        ORACLES[kind](value, content)
    return result


def _file_state(path: Path) -> tuple[Any, ...]:
    """All that reading leaves as it is: contents, identity, rights and times."""
    state = path.stat()
    return path.read_bytes(), state.st_ino, state.st_mode, state.st_mtime_ns, state.st_nlink
