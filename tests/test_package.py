from __future__ import annotations

import subprocess
import sys

import pytest

import galvatron_fx


def test_importing_the_package_and_a_plan_does_not_import_torch() -> None:
    code = "import sys, galvatron_fx; galvatron_fx.Plan; galvatron_fx.errors; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", galvatron_fx.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(galvatron_fx, name) is not None
    assert name in dir(galvatron_fx)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'compiel'; the public names are"):
        galvatron_fx.compiel  # noqa: B018
