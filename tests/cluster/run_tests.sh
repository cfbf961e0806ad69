#!/usr/bin/env bash
# Run the tests that need the cluster, first on one without a node, then on one with a node, each from its start.
# Arguments go to pytest. LEVELS names the levels to run.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-.venv/bin/python}
levels=${LEVELS:-control node}
parent=$(mktemp -d /var/tmp/gmt-XXXXXX)
export GRISTMILL_CLUSTER_DIR=$parent/c
export GRISTMILL_CLUSTER_REQUIRED=1 OMP_NUM_THREADS=1
cluster() { "$python" tests/cluster/cluster.py "$@"; }

stop() {
  cluster down || true
  rm -rf "$parent"
}
trap stop EXIT

status=0 ran=0
for level in $levels; do
  cluster up --level "$level"
  code=0
  cluster exec -- "$python" -m pytest -m cluster "$@" || code=$?
  case $code in
    0) ran=1 ;;
    5) echo "no test of level $level was chosen" ;; # pytest's word for an empty choice
    *) status=$code ran=1 ;;
  esac
  cluster down
done
[ "$ran" = 1 ] || status=5
exit "$status"
