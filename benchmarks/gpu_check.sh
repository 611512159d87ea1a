#!/bin/sh
# Checks a GPU: numerics of the kernels, then speed, in under 8 minutes. Downloads nothing.
#
#   benchmarks/gpu_check.sh --device cuda                       compile and run here
#   benchmarks/gpu_check.sh --device cuda:sm_90 --prepare DIR   compile, for another machine
#   benchmarks/gpu_check.sh --device cuda --prepared DIR        run there; no compiler is needed
#   benchmarks/gpu_check.sh --wheels DIR …                      install everycast from wheels first
#
# All options: --help. PYTHON names the Python to run with (python3).
set -eu
python=${PYTHON:-python3}
if [ "${1-}" = --wheels ]; then
    folder=$(mktemp -d)
    "$python" -m venv --system-site-packages "$folder" # torch and vLLM stay visible
    "$folder/bin/python" -m pip install --quiet --no-index --find-links "$2" everycast
    python=$folder/bin/python
    shift 2
fi
exec "$python" -P -m everycast.benchmarks.gpu_check "$@"
