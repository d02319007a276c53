#!/usr/bin/env bash
# Removes the containers of the demo and of the tests, and the node image.
set -euo pipefail
command -v podman > /dev/null || exit 0
podman ps --all --quiet --filter 'name=^bedplate-(demo|molecule|faults|real)-[0-9]+$' | xargs --no-run-if-empty podman rm --force --time 0
podman images --quiet localhost/bedplate-node | xargs --no-run-if-empty podman rmi
