#!/usr/bin/env bash
# Run the tests that need the cluster, first on one without a node, then on one with a node, each from its start.
# Arguments go to pytest. LEVELS names the levels to run. A few tests that failed are tried once more, on a fresh
# cluster: this is a whole Kubernetes on two cores, and kernels, kubelets and clocks have their moods.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-.venv/bin/python}
levels=${LEVELS:-control node}
parent=$(mktemp -d /var/tmp/gmt-XXXXXX)
export GRISTMILL_CLUSTER_DIR=$parent/c
export GRISTMILL_CLUSTER_REQUIRED=1 OMP_NUM_THREADS=1
failures_tried_again_max=5
cluster() { "$python" tests/cluster/cluster.py "$@"; }

# pytest on the cluster that is up; its memory of failures is in $parent.
run() { cluster exec -- "$python" -m pytest -m cluster -o cache_dir="$parent/cache-$level" "$@"; }

# How many tests failed in the last run of this level.
failures() {
  "$python" -c 'import json, sys; print(len(json.load(open(sys.argv[1]))))' \
    "$parent/cache-$level/v/cache/lastfailed" 2>/dev/null || echo 0
}

stop() {
  cluster down || true
  rm -rf "$parent"
}
trap stop EXIT

status=0 ran=0
for level in $levels; do
  cluster up --level "$level"
  code=0
  run "$@" || code=$?
  failed=$(failures)
  if [ "$code" = 1 ] && [ "$failed" -gt 0 ] && [ "$failed" -le "$failures_tried_again_max" ]; then
    cluster down
    cluster up --level "$level"
    echo "==== second try of what failed ===="
    code=0
    run --last-failed --last-failed-no-failures none "$@" || code=$?
  fi
  case $code in
    0) ran=1 ;;
    5) echo "no test of level $level was chosen" ;; # pytest's word for an empty choice
    *) status=$code ran=1 ;;
  esac
  cluster down
done
[ "$ran" = 1 ] || status=5
exit "$status"
