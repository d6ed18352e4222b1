#!/usr/bin/env bash
# Makes the virtual environment of the CPU install: scripts/install.sh [FOLDER, default .venv]
# PYTHON=/path/to/python3 chooses the interpreter (3.11 or newer); an environment that exists is brought up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${1:-.venv}"
is_new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() {
    echo "install: $1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if command -v "$candidate" >/dev/null && "$candidate" -c "$is_new_enough"; then
            command -v "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer, found ${PYTHON:+$PYTHON: }$(${PYTHON:-python3} --version 2>&1 || true)
  hint: install python3.11, or name one: PYTHON=/path/to/python3.11 make"
}

install() { # one pip call; quiet unless it fails
    echo "install: pip install $*"
    "$venv/bin/python" -m pip install -qq --progress-bar off "$@" || fail "pip failed (its message is above)
  hint: behind a proxy or with an index of your own, set PIP_INDEX_URL; then run the same command again"
}

if [ ! -x "$venv/bin/python" ]; then
    python="$(find_python)"
    echo "install: $venv from $python ($("$python" --version))"
    "$python" -m venv "$venv" || fail "cannot make a virtual environment
  hint: on Debian and Ubuntu, apt-get install python3-venv"
fi
"$venv/bin/python" -c "$is_new_enough" || fail "$venv holds $("$venv/bin/python" --version); Python 3.11 or newer is needed
  hint: remove $venv and run again"

install -r requirements/cpu.txt
install --no-deps -r requirements/cpu-nodeps.txt
install --no-deps --no-build-isolation -e .
"$venv/bin/python" -W ignore scripts/check_install.py
