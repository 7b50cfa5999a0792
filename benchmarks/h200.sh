#!/usr/bin/env bash
# Rows of docs/benchmarks.md for one H200, each in its own process with a time limit. The training steps as a user gets them,
# through `megatrain train`: benchmarks/front_door.py.
# Use: benchmarks/h200.sh ROW...      rows: 8b-32 8b-8 8b-24gib 14b 17b 4b deepspeed fsdp2 small save resume-lazy resume-eager (after save)
#                                     long-131072 long-262144 long-524288 instruments trace doctor
# Logs go to $OUT (default: a temporary folder); the last lines of each are printed.
set -u
export PYTHONPATH=${PYTHONPATH:-src} PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
out=${OUT:-$(mktemp -d)}
machine=${MACHINE:-docs/machines/h200.yaml}
disk=${DISK:-/tmp/megatrain-checkpoints} # for the checkpoint rows: 60 GiB
bench="python3 -m megatrain bench --machine $machine --warmup 2"

row() { # name, seconds, lines to print, command...
  local name=$1 limit=$2 lines=$3
  shift 3
  echo "=== $name: $* ($(date +%T))"
  timeout "$limit" "$@" >"$out/$name.log" 2>&1 || echo "$name ended with $?"
  tail -n "$lines" "$out/$name.log" | cut -c1-230
}

for name in "$@"; do
  case $name in
    8b-32) row "$name" 170 34 $bench --shape qwen3-8b --rows 32 --tokens 1024 --steps 5 ;;
    8b-8) row "$name" 140 34 $bench --shape qwen3-8b --rows 8 --tokens 1024 --steps 6 ;;
    8b-24gib) row "$name" 200 34 $bench --shape qwen3-8b --rows 64 --tokens 1024 --steps 3 --device-gib 24 ;;
    14b) row "$name" 150 22 $bench --shape qwen3-14b --rows 32 --tokens 1024 --steps 2 --no-bounds ;;
    17b) row "$name" 200 22 $bench --shape qwen3-17b --rows 32 --tokens 1024 --steps 2 --warmup 1 --no-bounds ;;
    4b) row "$name" 100 22 $bench --shape qwen3-4b --rows 32 --tokens 1024 --steps 3 --no-bounds ;;
    deepspeed) row "$name" 170 4 python3 benchmarks/peers/deepspeed_zero3.py --warmup 1 --steps 2 ;;
    fsdp2) row "$name" 100 4 python3 benchmarks/peers/fsdp2.py --warmup 1 --steps 2 ;;
    small) row "$name" 90 6 python3 benchmarks/small_units.py 16 1024 12 ;;
    save) row "$name" 280 16 python3 benchmarks/checkpoints.py run qwen3-4b 32 1024 "$disk" "$machine" ;;
    resume-*) row "$name" 120 2 python3 benchmarks/checkpoints.py resume qwen3-4b 32 1024 "$disk" "$machine" "${name#resume-}" ;;
    long-524288) row "$name" 500 20 python3 benchmarks/long_context.py 524288 --layers 12 --machine "$machine" ;;
    long-*) row "$name" 300 20 python3 benchmarks/long_context.py "${name#long-}" --machine "$machine" ;;
    instruments) row "$name" 150 6 python3 benchmarks/instruments_cost.py qwen3-8b 8 1024 40 ;;
    trace) row "$name" 120 6 python3 -m megatrain trace --shape qwen3-8b --rows 32 --tokens 1024 --steps 2 --machine "$machine" \
      --out "$out/trace.json" --png "$out/pipeline.png" ;;
    doctor) row "$name" 90 40 python3 -m megatrain doctor --again ;;
    *) echo "unknown row $name" >&2 ;;
  esac
done
