#!/usr/bin/env bash
# Everything that needs a GPU, in at most ten minutes: the suite in all dtypes with graph replay, compute-sanitizer where
# there is one, then the benchmarks. Nothing is downloaded. Small JSON files and logs go to $OUT (default: runs/gpu).
# Without a GPU it says so, runs the host part of the benchmarks, and exits 0. Usage: benchmarks/gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/gpu}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 DSPARK_TEST_DEVICE=cuda
mkdir -p "$OUT"
: > "$OUT/steps.txt"
failed=0

# step NAME SECONDS COMMAND...: run it under a time limit, keep its output, note how it ended.
step() {
  local name=$1 limit=$2 started=$SECONDS rc=0
  shift 2
  echo "== $name (at most $limit s)"
  timeout "$limit" "$@" > "$OUT/$name.log" 2>&1 || rc=$?
  tail -n 15 "$OUT/$name.log"
  echo "$name $rc $((SECONDS - started))" >> "$OUT/steps.txt"
  [ "$rc" -eq 0 ] || failed=1
}

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "No GPU here: kernels are not run, only what they cost the host is measured."
  export DSPARK_TEST_DEVICE=cpu
  step host 300 "$PYTHON" -m pytest --benchmark -q -p no:cacheprovider -k host_overhead \
    --benchmark-json="$OUT/benchmarks.json"
else
  step suite 270 "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
  if [ -n "$sanitizer" ]; then
    step sanitizer 100 "$sanitizer" --tool memcheck --error-exitcode 9 --target-processes all \
      "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider -k nothing_around
  else
    echo "== no compute-sanitizer here"
  fi
  step benchmarks 200 "$PYTHON" -m pytest --benchmark -q -p no:cacheprovider -k "device_time or host_overhead" \
    --benchmark-json="$OUT/benchmarks.json"
fi

"$PYTHON" - "$OUT" << 'PY'
import json, sys
from pathlib import Path

import torch

out = Path(sys.argv[1])
steps = [line.split() for line in (out / "steps.txt").read_text().splitlines()]
report = {
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    "torch": torch.__version__,
    "steps": [{"name": n, "exit": int(rc), "seconds": int(s)} for n, rc, s in steps],
    "benchmarks": [],
}
full = out / "benchmarks.json"
if full.exists():
    for row in json.loads(full.read_text())["benchmarks"]:
        report["benchmarks"].append(
            {"name": row["fullname"], "host_median_us": row["stats"]["median"] * 1e6, **row["extra_info"]}
        )
    full.unlink()
(out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
print(f"wrote {out / 'gpu.json'}")
PY
exit "$failed"
