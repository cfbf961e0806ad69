"""The ledger's routes that answer JSON: usage, explanations, estimates."""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final

from gristmill_cli.cluster.ledger import LedgerAccess
from gristmill_cli.errors import CommandError
from gristmill_cli.local.ledger_client import reported

Json = dict[str, Any]  # Any: the ledger's JSON
TIMEOUT_S: Final = 120


def ask_json(
    ledger: LedgerAccess, path: str, parameters: dict[str, str], *, method: str = "GET"
) -> Json:
    """One answer. Raises the ledger's error, or CommandError where it does not answer."""
    url = f"{ledger.url}{path}?{urllib.parse.urlencode(parameters)}"
    request = urllib.request.Request(url, headers=ledger.headers, method=method)  # noqa: S310 - ours
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as page:  # noqa: S310
            answer: Json = json.load(page)
    except urllib.error.HTTPError as error:
        raise reported(error.code, error.read()) from error
    except (OSError, ValueError) as error:
        raise CommandError(
            f"the ledger at {ledger.url} does not answer ({error}); see `gristmill status`"
        ) from error
    return answer
