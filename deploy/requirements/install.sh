#!/bin/sh
# Installs the lock beside this file with a Python's pip:
#
#   deploy/requirements/install.sh PYTHON
#
# torch's CPU build is in PyTorch's own index. That one is tried where pip finds the build nowhere
# else, and for torch alone.
set -eu

python=$1
lock=$(dirname "$0")/cpu.txt
torch=$(grep '^torch==' "$lock")
index=https://download.pytorch.org/whl/cpu

install() {
  "$python" -m pip install --no-deps --progress-bar off "$@"
}

if ! install "$torch" 2> /dev/null; then
  echo "note: pip did not find $torch; trying PyTorch's own index: pip install --extra-index-url $index $torch"
  install --extra-index-url "$index" "$torch" || {
    echo "ERROR: $torch is needed from $index, or from an index that PIP_EXTRA_INDEX_URL names" >&2
    exit 1
  }
fi
install -r "$lock"
