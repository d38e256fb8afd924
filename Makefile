# make run and make test work from a fresh clone: they create .venv when needed and activate nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Its tools have many requirements of their own, which must not meet those of the project.
AUDIT := .venv-audit
ARGS ?=
# make run TORCH_INDEX=https://download.pytorch.org/whl/cpu fetches torch's CPU build: 200 MB instead of gigabytes.
TORCH_INDEX ?=
PIP_TORCH := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# Images of containers often set it: every process of the tests, and of a run, would compile its sources again.
unexport PYTHONDONTWRITEBYTECODE
# Tests run side by side, each file in one process: four on two cores, because they also wait.
# Folders in their order: unit tests, whose files are short, are what is left when the last long file ends.
JOBS ?= 4

.DEFAULT_GOAL := help
.PHONY: help run check unit test test-long lint types coverage mutants compat docs pictures recording observe bench soak soak-batch batch-demo image kubernetes-demo slurm-demo soak-kubernetes metaflow-releases audit clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 8

run: $(VENV)/run.stamp  ## train the laptop job: preflight, plan, two nodes, commits, report (ARGS="--set training.max_steps=100")
	$(BIN)/python ebbflow/flows/train_flow.py run $(ARGS)

check: lint  ## what to run before each commit: style, types and the unit tests that are not slow
	$(MAKE) --no-print-directory --jobs 2 --output-sync types unit

unit: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not slow and not long" tests/unit $(ARGS)

# Tests of real processes keep deadlines, which a busy machine can miss. Like CPython's suite, tests that failed beside
# others run once more, alone; one that fails twice fails the run. Both tries are printed: look at what passed only then.
test: $(VENV)/dev.stamp  ## run the tests of CI (ARGS="-k config", JOBS=0: one after another)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=30 $(ARGS) || { \
		[ $$? -eq 1 ] && echo "make test: the tests that failed run once more, alone" && \
		$(BIN)/python -m pytest -x -n 0 --last-failed --last-failed-no-failures none $(ARGS); }

test-long: $(VENV)/dev.stamp  ## run the tests that `make test` leaves out: variants of its tests, and tests of the bench
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=30 -m long $(ARGS)

lint: $(VENV)/dev.stamp  ## check style and format of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp  ## check types with pyright
	$(BIN)/pyright

coverage: export COVERAGE_FILE = $(CURDIR)/.coverage/data
coverage: $(VENV)/dev.stamp  ## run all tests and say which share of the product's lines they run, in every process
	rm -rf .coverage && mkdir .coverage
	$(BIN)/python -m coverage run -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

mutants: $(VENV)/dev.stamp  ## change lines of decisive code and say which changes no test notices (ARGS="--seed 3 --count 200")
	$(BIN)/python -m tests.mutants $(ARGS)

compat: $(VENV)/dev.stamp  ## a short job on the oldest, the tested and the newest torch that can be had
	$(BIN)/python -m tests.compat $(ARGS)

docs: $(VENV)/dev.stamp  ## build the documentation site in docs/_build; a warning, such as a broken link, fails
	$(BIN)/sphinx-build -q -n -W --keep-going docs docs/_build

pictures: $(VENV)/dev.stamp  ## take the pictures of the pages again, from real runs (needs chromium)
	$(BIN)/python docs/pictures.py

recording: $(VENV)/dev.stamp  ## record a rehearsal on a terminal: the animation of README.md, and a page of screens
	$(BIN)/python docs/record.py $(ARGS)

observe: $(VENV)/run.stamp  ## Prometheus with the alert rules for the jobs of this machine (ARGS="--port 9095")
	$(BIN)/ebbflow observe $(ARGS)

bench: $(VENV)/dev.stamp  ## measure what docs/benchmarks.md reports
	$(BIN)/ebbflow bench $(ARGS)

soak: $(VENV)/dev.stamp  ## a job under random kills ends like an uninterrupted one (ARGS="--kills 40 --seed 7")
	$(BIN)/ebbflow soak $(ARGS)

image:  ## build the image with Docker's buildx, without pushing it
	PUSH=no bash ebbflow/infra/docker/build.sh $(or $(IMAGE),ebbflow:local)

soak-kubernetes: $(VENV)/dev.stamp  ## long proofs on a local Kubernetes cluster: eviction, loss, no capacity, no API server, a killed launcher
	$(BIN)/python -m pytest -s tests/soak/soak_kubernetes.py $(ARGS)

soak-batch: $(VENV)/dev.stamp  ## long proofs in a local AWS Batch: interruptions, Spot by a trace (SPOT_TRACE=zone.json), gangs, the head job, a launcher that is killed
	$(BIN)/python -m pytest -s tests/soak/soak_batch_gang.py tests/soak/soak_batch_trace.py tests/soak/soak_supervise.py tests/soak/soak_head_job.py tests/soak/soak_batch_launcher.py tests/soak/soak_metadata_service.py tests/soak/soak_batch_metaflow.py $(ARGS)

metaflow-releases: $(VENV)/dev.stamp  ## the flow here and in a local AWS Batch on several releases of Metaflow
	$(BIN)/python -m tests.releases $(ARGS)

kubernetes-demo: $(VENV)/dev.stamp  ## a run of two Spot nodes on a local Kubernetes cluster, one node lost on the way
	$(BIN)/python -m tests.support.kubernetes.demo $(ARGS)

slurm-demo: $(VENV)/dev.stamp  ## a run of two nodes on a real Slurm cluster of this machine, preempted on the way (needs Debian's packages, and root)
	$(BIN)/python -m tests.support.slurm_demo

batch-demo: $(VENV)/dev.stamp  ## a run on a local AWS Batch, its Spot machine taken away on the way (ARGS="--with cloud")
	$(BIN)/python -m tests.support.batch.demo $(ARGS)

audit: $(AUDIT)/audit.stamp $(VENV)/run.stamp  ## compare packages with published advisories, and the AWS template and manifests with checkov's rules
	$(AUDIT)/bin/checkov --directory ebbflow/infra --framework cloudformation kubernetes --compact --quiet
	$(AUDIT)/bin/checkov --file ebbflow/infra/docker/Dockerfile --framework dockerfile --skip-check CKV_DOCKER_2,CKV_DOCKER_7 --compact --quiet
	$(AUDIT)/bin/pip-audit --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

clean:  ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) $(AUDIT) docs/_build build .pytest_cache .ruff_cache .hypothesis .coverage

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# The command `ebbflow`, and `python -m infra`, `cost` and `training` from any directory. "compat" writes this folder's
# path into the environment, which type checkers and editors follow; an import hook would be invisible to them.
$(VENV)/project.stamp: $(VENV)/bin/python setup.cfg pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --config-settings editable_mode=compat -e .
	@touch $@

$(VENV)/run.stamp: $(VENV)/bin/python requirements.txt | $(VENV)/project.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_TORCH) -r requirements.txt
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(AUDIT)/audit.stamp:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check checkov~=3.3 pip-audit~=2.10
	@touch $@
