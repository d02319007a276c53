#!/usr/bin/env bash
# Molecule scenarios and fault injection on container nodes. The two run side by side: most of the time they wait for
# nodes, and each has nodes and wheels of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

python tests/tiny/build.py .cache/tiny
# Before the two start, or both would wait for the same build.
for kind in plain driver; do
  tests/nodes/build_image.sh "$kind"
done

log=$(mktemp)
trap 'kill "$faults" 2> /dev/null || true; cat "$log"; rm -f "$log"' EXIT
pytest -m 'node and not real' tests/integration > "$log" 2>&1 &
faults=$!

for scenario in default rollback faulty driver toolkit; do
  molecule test --scenario-name "$scenario"
done
wait "$faults"
