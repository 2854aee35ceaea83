"""How a process ends whose threads still hold something."""

from __future__ import annotations

import subprocess
import sys

_ENDS_BEFORE_ITS_THREAD = """
import threading, time
from galvatron_fx.runtime.gloo_shutdown import end_after_gloo
end_after_gloo()
threading.Thread(target=lambda: (time.sleep(0.01), print("let go")), daemon=True).start()
"""


def test_a_thread_that_lets_go_a_moment_later_is_waited_for() -> None:
    ended = subprocess.run(
        [sys.executable, "-uc", _ENDS_BEFORE_ITS_THREAD], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "let go\n"
