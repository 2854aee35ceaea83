"""Models that several tests of whole models capture are captured once by a worker."""

from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of every module of this folder)
