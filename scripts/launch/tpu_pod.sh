#!/usr/bin/env bash
# Trains on all hosts of a TPU pod slice, from your own machine, with gcloud: docs/hosts.md.
#
#   export TPU=grpo ZONE=us-west4-a [PROJECT=my-project]
#   scripts/launch/tpu_pod.sh create v5litepod-16 v2-alpha-tpuv5-lite     [--spot …: options of gcloud]
#   scripts/launch/tpu_pod.sh install                copies the last commit to all hosts and installs it
#   scripts/launch/tpu_pod.sh mount 10.0.0.2:/share  mounts NFS (Filestore) on /shared of all hosts
#   scripts/launch/tpu_pod.sh mount gs://BUCKET      mounts a bucket; it needs a hierarchical namespace
#   scripts/launch/tpu_pod.sh train math_1b --workdir=/shared/runs/first …      starts and returns
#   scripts/launch/tpu_pod.sh logs [WORKER]          follows the output of a host; default 0
#   scripts/launch/tpu_pod.sh status                 what runs on each host, and how it ended
#   scripts/launch/tpu_pod.sh stop                   SIGTERM: saves a checkpoint and ends all
#   scripts/launch/tpu_pod.sh kill                   SIGKILL to what still runs
#   scripts/launch/tpu_pod.sh delete
#
# `--dry-run` as the first word prints the commands instead. The output of each host is in
# ~/grpo.log there; a run survives the loss of your connection.
set -euo pipefail
die() { echo "tpu_pod.sh: $*" >&2; exit 2; }

dry_run=
case ${1:-} in
  "" | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit ;;
  --dry-run) dry_run=yes; shift ;;
esac
if [ -z "${TPU:-}" ] || [ -z "${ZONE:-}" ]; then
  die "TPU and ZONE must be set: the slice's name and zone"
fi
where=("--zone=$ZONE")
[ -z "${PROJECT:-}" ] || where+=("--project=$PROJECT")

run() {
  if [ -n "$dry_run" ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}
tpu() { run gcloud compute tpus tpu-vm "$@" "${where[@]}"; }
on() { tpu ssh "$TPU" "--worker=$1" "--command=$2"; }  # $1: number of a host, or "all".

action=${1:-}
shift || true
case $action in
  create)
    (($# >= 2)) || die "create ACCELERATOR_TYPE VERSION, such as v5litepod-16 v2-alpha-tpuv5-lite"
    tpu create "$TPU" "--accelerator-type=$1" "--version=$2" "${@:3}" ;;
  install)
    archive=$(mktemp -d)/grpo-jax.tar.gz
    trap 'rm -r "$(dirname "$archive")"' EXIT
    git -C "$(dirname "$0")/../.." archive --prefix=grpo-jax/ -o "$archive" HEAD
    tpu scp "$archive" "$TPU:" --worker=all
    on all "tar xzf grpo-jax.tar.gz && grpo-jax/scripts/start_tpu_vm.sh --prepare" ;;
  mount)
    case ${1:-} in
      gs://*)
        # Folders can be renamed in a hierarchical namespace only. With cached metadata, a host would
        # not see the files that another one has just written.
        on all "sudo mkdir -p /shared && sudo chown \$USER /shared && gcsfuse --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 ${1#gs://} /shared" ;;
      *:/*)
        on all "sudo apt-get install -y -q nfs-common && sudo mkdir -p /shared && sudo mount -t nfs $1 /shared && sudo chmod a+rwx /shared" ;;
      *) die "mount SERVER:/SHARE or gs://BUCKET, not '${1:-}'" ;;
    esac ;;
  train)
    [[ " $*" == *" --workdir="* ]] || die "no --workdir: all hosts need the same folder, such as /shared/runs/first"
    words=$(printf '%q ' "$@")
    # The processes know each other by this secret: a new one at each start, and in no argument.
    folder=$(mktemp -d)
    trap 'rm -r "$folder"' EXIT
    (umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$folder/grpo_run_secret")
    tpu scp "$folder/grpo_run_secret" "$TPU:" --worker=all
    inner="export GRPO_JAX_RUN_SECRET=\$(cat grpo_run_secret); rm grpo_run_secret"
    inner+="; grpo-jax/.venv/bin/grpo-jax train $words; echo \"exit code \$?\""
    on all "setsid nohup bash -c $(printf '%q' "$inner") > grpo.log 2>&1 < /dev/null & echo started" ;;
  logs) on "${1:-0}" "tail -n 100 -f grpo.log" ;;
  status) on all "hostname; pgrep -af '[g]rpo-jax train' || tail -n 3 grpo.log" ;;
  stop) on all "pkill -TERM -f '[p]ython.*grpo-jax train' || true" ;;
  kill) on all "pkill -KILL -f '[p]ython.*grpo-jax train' || true" ;;
  delete) tpu delete "$TPU" ;;
  *) die "no '$action'; --help lists what there is" ;;
esac
