# Everything a person does with this repository. `make help` lists it; every target sets up what it needs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
# Off-line lint and no Galaxy look-ups: the project uses no collection.
export ANSIBLE_HOME := $(CURDIR)/.cache/ansible

setup_done := .venv/.set-up
yaml := .config .github .pre-commit-config.yaml inventories molecule playbooks profiles roles requirements.yml
python := src library filter_plugins lookup_plugins tests scripts benchmarks

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(setup_done) ## Install what is missing (apt packages, locked Python environment in .venv)

$(setup_done): requirements/bootstrap.lock requirements/dev.lock pyproject.toml scripts/setup.sh
	scripts/setup.sh
	@touch $@

.PHONY: demo
demo: setup ## The main job on one container node, real wheels; DEMO=tiny for a version of minutes without downloads
	scripts/demo.py $(if $(DEMO),--stack $(DEMO))

.PHONY: test
test: setup ## All tests: lint and types, unit, policy, Molecule and fault injection on container nodes
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint unit
	$(MAKE) --no-print-directory node-tests

.PHONY: unit
unit: setup ## Unit and policy tests (no node)
	pytest tests/unit tests/policy

.PHONY: codes
codes: setup ## Which unit test produces which verdict: the table (runs the unit tests)
	@mkdir -p .cache
	pytest tests/unit --quiet --verdicts-out .cache/verdicts.json
	scripts/verdict_tests.py .cache/verdicts.json

.PHONY: node-tests
node-tests: setup ## Molecule scenarios and fault injection on container nodes
	scripts/node_tests.sh

.PHONY: test-real
test-real: setup ## Real wheels, toolkits and driver, more than an hour (about 12 GB of downloads the first time, 30 GB of disk)
	pytest -m real tests/integration --no-header -v

.PHONY: lint
lint: setup ## ruff, mypy --strict, yamllint, ansible-lint at production
	ruff check $(wildcard $(python))
	ruff format --check $(wildcard $(python))
	mypy
	yamllint --strict $(wildcard $(yaml))
	ansible-lint --offline --profile production

.PHONY: format
format: setup ## Format the Python code and fix what ruff can fix
	ruff check --fix $(wildcard $(python))
	ruff format $(wildcard $(python))

.PHONY: docs
docs: setup ## Write docs/variables.md from the argument specs and docs/verdicts.md from the table of codes
	scripts/variables_doc.py > docs/variables.md
	scripts/verdicts_doc.py > docs/verdicts.md

.PHONY: lock
lock: setup ## Resolve requirements/*.in again (new versions come in here and nowhere else)
	for name in bootstrap controller dev; do uv pip compile --quiet --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --upgrade requirements/$$name.in -o requirements/$$name.lock; done

.PHONY: clean
clean: ## Remove test nodes, images, caches and the environment (wheel downloads are kept; see ~/.cache/bedplate)
	-scripts/clean.sh
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
