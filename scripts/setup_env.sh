# Sourced by test.sh, quickstart.sh and .ci/run:  source scripts/setup_env.sh base|test
# Makes .venv if it is missing, installs the package when setup.py or the Python changed, and puts .venv/bin first on PATH.
# PYTHON=/path/to/python chooses the interpreter of a new .venv.

setup_env_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# A usable interpreter: 3.10 to 3.12, 64 bit, able to make an environment (Debian splits ensurepip off).
_setup_env_usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 12) and sys.maxsize > 2**32))' \
        </dev/null >/dev/null 2>&1
}

_setup_env_find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        _setup_env_usable "$PYTHON" && echo "$PYTHON" && return
        echo "error: PYTHON=$PYTHON is not a Python 3.10, 3.11 or 3.12 with the venv and ensurepip modules." >&2
        return 1
    fi
    for candidate in python3.11 python3.12 python3.10 python3 python; do
        _setup_env_usable "$candidate" && echo "$candidate" && return
    done
    echo "error: no Python 3.10, 3.11 or 3.12 with the venv and ensurepip modules was found." \
        "Install one (Debian: python3-venv) or name it: PYTHON=/path/to/python3.11." >&2
    return 1
}

# The extra "test" holds everything that "base" does: either stamp satisfies base, only its own satisfies test.
_setup_env_installed() {
    [ -e ".venv/.installed-test-$2" ] || [ -e ".venv/.installed-$1-$2" ]
}

setup_env() {
    local kind=$1 python hash target=.
    cd "$setup_env_root" || return 1
    if ! [ -x .venv/bin/python ]; then
        python=$(_setup_env_find_python) || return 1
        echo "making .venv with $("$python" -V)" >&2
        "$python" -m venv --clear .venv || return 1
    fi
    if ! _setup_env_usable .venv/bin/python; then
        echo "error: .venv holds no working Python 3.10, 3.11 or 3.12. Remove the folder and start again." >&2
        return 1
    fi
    # The folder is part of the hash: an editable install of a copied .venv would point at the original.
    hash=$( (cat setup.py; pwd; .venv/bin/python -V) | sha256sum | cut -c1-16) || return 1
    if ! _setup_env_installed "$kind" "$hash"; then
        [ "$kind" = test ] && target='.[test]'
        echo "installing $target into .venv (about 2.5 GB on disk with MindSpore, a minute or more)" >&2
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -e "$target" </dev/null || return 1
        rm -f .venv/.installed-*
        : >".venv/.installed-$kind-$hash"
    fi
    export VIRTUAL_ENV="$setup_env_root/.venv" PATH="$setup_env_root/.venv/bin:$PATH"
}

case "${1:-}" in
    base | test) setup_env "$1" ;;
    *) echo "error: source setup_env.sh base|test" >&2; false ;;
esac
