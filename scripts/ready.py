"""Exit 0 when the URL answers 200, else 1."""

import sys
import urllib.error
import urllib.request

try:
    with urllib.request.urlopen(sys.argv[1], timeout=2) as answer:  # noqa: S310 - our own address
        sys.exit(answer.status != 200)
except (urllib.error.URLError, OSError):
    sys.exit(1)
