# make demo [PROMPT="..."]   chat with the default model (or one answer)
# make test                  style, types, import contracts and the default tests
# make test-web              the browser page, in Chromium: needs Node.js, Chromium, Emscripten
# make wheel                 build/wheel/everycast-*.whl, with the browser page in it
# make lint                  the first three of these
# make clean                 remove .venv and caches (models stay in the user's cache)

MODEL ?= smollm2-135m
# Taken as it is typed: a dollar sign in a question is no variable of make.
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: demo test test-web wheel lint clean

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

test-web:
	@scripts/setup test
	@scripts/test_web

wheel:
	@scripts/setup
	npm ci --prefix web --omit=dev --ignore-scripts --no-audit --no-fund
	npm run build --prefix web
	.venv/bin/python -m pip wheel --no-deps --wheel-dir build/wheel .

lint:
	@scripts/setup test
	@scripts/lint

clean:
	rm -rf .venv build web/dist web/dist-mock web/node_modules *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
