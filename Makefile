# Short names for the commands of this repository. `make test` is tests/run.py and nothing more.

ENVIRONMENT := .venv-test
UV ?= uv

.PHONY: help test machine executors history faults bench bench-quick ingest docs lock format clean

help: ## Show these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST)

test: ## Run every check and every test
	python3 tests/run.py

machine: ## Let Hypothesis drive the database for many more examples than `test` has time for
	WEBHOOKD_TEST_EXAMPLES=1000 $(ENVIRONMENT)/bin/pytest -q tests/schema -k any_order

executors: ## Let twenty executors, some of which die, share 10,000 jobs
	WEBHOOKD_TEST_JOBS=10000 $(ENVIRONMENT)/bin/pytest -q tests/schema/test_substrate_executors.py

history: ## Count what the substrate's functions touch beside a million finished jobs and 100,000 that wait
	WEBHOOKD_TEST_HISTORY=1000000 $(ENVIRONMENT)/bin/pytest -q tests/schema/test_substrate_plans.py

faults: ## Break everything under load, every scenario once and a random mix: 25 minutes (FAULTS="--seed 7 --only kill")
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

bench: $(BENCH_STAMP) ## Benchmark webhookd against its peers and goals, five rounds: 45 minutes (BENCH="--only idle")
	$(BENCH_ENVIRONMENT)/bin/python -m tests.bench $(BENCH)

bench-quick: $(BENCH_STAMP) ## Run the same benchmarks with small numbers: 3 minutes
	$(BENCH_ENVIRONMENT)/bin/python -m tests.bench --quick $(BENCH)

ingest: ## Measure single events from 1 to 500 concurrent clients, also while the database is down
	$(ENVIRONMENT)/bin/python -m tests.bench.ingest

docs: ## Write docs/settings.md and docs/cli.md from the code
	$(ENVIRONMENT)/bin/python -m tests.support.reference

# Environment variables and settings files may name an index or a folder of wheels; the lock must
# hold for everyone, so it is made without them, and says only versions and hashes.
COMPILE = env -u UV_FIND_LINKS -u PIP_FIND_LINKS $(UV) pip compile --no-config --universal --python-version 3.11 \
	--generate-hashes --upgrade --no-emit-index-url --no-emit-find-links --no-annotate \
	--custom-compile-command "make lock" --quiet

lock: ## Make tests/requirements.lock anew from pyproject.toml, and of it what deploy/ and `bench` install (needs uv)
	$(COMPILE) pyproject.toml --all-extras --output-file tests/requirements.lock
	$(COMPILE) pyproject.toml --constraint tests/requirements.lock --output-file deploy/requirements.lock
	echo hatchling | $(COMPILE) - --constraint tests/requirements.lock --output-file deploy/build.lock
	$(COMPILE) pyproject.toml tests/bench/requirements.in --constraint tests/requirements.lock \
		--output-file tests/bench/requirements.lock

format: ## Format the code, and repair what ruff can
	$(ENVIRONMENT)/bin/ruff format .
	$(ENVIRONMENT)/bin/ruff check --fix .

clean: ## Remove what the tools left behind
	rm -rf $(ENVIRONMENT) $(BENCH_ENVIRONMENT) $(GRAPHILE)/node_modules bench-results faults-results .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
