# Short names for the commands of this repository. `make test` is tests/run.py and nothing more.

ENVIRONMENT := .venv-test
UV ?= uv

.PHONY: help test machine executors history latency ingest lock format clean

help: ## Show these targets
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(MAKEFILE_LIST)

test: ## Run every check and every test
	python3 tests/run.py

machine: ## Let Hypothesis drive the database for many more examples than `test` has time for
	WEBHOOKD_TEST_EXAMPLES=1000 $(ENVIRONMENT)/bin/pytest -q tests/schema -k any_order

executors: ## Let twenty executors, some of which die, share 10,000 jobs
	WEBHOOKD_TEST_JOBS=10000 $(ENVIRONMENT)/bin/pytest -q tests/schema/test_substrate_executors.py

history: ## Count what the substrate's functions touch beside a million finished jobs and 100,000 that wait
	WEBHOOKD_TEST_HISTORY=1000000 $(ENVIRONMENT)/bin/pytest -q tests/schema/test_substrate_plans.py

latency: ## Measure the time from publish to arrival at an idle daemon
	$(ENVIRONMENT)/bin/python -m tests.bench.latency

ingest: ## Measure single events from 1 to 500 clients at once, and without the database
	$(ENVIRONMENT)/bin/python -m tests.bench.ingest

# Environment variables and settings files may name an index or a folder of wheels; the lock must
# hold for everyone, so it is made without them, and says only versions and hashes.
COMPILE = env -u UV_FIND_LINKS -u PIP_FIND_LINKS $(UV) pip compile --no-config --universal --python-version 3.11 \
	--generate-hashes --upgrade --no-emit-index-url --no-emit-find-links --no-annotate \
	--custom-compile-command "make lock" --quiet

lock: ## Make tests/requirements.lock anew from pyproject.toml, and of it what deploy/ installs (needs uv)
	$(COMPILE) pyproject.toml --all-extras --output-file tests/requirements.lock
	$(COMPILE) pyproject.toml --constraint tests/requirements.lock --output-file deploy/requirements.lock
	echo hatchling | $(COMPILE) - --constraint tests/requirements.lock --output-file deploy/build.lock

format: ## Format the code, and repair what ruff can
	$(ENVIRONMENT)/bin/ruff format .
	$(ENVIRONMENT)/bin/ruff check --fix .

clean: ## Remove what the tools left behind
	rm -rf $(ENVIRONMENT) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
