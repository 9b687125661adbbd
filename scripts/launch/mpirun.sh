#!/usr/bin/env bash
# Trains with Open MPI's mpirun: docs/hosts.md. Everything before `--` goes to mpirun, everything after
# it to `grpo-jax train`. From the checkout, which all hosts have at the same path:
#
#   scripts/launch/mpirun.sh --host node1,node2 -- math_1b --workdir=/shared/runs/first
#   scripts/launch/mpirun.sh --host node1:8,node2:8 -- …            one process a GPU
#   scripts/launch/mpirun.sh --dry-run --host node1,node2 -- …      prints what it would run
#
# SIGTERM and Ctrl-C save a checkpoint and end the run. They must reach this script and not mpirun,
# which would kill all processes 2 x LEAVE_S later.
#
# Environment variables:
#   VENV      folder of the virtual environment, on all hosts; .venv of the checkout
#   LEAVE_S   mpirun kills the other processes 2 x this many seconds after one has failed; 5
set -euo pipefail
cd "$(dirname "$0")/../.."
die() { echo "mpirun.sh: $*" >&2; exit 2; }

dry_run=
case ${1:-} in
  --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit ;;
  --dry-run) dry_run=yes; shift ;;
esac
of_mpirun=()
while (($#)) && [ "$1" != -- ]; do
  of_mpirun+=("$1")
  shift
done
(($#)) || die "no --: mpirun's options come before it, those of \`grpo-jax train\` after it"
shift
venv=${VENV:-$PWD/.venv}
[ -x "$venv/bin/grpo-jax" ] || die "there is no $venv/bin/grpo-jax; VENV names the environment"

# The processes know each other by this secret: a new one at each start, and not among the arguments.
GRPO_JAX_RUN_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export GRPO_JAX_RUN_SECRET
command=(mpirun --bind-to none --mca odls_base_sigkill_timeout "${LEAVE_S:-5}" -x GRPO_JAX_RUN_SECRET
  "${of_mpirun[@]}" "$venv/bin/grpo-jax" train "$@")
if [ -n "$dry_run" ]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi

# A session of its own: Ctrl-C in the terminal does not reach mpirun.
setsid "${command[@]}" &
mpirun=$!
# shellcheck disable=SC2317  # called by the trap.
stop() { pkill -TERM -P "$mpirun" -f grpo-jax || kill -TERM "$mpirun"; }
trap stop TERM INT
code=0
wait "$mpirun" || code=$?
while kill -0 "$mpirun" 2>/dev/null; do  # a signal has ended the first `wait`.
  code=0
  wait "$mpirun" || code=$?
done
exit "$code"
