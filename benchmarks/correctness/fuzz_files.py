"""Claim: whatever stands in a plan, a cluster or profile, or a model's configuration, reading it ends soon and safely.

    python -m benchmarks.correctness.fuzz_files --cases 100000

Each case is a file: a valid one with changes of structure or of bytes, JSON that never was one, or one of some made by
hand to do harm. Reading it must end within 10 s, in success or in an error of ours that names the file, and must start
no program, connect nowhere, unpickle nothing and write nothing. The first case that does otherwise is shrunk and
shown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.common.machine import describe
from tests.cli.hostile import BY_HAND, READERS, VALID, Watch, damaged, outcome

_CHUNK = 2000  # examples of one run of hypothesis, which keeps what it has seen


def main() -> None:
    """Run the cases and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(describe())
    watch = Watch([])
    watch.install()
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in READERS}
    slowest: dict[str, float] = dict.fromkeys(READERS, 0.0)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.json"
        for kind, texts in VALID.items():
            assert all(outcome(kind, path, text.encode(), watch) == "read" for text in texts), (
                f"a valid {kind} is refused"
            )

        def look(kind: str, content: bytes) -> None:
            begin = time.perf_counter()
            counts[kind][outcome(kind, path, content, watch)] += 1
            slowest[kind] = max(slowest[kind], time.perf_counter() - begin)

        for kind in READERS:
            for content in BY_HAND.values():
                look(kind, content)
        chunk = 0
        while sum(count.total() for count in counts.values()) < options.cases:
            kind = list(READERS)[chunk % len(READERS)]
            _run(kind, options.seed + chunk, look)
            chunk += 1
    for kind, count in counts.items():
        ended = ", ".join(f"{number} {what}" for what, number in count.most_common())
        print(f"{kind:8} {count.total():6} cases: {ended}; the slowest took {slowest[kind]:.2f} s")
    total = sum(count.total() for count in counts.values())
    print(f"{total} cases, each read or refused as it should be ({time.monotonic() - start:.0f} s)")


def _run(kind: str, number: int, look: Callable[[str, bytes], None]) -> None:
    """One chunk of examples."""

    @seed(number)
    @settings(
        max_examples=_CHUNK,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(kind))
    def check(content: bytes) -> None:
        look(kind, content)

    check()


if __name__ == "__main__":
    main()
