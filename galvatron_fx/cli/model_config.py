"""Configurations of transformers, from a file or by name, with overrides: data alone, no code and no network."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron_fx.ir.errors import GalvatronError, InputError
from galvatron_fx.ir.strict_json import parse_object, read_object

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["ModelConfig", "config_from_file", "config_from_name", "parse_override"]

CONFIG_FILE = "config.json"
_MAX_CONFIG_BYTES = 4_000_000
_MOST_SHOWN = 300
_MOST_COUNT = 2**21  # of layers, labels, positions: configurations make lists of so many
_COUNT = re.compile(r"(^|_)(num|n|max)_|layers?$|depths?$|labels$")
_MOST_LAYERS = 10_000  # each is built, traced and planned
_LAYERS = re.compile(r"layers?$|depths?$|blocks?$")
# What makes transformers run or fetch anything else than its own code, or names a dtype (see _dtype).
_LEFT_OUT = {
    "architectures", "attn_implementation", "auto_map", "custom_pipelines", "dtype", "experts_implementation",
    "quantization_config", "torch_dtype", "transformers_version", "use_pretrained_backbone",
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """A configuration, what it says of the class to build (``architectures``) and of the dtype, "" if nothing."""

    config: PretrainedConfig
    architectures: tuple[str, ...] = ()
    dtype: str = ""


def parse_override(text: str) -> tuple[str, Any]:
    """Read ``key=value``: the value is JSON, or text where it is none. Raises ValueError for anything else."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"{text!r} is no key=value, such as num_hidden_layers=80")
    try:
        return key, parse_object(f'{{"value": {value}}}')["value"]
    except InputError:
        return key, value


def config_from_file(path: str | Path, overrides: Sequence[tuple[str, Any]] = ()) -> ModelConfig:
    """Read a ``config.json`` or the one in a folder; raises InputError."""
    where = Path(path) / CONFIG_FILE if Path(path).is_dir() else Path(path)
    fields = read_object(where, "a model's configuration", _MAX_CONFIG_BYTES)
    try:
        model_type = fields.get("model_type")
        if not isinstance(model_type, str):
            raise InputError(
                f"model_type is {_short(model_type)}: a configuration of transformers names its model there"
            )
        return _configured(_config_class(model_type), fields, overrides)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def config_from_name(name: str, overrides: Sequence[tuple[str, Any]] = ()) -> ModelConfig:
    """Make the configuration of a model type ("llama") or class ("LlamaConfig") of transformers; raises InputError."""
    return _configured(_config_class(name), {}, overrides)


def _config_class(name: str) -> type[PretrainedConfig]:
    with _transformers():
        from transformers.models.auto import configuration_auto
    names = configuration_auto.CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]
    types = {class_name: kind for kind, class_name in names.items()} | {kind: kind for kind in names}
    if name not in types:
        near = get_close_matches(name[:100], types, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "give a model type such as llama."
        raise InputError(
            f"transformers knows no model {_short(name)}, and there is no such file: {hint} A model with code of its "
            f"own is given as module:function"
        )
    config_class: type[PretrainedConfig] = configuration_auto.CONFIG_MAPPING[types[name]]
    return config_class


@contextlib.contextmanager
def _transformers() -> Iterator[None]:
    """Import transformers without its network and its log, and say how to get it where it is missing."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is first imported: a configuration may name a repository
    try:
        from transformers.utils import logging

        logging.set_verbosity_error()
        yield
    except ImportError as error:
        raise InputError(
            f"models by name or configuration need the package transformers ({error}): install it, or give "
            f"module:function"
        ) from None


def _configured(
    kind: type[PretrainedConfig], fields: Mapping[str, Any], overrides: Sequence[tuple[str, Any]]
) -> ModelConfig:
    plain = _data(fields)
    for key, value in overrides:
        _put(plain, key, value)
    _check(kind, plain)
    try:
        config = kind.from_dict(plain)
        _check_known(config, fields, overrides)
        for part in (config, config.get_text_config()):
            if getattr(part, "use_cache", False):
                part.use_cache = any(key.rpartition(".")[2] == "use_cache" for key, _ in overrides)
    except GalvatronError:
        raise
    except Exception as error:  # whatever the checks of some hundred configurations raise
        raise InputError(f"{kind.__name__} refuses this: {_short(str(error))}") from None
    return ModelConfig(config, _architectures(fields), _dtype(fields))


def _data(value: Any) -> Any:
    """A copy without keys that could make transformers do more than build a model of its own."""
    if isinstance(value, dict):
        return {key: _data(item) for key, item in value.items() if not key.startswith("_") and key not in _LEFT_OUT}
    return [_data(item) for item in value] if isinstance(value, list) else value


def _put(fields: dict[str, Any], key: str, value: Any) -> None:
    """Set ``a.b`` inside; raises InputError where ``a`` is no object."""
    *outer, last = key.split(".")
    if _data({last: value}) == {}:
        raise InputError(f"--set {key}: that is not taken from a configuration; see --dtype and --task")
    for name in outer:
        fields = fields.setdefault(name, {})
        if not isinstance(fields, dict):
            raise InputError(f"--set {key}: {name!r} is {_short(fields)}, which has nothing inside")
    fields[last] = _data(value)


def _check(kind: type[PretrainedConfig], fields: Mapping[str, Any]) -> None:
    """Refuse what would not fail but hang, and what would replace code by data."""
    for key, value in fields.items():
        if callable(getattr(kind, key, None)):
            raise InputError(f"{key!r} is no setting of {kind.__name__}")
        if isinstance(value, dict):
            _check(kind, value)
        numbers = value if isinstance(value, list) else [value]
        most = _MOST_LAYERS if _LAYERS.search(key) else _MOST_COUNT if _COUNT.search(key) else None
        if most is not None and any(isinstance(n, (int, float)) and abs(n) > most for n in numbers):
            raise InputError(f"{key} is {_short(value)}: at most {most} is taken")


def _check_known(config: PretrainedConfig, fields: Mapping[str, Any], overrides: Sequence[tuple[str, Any]]) -> None:
    """Refuse an override that neither file nor class knows: a typo would plan another model in silence."""
    default = type(config)()
    known = {*default.to_dict(), *fields}
    for key, _ in overrides:
        name = key.partition(".")[0]
        if name not in known and not hasattr(default, name):
            near = get_close_matches(name, known, n=3)
            hint = f": did you mean {' or '.join(near)}?" if near else ""
            raise InputError(f"--set {key}: {type(config).__name__} has no {name!r}{hint}")


def _architectures(fields: Mapping[str, Any]) -> tuple[str, ...]:
    given = fields.get("architectures")
    return tuple(name for name in given if isinstance(name, str)) if isinstance(given, list) else ()


def _dtype(fields: Mapping[str, Any]) -> str:
    given = fields.get("dtype", fields.get("torch_dtype"))
    return given.removeprefix("torch.") if isinstance(given, str) else ""


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
