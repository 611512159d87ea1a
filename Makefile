# make demo [PROMPT="..."]   chat with the default model (or one answer)
# make test                  style, types, import contracts and the default tests
# make lint                  the first three of these
# make clean                 remove .venv and caches (models stay in the user's cache)

MODEL ?= smollm2-135m
# Taken as it is typed: a dollar sign in a question is no variable of make.
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: demo test lint clean

demo:
	@scripts/setup
	@if [ -n "$$PROMPT" ] || ! [ -t 0 ] || ! [ -t 1 ]; then \
		exec .venv/bin/everycast chat $(MODEL) --temperature 0 --max-tokens 300 \
			--prompt "$${PROMPT:-What is the capital of France?}"; \
	else \
		exec .venv/bin/everycast chat $(MODEL); \
	fi

test:
	@scripts/setup test
	@scripts/check

lint:
	@scripts/setup test
	@scripts/lint

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
