"""What a compiled model tells of the original: attributes, methods, containers, and what of it is refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import galvatron_fx
from galvatron_fx import DistributedGraphModule, Plan
from galvatron_fx.errors import InputError


@dataclass
class Settings:
    """What forward reads."""

    scale: float = 2.0
    names: list[str] = field(default_factory=lambda: ["a"])


class Stack(nn.Module):
    """Layers in a list, as people write them, with helpers."""

    kind = "stack"

    def __init__(self) -> None:
        super().__init__()
        self.config = Settings()
        self.depth, self.made = 2, iter(())
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.by_name = nn.ModuleDict({"out": nn.Linear(4, 2, bias=False)})
        self.by_name["again"] = self.by_name["out"]
        self.register_buffer("steps", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x).tanh()
        return self.by_name["out"](x).square().mean() * self.config.scale

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters."""
        return next(self.parameters()).dtype

    def decayed(self) -> list[str]:
        """Names of what an optimizer decays."""
        return [name for name, parameter in self.named_parameters() if parameter.ndim > 1]

    def loss_of(self, x: Tensor) -> Tensor:
        """Call the model."""
        return 2 * self(x)

    def first(self, x: Tensor) -> Tensor:
        """Call a module inside."""
        return self.layers[0](x)

    def freeze(self) -> None:
        """Set an attribute."""
        self._frozen_layers = 1

    _frozen_layers = 0

    def generate(self) -> Tensor:
        """Read whole weights."""
        return self.layers[0].weight


class Tangled(Stack):
    """A helper that reads an attribute of a name that the compiled model has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = 3

    def rows(self) -> int:
        """Of the original."""
        return self._rows


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def compiled_of(mesh: DeviceMesh, plain: nn.Module) -> Any:
    return galvatron_fx.compile(copy.deepcopy(plain), mesh, (X,), plan=Plan.uniform((1,), ("zero",)))


@pytest.fixture(scope="module")
def plain() -> Stack:
    torch.manual_seed(0)
    stack = Stack()
    del stack.made
    return stack


def test_attributes_methods_and_class_are_the_originals(mesh: DeviceMesh, plain: Stack) -> None:
    model = compiled_of(mesh, plain)
    assert isinstance(model, Stack) and isinstance(model, DistributedGraphModule)
    assert type(model) is DistributedGraphModule and repr(model).startswith("DistributedGraphModule(")
    assert (model.depth, model.kind, model.config.names, model.dtype) == (2, "stack", ["a"], torch.float32)
    assert model.decayed() == plain.decayed()
    torch.testing.assert_close(model.loss_of(X), plain.loss_of(X))
    with pytest.raises(AttributeError, match="has no attribute 'layer', as the original has none"):
        _ = model.layer
    assert not hasattr(model.layers[0], "weights") and model.layers[0].in_features == 4


class Forwarding(Stack):
    """Finds attributes in a module inside, as wrappers of other libraries do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return vars(self)[name[5:]] if name.startswith("vars_") else getattr(super().__getattr__("layers")[0], name)


def test_what_the_original_finds_in_a_module_inside_is_there(mesh: DeviceMesh) -> None:
    model = compiled_of(mesh, Forwarding())
    assert model.out_features == 4 and model.weight is model.layers[0].weight
    with pytest.raises(
        InputError, match=r"layers\.0\.reset_parameters\(\) of a compiled model would draw other weights"
    ):
        model.reset_parameters()
    with pytest.raises(AttributeError, match=r"'vars_depth'.*__getattr__ does not find it.*gather.*whole\.vars_depth"):
        _ = model.vars_depth
    with pytest.raises(AttributeError, match="has no attribute 'reach', as the original has none"):
        _ = model.reach


def test_a_call_with_other_parameters_wants_them_to_lie_alike(mesh: DeviceMesh) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = compiled_of(mesh, plain)
    doubled, theirs = ({name: 2 * p for name, p in one.named_parameters()} for one in (model, plain))
    torch.testing.assert_close(functional_call(model, doubled, (X,)), functional_call(plain, theirs, (X,)))
    with pytest.raises(InputError, match=r"'0.weight' of a compiled model is replaced for a call.*does not lie as"):
        functional_call(model, {"0.weight": theirs["0.weight"]}, (X,))


def test_containers_are_indexed(mesh: DeviceMesh, plain: Stack) -> None:
    model = compiled_of(mesh, plain)
    assert len(model.layers) == 2 and model.layers[-1] is model.get_submodule("layers.1")
    assert [layer.out_features for layer in model.layers[:1]] == [4]
    assert list(model.by_name) == ["out", "again"] and model.by_name["again"] is model.by_name["out"]
    assert "out" in model.by_name and dict(model.by_name.items()).keys() == {"out", "again"}
    with pytest.raises(TypeError, match="not subscriptable"):
        _ = model.layers[0][0]
    sequence = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    model = galvatron_fx.compile(sequence, mesh, (X,), plan=Plan.uniform((1,), ("data",)))
    assert len(model) == 2 and model[0].weight is model.get_parameter("0.weight")  # type: ignore[arg-type,index]
    lazy = galvatron_fx.compile(sequence, mesh, plan=Plan.uniform((1,), ("data",)))
    lazy(X)
    assert len(lazy) == 2  # type: ignore[arg-type]


