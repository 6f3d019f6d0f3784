# Every target sets up what it needs and repeats nothing that is done.
#   make train ARGS="run.dir=runs/mine train.steps=50"    make train CONFIG=configs/smollm2_cpu.yaml
#   make test ARGS="-k sync"                              make test ARGS="-m 'not engine'"
CONFIG ?= configs/tiny_cpu.yaml
ARGS ?=
MAKEFLAGS += --no-print-directory

.PHONY: env train test reset smollm2 chaos clean ready

env:  # the last line of output is the path of the environment's python
	@.ci/env.sh

train: ready
	@.venv/bin/python train.py $(CONFIG) $(ARGS)

test: ready
	@.venv/bin/pytest $(ARGS)

# Distils a run's rollouts into a clean base, unless that is done, and starts (or resumes) RL from it in RUN-reset:
#   make reset RUN=runs/mine DISTILL="--examples 2000" ARGS="train.lr=1e-4"
reset: run = $(RUN:/=)
reset: ready
	@$(if $(run),,$(error name the run: make reset RUN=runs/tiny))
	@if test -e "$(run)-reset/student"; then echo "reset: $(run)-reset/student is there; remove it to distil again"; \
		else .venv/bin/python distill.py "$(run)" --out "$(run)-reset/student" $(DISTILL); fi
	@.venv/bin/python train.py "$(run)/config.yaml" "model.path=$(run)-reset/student" "run.dir=$(run)-reset" \
		run.name=$(notdir $(run))-reset $(ARGS)

smollm2: ready  # fetches SmolLM2-135M and converts it
	@.venv/bin/python smollm2.py $(ARGS)

chaos: ready  # benchmarks/chaos.py; make chaos ARGS=--quick
	@.venv/bin/python benchmarks/chaos.py $(ARGS)

bench-%: ready  # make bench-attention runs benchmarks/attention.py
	@.venv/bin/python benchmarks/$*.py $(ARGS)

clean:  # leaves models/ and runs/, and the environment that clones share
	@rm -rf .venv .pytest_cache .hypothesis __pycache__ */__pycache__

ready:
	@.ci/env.sh >/dev/null
