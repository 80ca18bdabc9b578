# Short names for the commands of this repository. `make test` is the gate, tests/run.py.

ENVIRONMENT := .venv-test
UV ?= uv

.PHONY: help test nightly machine executors history faults bench bench-quick ingest instructions pages docs screenshots lock format clean

help: ## Show these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST)

test: ## Run the gate: static checks, and every test that is not nightly
	python3 tests/run.py

nightly: ## Run every test on the oldest and the newest PostgreSQL, and the long searches below
	python3 tests/run.py --nightly
	$(MAKE) machine executors history

machine: ## Run the state machines of Hypothesis with 1,000 examples
	WEBHOOKD_TEST_EXAMPLES=1000 $(ENVIRONMENT)/bin/pytest -q tests/schema -k "machine and not mistake"

executors: ## Run 10,000 jobs with twenty executors, some of which die
	WEBHOOKD_TEST_JOBS=10000 $(ENVIRONMENT)/bin/pytest -q tests/schema/test_job_queue_executors.py

history: ## Check the plans of the job queue beside a million finished and 100,000 waiting jobs
	WEBHOOKD_TEST_HISTORY=1000000 $(ENVIRONMENT)/bin/pytest -q tests/schema/test_job_queue_plans.py

faults: ## Run every fault scenario under load, then a random mix: 30 minutes (FAULTS="--seed 7 --only kill")
	$(ENVIRONMENT)/bin/python -m tests.faults $(FAULTS)

# The peers that webhookd is compared with have their own environment, so that no test can depend on them. It includes
# Node, because graphile-worker needs a newer version than many systems have; without npm, graphile-worker is left out.
BENCH_ENVIRONMENT := .venv-bench
BENCH_STAMP := $(BENCH_ENVIRONMENT)/installed.stamp
GRAPHILE := tests/bench/graphile

$(BENCH_STAMP): tests/bench/requirements.lock $(GRAPHILE)/package-lock.json
	rm -rf $(BENCH_ENVIRONMENT)
	python3 -m venv $(BENCH_ENVIRONMENT)
	$(BENCH_ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	$(BENCH_ENVIRONMENT)/bin/python -m pip check
	$(BENCH_ENVIRONMENT)/bin/python -m tests.bench.node
	touch $@

bench: $(BENCH_STAMP) ## Benchmark webhookd against its peers and goals, five rounds: 45 minutes (BENCH="--only idle --postgres 15")
	$(BENCH_ENVIRONMENT)/bin/python -m tests.bench $(BENCH)

bench-quick: $(BENCH_STAMP) ## Run the same benchmarks with small numbers: 3 minutes
	$(BENCH_ENVIRONMENT)/bin/python -m tests.bench --quick $(BENCH)

ingest: ## Measure single events from 1 to 500 concurrent clients, also while the database is down
	$(ENVIRONMENT)/bin/python -m tests.bench.ingest

instructions: ## Count PostgreSQL's instructions, WAL and buffers per delivery in each stage (INSTRUCTIONS="--batch 1")
	$(ENVIRONMENT)/bin/python -m tests.bench.instructions $(INSTRUCTIONS)

pages: ## Measure every page of the console with 11 million deliveries: 30 minutes (PAGES="--history 1000000")
	$(ENVIRONMENT)/bin/python -m tests.bench.pages $(PAGES)

docs: ## Write docs/settings.md and docs/cli.md from the code
	$(ENVIRONMENT)/bin/python -m tests.support.reference

screenshots: ## Make the pictures of docs/images/console/ with the demo data (needs Chromium; PAGES="/endpoints")
	$(ENVIRONMENT)/bin/python -m tests.browser.screenshots $(PAGES)

# Environment variables and configuration files may name a package index or a folder of wheels. The lock must work
# everywhere, so it is made without them and contains only versions and hashes.
COMPILE = env -u UV_FIND_LINKS -u PIP_FIND_LINKS $(UV) pip compile --no-config --universal --python-version 3.11 \
	--generate-hashes --upgrade --no-emit-index-url --no-emit-find-links --no-annotate \
	--custom-compile-command "make lock" --quiet

lock: ## Update tests/requirements.lock from pyproject.toml, and the locks of deploy/ and `bench` (needs uv)
	$(COMPILE) pyproject.toml --all-extras --output-file tests/requirements.lock
	$(COMPILE) pyproject.toml --constraint tests/requirements.lock --output-file deploy/requirements.lock
	echo hatchling | $(COMPILE) - --constraint tests/requirements.lock --output-file deploy/build.lock
	$(COMPILE) pyproject.toml tests/bench/requirements.in --constraint tests/requirements.lock \
		--output-file tests/bench/requirements.lock

format: ## Format the code, and apply the fixes of ruff
	$(ENVIRONMENT)/bin/ruff format .
	$(ENVIRONMENT)/bin/ruff check --fix .

clean: ## Remove environments, caches and results
	rm -rf $(ENVIRONMENT) $(BENCH_ENVIRONMENT) $(GRAPHILE)/node_modules bench-results faults-results .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
