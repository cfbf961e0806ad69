"""Whether what the API server holds is what was asked for. Pure.

The server fills in defaults and writes quantities in its own form, so that the two are never equal: what
was asked for must be in what is there, and nothing that was asked for earlier may be left.
"""

import re
from decimal import Decimal
from typing import Any, Final

from gristmill_operator.children.manifest import ASKED_HASH, Manifest

QUANTITY_FIELDS: Final = frozenset(
    {"hard", "requests", "limits", "default", "defaultRequest", "sizeLimit"}
)
"""Below these every text is a quantity."""
_QUANTITY: Final = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$")
_SCALE: Final = {
    **{
        unit: Decimal(1000) ** power
        for power, unit in enumerate(("", "k", "M", "G", "T", "P", "E"))
    },
    **{
        unit: Decimal(1024) ** power
        for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)
    },
    "m": Decimal("0.001"),
}


def differs(found: Manifest | None, wanted: Manifest) -> bool:
    """`wanted` as `manifest.asked` returned it."""
    if found is None:
        return True
    marks = found["metadata"].get("annotations") or {}
    if marks.get(ASKED_HASH) != wanted["metadata"]["annotations"][ASKED_HASH]:
        return True
    return not _holds(found, {k: v for k, v in wanted.items() if k not in ("apiVersion", "kind")})


def quantity(text: str) -> Decimal | None:
    """A Kubernetes quantity as a number; None if the text is none."""
    parts = _QUANTITY.match(text)
    return None if parts is None else Decimal(parts[1]) * _SCALE[parts[2] or ""]


def _holds(found: Any, wanted: Any, *, quantities: bool = False) -> bool:  # Any: JSON
    if isinstance(wanted, dict):
        return isinstance(found or {}, dict) and all(
            _holds((found or {}).get(name), each, quantities=quantities or name in QUANTITY_FIELDS)
            for name, each in wanted.items()
        )
    if isinstance(wanted, list):
        there = found or []
        return len(there) == len(wanted) and all(
            _holds(one, other, quantities=quantities)
            for one, other in zip(there, wanted, strict=True)
        )
    if found is None:
        # The server leaves out what is empty.
        return wanted in ("", None)
    if quantities and isinstance(wanted, str) and isinstance(found, str):
        amount = quantity(wanted)
        return found == wanted or (amount is not None and amount == quantity(found))
    return bool(found == wanted)
