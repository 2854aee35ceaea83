"""Imports what scripts of ranks need, and traces a model once, as much is imported when it is first used."""

from __future__ import annotations

import gc

import torch

import galvatron_fx
from galvatron_fx import Cluster
from tests.checkpoint import forked  # noqa: F401 (runs the first backward pass, before the model is traced)
from tests.models import zoo
from tests.runtime import beside_plain  # noqa: F401 (imported for what it imports)

torch.set_num_threads(1)
_MODEL, _INPUTS = zoo.gpt2(layers=1)
galvatron_fx.plan(_MODEL, Cluster.preset("2xA100-80GB"), _INPUTS, roles=("data", "tensor"))
gc.freeze()  # what is imported stays: forks need not look through it
