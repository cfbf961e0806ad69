#!/usr/bin/env bash
# Run the tests that need the cluster: each file of tests/control on a cluster of its own without a node, since such
# a cluster starts in seconds and one file's definitions, roles and policies are another's surprise; then those of
# tests/node, all on one cluster with a node.
# Tests that mostly wait run beside them, on a cluster of their own. Arguments go to pytest; LEVELS names the levels.
# A few tests that failed are tried once more, on a fresh cluster: this is a whole Kubernetes on two cores, and
# kernels, kubelets and clocks have their moods.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-.venv/bin/python}
levels=${LEVELS:-control node}
parent=$(mktemp -d /var/tmp/gmt-XXXXXX)
export GRISTMILL_CLUSTER_REQUIRED=1 OMP_NUM_THREADS=1
failures_tried_again_max=12
no_test_chosen=5 # pytest's word for an empty choice

cluster() { GRISTMILL_CLUSTER_DIR=$parent/$place "$python" tests/cluster/cluster.py "$@"; }

# pytest on the cluster that is up; its memory of failures is in $parent.
run() { cluster exec -- "$python" -m pytest -m "$mark" -o cache_dir="$parent/cache-$place" "$@"; }

# How many tests failed in the last run.
failures() {
  "$python" -c 'import json, sys; print(len(json.load(open(sys.argv[1]))))' \
    "$parent/cache-$place/v/cache/lastfailed" 2>/dev/null || echo 0
}

# One level from start to end: the level, which tests, where its cluster lies; then pytest's arguments.
run_level() {
  local level=$1 mark=$2 place=$3 code=0 failed
  shift 3
  cluster up --level "$level"
  run "$@" || code=$?
  failed=$(failures)
  if [ "$code" = 1 ] && [ "$failed" -gt 0 ] && [ "$failed" -le "$failures_tried_again_max" ]; then
    cluster down
    cluster up --level "$level"
    echo "==== second try of what failed ===="
    code=0
    run --last-failed --last-failed-no-failures none "$@" || code=$?
  fi
  cluster down
  return "$code"
}

stop() {
  local place
  for place in c w; do [ ! -d "$parent/$place" ] || cluster down || true; done
  rm -rf "$parent"
}
trap stop EXIT

status=0 ran=0
note() { # an exit status of pytest
  case $1 in
    0) ran=1 ;;
    "$no_test_chosen") ;;
    *) status=$1 ran=1 ;;
  esac
}

waiting=
if [[ " $levels " == *" control "* ]]; then
  run_level control "cluster and waiting" w "$@" >"$parent/waiting.log" 2>&1 &
  waiting=$!
fi
names_paths=
for argument; do [ ! -e "${argument%%::*}" ] || names_paths=yes; done
for level in $levels; do
  files=()
  [ "$level" = node ] || [ -n "$names_paths" ] || files=(tests/control/test_*.py)
  for file in "${files[@]:-}"; do
    code=0
    run_level "$level" "cluster and not waiting" c ${file:+"$file"} "$@" || code=$?
    note "$code"
  done
done
if [ -n "$waiting" ]; then
  code=0
  wait "$waiting" || code=$?
  cat "$parent/waiting.log"
  note "$code"
fi
[ "$ran" = 1 ] || status=$no_test_chosen
exit "$status"
