#!/usr/bin/env bash
# Makes a Python environment for SGLang servers, separate from the trainer's because SGLang pins
# torch and transformers. constraints/sglang_{cpu,cuda}.txt list its packages.
#
#   scripts/install_sglang.sh cpu|cuda [DIR]     DIR: .venv-sglang, where the trainer looks for it
#
# The wheel holds this script and the lists, too: `grpo-jax doctor` prints the command.
#
#   cpu    a minute or two, 1.4 GB. The package index only has the CUDA build of torch for Linux,
#          4 GB more, which also serves on a CPU. For the build without CUDA set
#          PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
#   cuda   SGLang as its authors release it, about 10 GB.
#
# PYTHON chooses the interpreter (3.11 or 3.12). Returns at once if the environment is up to date.
set -euo pipefail
[ "${1:-}" != --help ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit; }
die() { echo "install_sglang: $*" >&2; exit 1; }

device=${1:-}
folder=${2:-.venv-sglang}
python=${PYTHON:-python3}
case $device in cpu | cuda) ;; *) die "for which device? usage: $0 cpu|cuda [DIR]" ;; esac
list=$(cd "$(dirname "$0")/.." && pwd)/constraints/sglang_$device.txt

ready() {
  local server
  server=$(dirname "$0")/serve_sglang.py
  echo "SGLang for $device is in $folder. Next:"
  echo "  grpo-jax train quickstart --config.engine.name=sglang" \
    "--config.engine.sglang.python=$folder/bin/python"
  [ ! -e "$server" ] || echo "or a server by hand:
  python $server MODEL_FOLDER --device $device --python $folder/bin/python"
}

if cmp -s "$list" "$folder/installed" && "$folder/bin/python" -c '' 2>/dev/null; then
  ready
  exit
fi
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null ||
  die "needs Python 3.11 or 3.12, and $python is not one; name one with PYTHON=..."
if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ]; then
  die "$folder is there and is no Python environment: remove it, or name another folder"
fi
rm -rf "$folder"
trap 'rm -rf "$folder"; echo "install_sglang: failed, see the message above; $folder is removed" >&2' ERR

size=1.4
[ "$device" = cpu ] || size=10
echo "Installing SGLang for $device into $folder: $size GB, minutes, once."
"$python" -m venv "$folder"
install=("$folder/bin/python" -m pip install --disable-pip-version-check --no-compile --only-binary :all:)
if [ "$device" = cpu ]; then
  # torch with the dependencies of its build: none, or the CUDA libraries. The rest without.
  "${install[@]}" --constraint "$list" torch
  "${install[@]}" --no-deps --requirement "$list"
else
  "${install[@]}" --constraint "$list" sglang
fi
cp "$list" "$folder/installed"
trap - ERR
ready
