#!/usr/bin/env bash
# Two GPUs: the host engine on both, beside one: bits under random delays, losses, speed, memory, and `megatrain train` itself.
# Use: benchmarks/host_ranks.sh        takes at most BUDGET seconds (default 570) and ends with a table; logs in $OUT (default: a temporary folder)
# Most important rows first; each is limited to ROW_LIMIT seconds, and a crash or hang loses only its own row.
# Rehearsal on a CPU: SMALL=tiny ROWS=4 TOKENS=64 SHAPES=tiny WORDS="--rows 4 --tokens 64 --warmup 1 --steps 2" DEVICE=cpu benchmarks/host_ranks.sh
set -u
export PYTHONPATH=${PYTHONPATH:-src:tests/support} PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
budget=${BUDGET:-570} row_limit=${ROW_LIMIT:-170} words=${WORDS:-} device=${DEVICE:-cuda} python=${PYTHON:-python3}
shapes=${SHAPES:-qwen3-8b qwen3-0.6b qwen3-14b qwen3-32b} gpus=${GPUS:-2}
out=${OUT:-$(mktemp -d)}/host_ranks
mkdir -p "$out"
left() { echo $((budget - SECONDS)); }
limit() { echo $(($(left) < row_limit ? $(left) : row_limit)); }

ranks() { # number of processes, then words of host_ranks.py
  local count=$1
  shift
  [ "$(left)" -gt 30 ] || return
  echo "=== $count: $* ($(date +%T), $(left) s left)"
  # shellcheck disable=SC2086
  timeout -k 5 "$(limit)" $python -m torch.distributed.run --standalone --nproc-per-node "$count" \
    benchmarks/host_ranks.py --out "$out" --device "$device" $words "$@" >"$out/row.log" 2>&1 || echo "ended with $?"
  cat "$out/row.log" >>"$out/all.log"
  grep -v "^\[W\|Warning\|^$" "$out/row.log" | tail -n "${LINES_SHOWN:-12}" | cut -c1-240
}

product() { # a command of the product and its words; the last lines of what it prints
  [ "$(left)" -gt 30 ] || return
  echo "=== megatrain $* ($(date +%T), $(left) s left)"
  timeout -k 5 "$(limit)" $python -m megatrain "$@" >"$out/row.log" 2>&1 || echo "ended with $?"
  cat "$out/row.log" >>"$out/all.log"
  grep -v "^\[W\|Warning\|^$" "$out/row.log" | tail -n "${LINES_SHOWN:-12}" | cut -c1-240
}

[ "$device" = cuda ] && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
LINES_SHOWN=30 product doctor --device "$device"
echo "=== delays and losses ($(left) s left)"
RANKS_DEVICE=$device timeout -k 5 "$(limit)" $python -m pytest -q -m multi_gpu -p no:cacheprovider tests/engine/host/test_multi_gpu.py 2>&1 |
  tail -n 25 | cut -c1-220
for shape in $shapes; do
  ranks "$gpus" --shape "$shape"
  case $shape in qwen3-14b | qwen3-32b) ;; *) ranks 1 --shape "$shape" ;; esac
done
# replicated weights (the plan's choice) and gathered ones, and a picture of both ranks
shape=(--shape "${SMALL:-qwen3-0.6b}" --rows "${ROWS:-64}" --tokens "${TOKENS:-1024}" --gpus "$gpus" --device "$device")
LINES_SHOWN=8 product bench "${shape[@]}" --steps 4 --no-bounds
LINES_SHOWN=8 product bench "${shape[@]}" --steps 4 --no-bounds --option weight_slots=2
LINES_SHOWN=1 product trace "${shape[@]}" --steps 1 --out "$out/trace.json" --png "$out/trace.png"
echo "=== table ($SECONDS s in all)"
$python benchmarks/host_ranks.py --out "$out" --table
