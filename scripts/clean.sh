#!/usr/bin/env bash
# Removes the containers of the demo and of the tests, and the node images.
set -euo pipefail
command -v podman > /dev/null || exit 0
podman ps --all --quiet --filter label=bedplate_nodes | xargs --no-run-if-empty podman rm --force --time 0
podman images --quiet --filter 'reference=localhost/bedplate-node*' | sort -u | xargs --no-run-if-empty podman rmi
