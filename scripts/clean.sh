#!/usr/bin/env bash
# Removes what the tests and the demo leave outside the repository: containers, networks' nodes and images by their names.
set -euo pipefail
command -v podman > /dev/null || exit 0
podman ps --all --quiet --filter 'name=^bedplate-' | xargs --no-run-if-empty podman rm --force --time 0
podman images --quiet localhost/bedplate-node | xargs --no-run-if-empty podman rmi --force
