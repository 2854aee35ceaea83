"""Run by test_integrations.py: tools with a loop of their own on two ranks, beside a loop on one device.

Prints ``ok <check>`` once for each check that holds on every rank, ``FAILED <check>`` and the errors otherwise.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import galvatron_fx
from tests.integrations import hugging_face_checks, lightning_checks
from tests.integrations.hugging_face_checks import Rows, language_model
from tests.runtime.launch import fork_checks


def prepare() -> None:
    """What all ranks have then: imports, and what torchrun says."""
    galvatron_fx.capture(language_model(), {**Rows()[:4], "num_items_in_batch": torch.tensor(3)})
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}


def main() -> None:
    """Run all checks, or those named after the folder."""
    hugging_face_checks.FOLDER = lightning_checks.FOLDER = Path(sys.argv[1])
    fork_checks((2,), {**hugging_face_checks.CHECKS, **lightning_checks.CHECKS}, sys.argv[2:], prepare)


if __name__ == "__main__":
    main()
