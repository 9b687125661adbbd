#!/usr/bin/env bash
# Prepares a TPU VM and trains on it: docs/tpu_vm.md. Run it on the VM, in the checkout. Slices of
# several hosts: docs/hosts.md.
#
#   scripts/start_tpu_vm.sh                         prepares, checks, trains the quickstart
#   scripts/start_tpu_vm.sh math_1b --workdir=…     the same for these arguments of `grpo-jax train`
#   scripts/start_tpu_vm.sh --prepare               prepares and checks
#
# A Python of version 3.11, 3.12 or 3.13 is used if there is one (PYTHON names it); otherwise 3.12 is
# installed with uv, for this user. It can be run again: what is there is kept.
set -euo pipefail
[ "${1:-}" != --help ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit; }
cd "$(dirname "$0")/.."
die() { echo "start_tpu_vm: $*" >&2; exit 1; }
works() { "$1" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

# Each VM of a slice knows the addresses of all; GKE gives them as an environment variable.
metadata=http://metadata.google.internal/computeMetadata/v1/instance/attributes
hosts=${TPU_WORKER_HOSTNAMES:-$(curl -sf --max-time 3 -H "Metadata-Flavor: Google" \
  "$metadata/worker-network-endpoints" || true)}
if [[ $hosts == *,* && ${1:-} != --prepare && " $*" != *" --workdir="* ]]; then
  die "this slice has several hosts ($hosts): run the same command on all of them, with --workdir=FOLDER" \
    "on storage that they share; scripts/launch/tpu_pod.sh does so"
fi

if [ ! -x .venv/bin/grpo-jax ]; then
  found=
  for python in "${PYTHON:-}" python3.12 python3.13 python3.11 python3; do
    if [ -n "$python" ] && works "$python"; then
      found=$python
      break
    fi
  done
  rm -rf .venv
  if [ -n "$found" ]; then
    "$found" -m venv .venv
  else
    echo "No Python 3.11 to 3.13 here: installing 3.12 with uv."
    python3 -m pip install --user --quiet uv
    python3 -m uv venv --quiet --seed --python 3.12 .venv
  fi
  minor=$(.venv/bin/python -c 'import sys; print(sys.version_info[1])')
  echo "Installing JAX for TPUs and grpo_jax into .venv: a few minutes, once."
  .venv/bin/pip install --quiet --disable-pip-version-check -c "constraints/py3$minor.txt" -e ".[tpu]"
fi

# Only programs that a model writes need it: a VM without it trains on everything else.
if ! command -v bwrap >/dev/null; then
  sudo apt-get install -y -q bubblewrap || echo "bubblewrap cannot be installed: no code environment"
fi

export PATH="$PWD/.venv/bin:$PATH"
# One host of several cannot start its chips without the others.
[[ $hosts == *,* ]] || grpo-jax doctor || die "this machine cannot train, see above"
[ "${1:-}" != --prepare ] || exit 0
[ $# -gt 0 ] || set -- quickstart --workdir=runs/quickstart
exec grpo-jax train "$@"