def test_what_torch_compile_adds_to_all_modules_is_no_clash(
    mesh: DeviceMesh, plain: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compiled_of(mesh, plain)
    assert model.dtype == plain.dtype
    monkeypatch.setattr(nn.Module, "___added_later", False, raising=False)
    assert model.dtype == plain.dtype


def test_settings_that_are_changed_hold_from_the_next_step_on(mesh: DeviceMesh, plain: Stack) -> None:
    model, original = compiled_of(mesh, plain), copy.deepcopy(plain)
    before = model(X)
    for scale in (3.0, 2.0):
        original.config.scale = model.config.scale = scale
        torch.testing.assert_close(model(X), original(X))
    assert model(X).equal(before) and len(model._programs) == 2


@pytest.mark.parametrize("name, said", [
    ("first", "module 'layers.0' of a compiled model cannot be called by itself"),
    ("generate", r"generate\(\) of a compiled model reads whole weights.*galvatron_fx.gather\(model\).*whole.generate"),
    ("compile", r'backend="inductor"'),
    ("share_memory", r"share_memory of a compiled model.*galvatron_fx\.gather\(model\)"),
])  # fmt: skip
def test_methods_that_need_more_than_shards_are_refused(mesh: DeviceMesh, plain: Stack, name: str, said: str) -> None:
    model = compiled_of(mesh, plain)
    with pytest.raises(InputError, match=said):
        getattr(model, name)(*[X] * (name == "first"))
    with pytest.raises(InputError, match='backend="inductor"'):
        torch.compile(model)(X)


def test_torch_compile_of_a_loop_leaves_the_model_as_it_is(mesh: DeviceMesh, plain: Stack) -> None:
    model, traced = compiled_of(mesh, plain), []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        traced.append(graph)
        return graph.forward

    def step(x: Tensor) -> Tensor:
        loss = 2 * model(x + 1)
        loss.backward()
        return loss + model.forward_backward(x)

    loss = torch.compile(step, backend=backend)(X)
    torch.testing.assert_close(loss, 2 * plain(X + 1) + plain(X))
    assert len(traced) == 3  # before, between and behind what the model does


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "wrap"), [
    ("DistributedDataParallel", DistributedDataParallel),
    ("FullyShardedDataParallel", lambda model: FullyShardedDataParallel(model, device_id=torch.device("cuda", 0))),
    ("fully_shard", fully_shard),
    ("fully_shard", lambda model: fully_shard(model.layers[0])),
    ("replicate", replicate),
    ("parallelize_module", lambda model: parallelize_module(model, model.mesh, {"layers.*": ColwiseParallel()})),
    ("DataParallel", lambda model: model._replicate_for_data_parallel()),  # what it does first, on several GPUs
])  # fmt: skip
def test_wrappers_around_it_are_refused_by_name(mesh: DeviceMesh, plain: Stack, name: str, wrap: Any) -> None:
    model = compiled_of(mesh, plain)
    before = dict(model.named_parameters())
    with pytest.raises(InputError, match=rf"^{name}.* of a compiled model.*without the wrapper"):
        wrap(model)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    torch.testing.assert_close(model(X), plain(X))


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy])
def test_it_is_neither_pickled_nor_copied_halfway(mesh: DeviceMesh, plain: Stack, copied: Any) -> None:
    with pytest.raises(InputError, match=r"cannot be pickled, nor copied by copy\.copy: save its weights"):
        copied(compiled_of(mesh, plain))


def test_a_copy_has_weights_of_its_own_and_no_gradients(mesh: DeviceMesh, plain: Stack) -> None:
    model = compiled_of(mesh, plain)
    model.forward_backward(X)
    copied = copy.deepcopy(model)
    assert all(parameter.grad is None for parameter in copied.parameters())
    copied.forward_backward(X)
    torch.optim.SGD(copied.parameters(), lr=0.1).step()
    assert copied(X) < model(X)
    torch.testing.assert_close(model(X), plain(X))


def test_what_cannot_be_followed_is_not_handed_out(mesh: DeviceMesh) -> None:
    model = compiled_of(mesh, Tangled())
    with pytest.raises(AttributeError, match=r"'rows' of the original cannot run.* same names as it: _rows\. Rename"):
        model.rows()
    with pytest.raises(AttributeError, match="'made' of a compiled model is a tuple_iterator, and changes of it"):
        _ = model.made


def test_the_gathered_model_is_the_original_of_now(mesh: DeviceMesh, plain: Stack) -> None:
    model, original = compiled_of(mesh, plain), copy.deepcopy(plain)
    for one, loss in ((model, model.forward_backward), (original, lambda x: original(x).backward())):
        loss(X)
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    whole: Any = galvatron_fx.gather(model.eval())
    assert type(whole) is Stack and not whole.training and whole.by_name["again"] is whole.by_name["out"]
    torch.testing.assert_close(dict(whole.state_dict()), dict(original.state_dict()))
    torch.testing.assert_close(whole(X), original(X))
    model.forward_backward(X)
    assert whole.layers[0].weight.grad is None and whole.steps == 1
    with pytest.raises(InputError, match=r"gather takes what galvatron_fx\.compile returns, and this is a Stack"):
        galvatron_fx.gather(plain)  # type: ignore[arg-type]


def test_plain_state_dicts_are_loaded(mesh: DeviceMesh, plain: Stack) -> None:
    model, other = compiled_of(mesh, plain), Stack()
    assert str(model.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    torch.testing.assert_close(model(X), other(X))
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.0\.bias.*\n.*Unexpected key.*extra"):
        state = {**other.state_dict(), "extra": X}
        del state["layers.0.bias"]
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0.bias"):
        model.load_state_dict({**other.state_dict(), "layers.0.bias": X})
    with pytest.raises(InputError, match="leave assign out"):
        model.load_state_dict(other.state_dict(), assign=True)
