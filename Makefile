# Each target does its own set-up, from a fresh clone on a machine with python3, git and make.

# A file's tests run in one worker, those of the longest files first (tests/conftest.py). Three workers on two cores: the
# tests that start hosts or jobs spend a good part of their time waiting.
# Hundreds of Python processes start, and each would compile kit anew where none may write what it has compiled.
PYTEST = env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest --dist loadfile --no-loadscope-reorder --durations=10

.PHONY: help up test quick fuzz check bench docs pictures releases releases-venvs

help:
	@echo "make up     run the training module on two nodes on this machine, start to end"
	@echo "make test   lint, types and all tests (root: they start hosts in network namespaces)"
	@echo "make quick  the same without the tests that start hosts or jobs: the loop while you work"
	@echo "make fuzz   the tests that draw their examples (simulated clusters, hostfiles, damaged snapshots), with new ones"
	@echo "make bench  time kit against torchrun, DeepSpeed, torchrunx, ft_launcher and rsync (root; about an hour)"
	@echo "make check  ruff and mypy alone"
	@echo "make releases-venvs  install torch releases one after the other, and run the agent's tests with each"
	@echo "make releases  try the mends of torch's rendezvous against every line of torch releases"
	@echo "make docs   the documentation as a site, in site/"
	@echo "make pictures  its pictures, from a real run on three lab hosts (root)"

up:
	@.ci/setup
	@.venv/bin/kit up inventory/local.yaml

test: check
	@.ci/setup test
	@$(PYTEST) -n 3
	@echo "once more, with a newer torch: what is different with it"
	@$(subst .venv/,.venv/torch-2.14/,$(PYTEST)) --dist load -n 3 -m newer_torch tests/deploy/agent

quick: check
	@$(PYTEST) -n 3 -m "not lab and not slow"

fuzz:
	@.ci/setup dev
	@$(PYTEST) -n 3 -m hypothesis --hypothesis-profile fuzz

check:
	@.ci/setup dev
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/vermin --quiet --no-tips --target=3.8- --violations deploy/host
	@.venv/bin/lint-imports --no-logo

bench:
	@.ci/setup dev
	@bench/launch --install-peers
	@bench/check
	@bench/sync
	@bench/recovery --install-peers --cap 45
	@bench/snapshot
	@bench/slurm
	@bench/methods
	@bench/slow_network
	@bench/plan
	@bench/overhead
	@bench/throughput
	@bench/groups

docs:
	@.ci/setup dev
	@.venv/bin/mkdocs build --strict --clean --quiet
	@echo "the documentation: $(CURDIR)/site/index.html (with search: python3 -m http.server -d site)"

pictures:
	@.ci/setup dev
	@.venv/bin/python docs/pictures.py

releases:
	@.ci/setup dev
	@.venv/bin/python tests/releases.py

releases-venvs:
	@.ci/setup dev
	@.venv/bin/python tests/releases.py --venvs $(RELEASES)
