#!/bin/sh
# Installs cpu.txt with the pip of PYTHON:
#
#   deploy/requirements/install.sh PYTHON
#
# torch's CPU build is in PyTorch's own index. If pip finds the build nowhere else, this script uses
# that index, for torch only.
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
