#!/usr/bin/env bash
# Compiles the kernels for an H100 and for TPUs that are not present (`make aot`): checks that they
# compile, how much memory they take, that no array is [tokens, vocabulary], and that no register
# spills. Then compiles the update of a microbatch for eight H100s: its memory and traffic.
# Then checks whether the update of configs/math_1b.py fits one H100; with AOT_WHOLE=1 (some
# minutes) whether all programs of that run fit one H100 and eight TPUs.
#
# The compilers come from the package index, 1.4 GB unpacked for each target, and go into separate
# environments. If they are not available, the target is skipped with a message.
#
#   scripts/compile_for_devices.sh [h100] [tpu]
set -uo pipefail
case " $* " in *" --help "*) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit ;; esac
for target in "$@"; do
  case $target in h100 | tpu) ;; *) echo "compile_for_devices: no target '$target'; there are: h100, tpu" >&2; exit 2 ;; esac
done
cd "$(dirname "$0")/.." || exit

# `python3.12` may be a pyenv shim that does not work: only an interpreter that runs counts.
python=
for candidate in "${PYTHON312:-}" python3.12 "$(pyenv prefix 3.12.1 2>/dev/null)/bin/python"; do
  if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "SKIPPED: compilation for H100 and TPU needs Python 3.12, which is not available here"
  exit 0
fi

environment() {  # $1: target. Makes its environment unless it is there; false if it cannot.
  local folder=.venv-aot-$1 list=constraints/aot_$1.txt
  cmp -s "$list" "$folder/installed" && return
  rm -rf "$folder"
  "$python" -m venv "$folder" &&
    "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-compile --retries 2 -r "$list" &&
    cp "$list" "$folder/installed"
}

compile() {  # $1: target, then files of tests. Runs them; false if one fails.
  local target=$1
  shift
  # Without the suite's own settings (--noconftest). No autotuning: there is no device. The environment
  # has what is compiled and nothing else, so packages that the trainer needs are missing.
  GRPO_JAX_ANY_VERSIONS=1 AOT_TARGET=$target JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
    JAX_ENABLE_COMPILATION_CACHE=false \
    XLA_FLAGS=--xla_gpu_autotune_level=0 \
    ".venv-aot-$target/bin/python" -m pytest -q --noconftest -m aot -s "$@"
}

tests() {  # $1: target. Installs its compilers; runs all its tests.
  local kernels=tests/kernels/test_compiled_for_devices.py programs=tests/kernels/test_programs_for_devices.py
  if ! environment "$1"; then
    echo "SKIPPED: compilation for $1: its compilers cannot be installed here (see pip's message above)"
  elif [ "$1" = h100 ]; then  # twice the work of the TPUs': in two processes.
    compile h100 "$programs" >"$logs/programs" 2>&1 &
    local beside=$! failed=0
    compile h100 "$kernels" || failed=1
    wait "$beside" || failed=1
    cat "$logs/programs"
    return $failed
  else
    compile "$1" "$kernels" "$programs"
  fi
}

targets=("$@")
[ $# -gt 0 ] || targets=(h100 tpu)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
running=()
for target in "${targets[@]}"; do
  tests "$target" >"$logs/$target" 2>&1 &
  running+=($!)
done
failed=0
for i in "${!targets[@]}"; do
  wait "${running[$i]}" || failed=1
  cat "$logs/${targets[$i]}"
done
exit $failed
