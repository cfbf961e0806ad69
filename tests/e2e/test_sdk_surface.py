"""Every public name of the installed official SDK was used by the modules `test_sdk_*`.

Names are taken from the SDK by `inspect`, never from a list kept here: a newer SDK with a method
that we never tried makes this fail, naming it. Runs behind the others (see conftest).
"""

import ast
from pathlib import Path

import pytest
import sagemaker.train.training_session as sdk

from gristmill_testing.sdk_loop import SURFACE

pytestmark = pytest.mark.e2e
MODULES = sorted(
    path for path in Path(__file__).parent.glob("test_sdk_*.py") if path != Path(__file__)
)


def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


@pytest.fixture
def whole_run(request: pytest.FixtureRequest) -> None:
    """Skip where only a part of the tests was selected: nothing can be said then."""
    selected = {(item.path, item.name.split("[")[0]) for item in request.session.items}
    defined = {
        (path, node.name)
        for path, tree in _trees().items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }
    if not defined <= selected:
        pytest.skip("only a part of the SDK tests was selected")


@pytest.mark.usefixtures("whole_run")
def test_no_public_callable_of_the_sdk_is_left_uncalled() -> None:
    assert len(SURFACE.names) > 50
    assert SURFACE.uncalled == []


@pytest.mark.usefixtures("whole_run")
def test_no_public_name_of_the_sdk_is_left_unused() -> None:
    """Constants, enums and functions cannot be wrapped; they must stand in a test."""
    used = {
        node.attr
        for tree in _trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "sdk"
    }
    assert sorted(set(sdk.__all__) - used) == []
