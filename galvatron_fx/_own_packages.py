"""The packages that are installed with this one, which have common names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_NAMES = ("cost_models", "passes")


def require_own_packages() -> None:
    """Raise ImportError where Python finds other packages of these names: in the working directory, or imported before.

    The import of one of their modules would say that it is missing.
    """
    home = Path(__file__).resolve().parents[1]
    for name in _NAMES:
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
        if str(home / name) not in (str(Path(place).resolve()) for place in places):
            where = next(filter(None, places), "nowhere")
            raise ImportError(
                f"galvatron_fx needs its own package {name!r}, which lies in {home}, and Python finds {where} by that "
                f"name: rename that one, or start Python where it is not found first"
            )
