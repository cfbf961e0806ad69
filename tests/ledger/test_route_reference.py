"""The reference names every route of the ledger, and no other."""

import re
from pathlib import Path

from gristmill_ledger.app import make_app
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.settings import LedgerSettings
from gristmill_testing.app_routes import routes_of

PAGE = Path(__file__).parents[2] / "docs/reference/ledger-routes.md"


def test_every_route_is_on_the_page_and_every_line_of_the_page_is_a_route(tmp_path: Path) -> None:
    app = make_app(Ledger(LedgerSettings(data_dir=tmp_path)))
    served = [f"{method} {path}" for method, path in routes_of(app)]
    listed = re.findall(r"^\| `([A-Z]+ /[^`?]*)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(served) > 40
    assert sorted(listed) == sorted(served)
