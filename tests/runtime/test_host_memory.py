"""What steps let go stays with the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from galvatron_fx.runtime.malloc import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**21), torch.ones(2**24)  # 8 and 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back, kept = faults(), keep_freed_memory()
faults()
print(kept, given_back, faults())
"""


def run(**settings: str) -> tuple[bool, int, int]:
    """In a process of its own: whether memory is kept, and page faults without and with it."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**os.environ, **settings}, capture_output=True, text=True, check=True
    )
    kept, before, after = done.stdout.split()
    return kept == "True", int(before), int(after)


@pytest.mark.slow
@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="needs glibc")
def test_no_pages_are_asked_for_again() -> None:
    kept, before, after = run()
    assert kept and before > 20 * 2**26 / 4096 and after < before / 100


@pytest.mark.slow
def test_settings_of_the_environment_win() -> None:
    kept, _, after = run(MALLOC_MMAP_THRESHOLD_="131072")
    assert not kept and after > 20 * 2**26 / 4096
