#!/usr/bin/env bash
# Two GPUs: layouts of the mesh engine on Qwen3-8B's shape, compared with the host engine's losses, and recovery from a killed rank.
# Use: benchmarks/gpu2.sh          takes at most BUDGET seconds (default 570) and ends with a table; logs in $OUT (default: a temporary folder)
# Most important rows first; each is limited to ROW_LIMIT seconds, and a crash or hang loses only its own row.
# Rehearsal on a CPU: WORDS="--shape tiny --tokens 64 --steps 4" DEVICE=cpu benchmarks/gpu2.sh
set -u
export PYTHONPATH=${PYTHONPATH:-src:tests/support} PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1 TORCH_SHOW_CPP_STACKTRACES=0
budget=${BUDGET:-570} row_limit=${ROW_LIMIT:-110} words=${WORDS:-} device=${DEVICE:-cuda} python=${PYTHON:-python3}
out=${OUT:-$(mktemp -d)}/gpu2
mkdir -p "$out"

# Output lines of the processes that are shown; tracebacks are in the logs.
shown='^[a-z0-9-]*: \|FAILED\|^Timeout\|^Thread\|^  File .*\(megatrain\|mesh_\).* in \|OutOfMemory'

left() { echo $((budget - SECONDS)); }

layouts() { # rows...: run in shared processes; after a crash, the remaining rows in fresh ones
  local attempt
  for attempt in "$@"; do
    [ "$(left)" -gt 40 ] || return
    echo "=== layouts: $* ($(date +%T), attempt for $attempt, $(left) s left)"
    # shellcheck disable=SC2086
    timeout -k 5 "$(left)" $python -m torch.distributed.run --standalone --nproc-per-node 2 \
      benchmarks/mesh_layouts.py --out "$out" --limit "$row_limit" $words "$@" 2>&1 |
      tee -a "$out/layouts.log" | grep --line-buffered "$shown" | stdbuf -oL cut -c1-220
    grep -q "\"row\": \"${*: -1}\", \"state\": \"[bdf]" "$out/rows.jsonl" && return
  done
}

[ "$device" = cuda ] && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
[ "$device" = cuda ] && nvidia-smi topo -m | head -4
layouts fsdp2-compiled tp2 pp2-1f1b

# The host engine's losses on one GPU, and at the same time the tiny run with the killed rank: neither measures speed.
echo "=== host and kill ($(date +%T), $(left) s left)"
timeout -k 5 "$(($(left) < 170 ? $(left) : 170))" $python benchmarks/mesh_kill.py --out "$out/kill" --device "$device" \
  ${KILL_WORDS:-} >"$out/kill.json" 2>"$out/kill.err" &
kill_row=$!
# shellcheck disable=SC2086
timeout -k 5 "$(($(left) < 170 ? $(left) : 170))" $python benchmarks/mesh_layouts.py --out "$out" --limit 165 $words host 2>&1 |
  tee "$out/host.log" | stdbuf -oL cut -c1-220
wait $kill_row || { echo "kill ended with $?"; tail -n 8 "$out/kill.err"; tail -n 15 "$out/kill/killed.log"; } | cut -c1-220

layouts cp2 pp2-zbv fsdp2
echo "=== table ($SECONDS s in all)"
$python benchmarks/mesh_layouts.py --out "$out" --table
cat "$out/kill.json"
