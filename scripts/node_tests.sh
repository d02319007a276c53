#!/usr/bin/env bash
# Molecule scenarios and fault injection, one after the other: the machine is small and the nodes are real.
set -euo pipefail
cd "$(dirname "$0")/.."
python tests/tiny/build.py .cache/tiny
for scenario in default rollback faulty; do
  molecule test --scenario-name "$scenario"
done
pytest -m 'node and not real' tests/integration
