"""Models that several tests of pages and pictures explain are captured once by a worker."""

from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of every module of this folder)
