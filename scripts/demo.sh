#!/usr/bin/env bash
# The whole of Gristmill on this machine: a real small model, fine-tuned by the official SageMaker SDK, and its bill.
# Downloads (setup, weights) and work (everything else) are timed apart. DEMO_DIR (demo-data)
# keeps what it made: the prepared model, the sessions, the books.
set -euo pipefail
cd "$(dirname "$0")/.."

demo_dir=${DEMO_DIR:-demo-data}
model=${DEMO_MODEL:-SmolLM2-135M-Instruct}
venv=${VENV:-.venv}
export PATH="$PWD/$venv/bin:$PATH" COLUMNS=${COLUMNS:-100}

headline() { printf '\n== %s\n' "$*"; }

headline "Setting up"
started=$SECONDS
scripts/setup.sh --model
downloads_s=$((SECONDS - started))
started=$SECONDS

mkdir -p "$demo_dir"
data_dir=$(cd "$demo_dir" && pwd)
log=$data_dir/up.log
export GRISTMILL_DATA_DIR=$data_dir HF_HUB_OFFLINE=1
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

up=
stop_up() {
  [ -n "$up" ] || return 0
  kill -INT "$up" 2>/dev/null || true
  wait "$up" || true
  up=
}
trap stop_up EXIT

rm -f "$log"
headline "Starting: gristmill up --model $model --data-dir $data_dir --port $port"
set -m  # its own process group, so that Ctrl-C reaches it once, through this script
gristmill up --data-dir "$data_dir" --port "$port" --model "$model" > "$log" 2>&1 &
up=$!
set +m
until grep -qs "Gristmill is ready" "$log"; do
  kill -0 "$up" 2>/dev/null || { cat "$log"; echo "gristmill up ended"; exit 1; }
  [ $((SECONDS - started)) -lt 180 ] || { cat "$log"; echo "not ready in 180 s"; exit 1; }
  sleep 0.2
done
cat "$log"
eval "$(gristmill env)"
echo "ready after $((SECONDS - started)) s"

headline "Supervised fine-tuning: python recipes/sft.py"
python recipes/sft.py --summary "$data_dir/sft.json" --png "$data_dir/sft.png"

headline "Reinforcement learning: python recipes/rl.py"
python recipes/rl.py --summary "$data_dir/rl.json" --png "$data_dir/rl.png"

headline "What it cost: gristmill usage --group-by session"
gristmill usage --group-by session

headline "Checks"
python scripts/demo_checks.py "$data_dir/sft.json" "$data_dir/rl.json"

stop_up
work_s=$((SECONDS - started))
headline "Done: downloads and set-up took $downloads_s s, work took $work_s s"
echo "Curves: $data_dir/sft.png and $data_dir/rl.png"
echo "To go on with it: $venv/bin/gristmill up --data-dir $demo_dir"
