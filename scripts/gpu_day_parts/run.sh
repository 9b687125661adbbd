#!/bin/sh
# Joins the pieces, installs the wheels without a network, and starts the day with the arguments
# given. PYTHON: interpreter. WORK: folder to unpack into. The result is in out/, beside this file.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=${WORK:-$here/work}
python=${PYTHON:-python3}
if [ ! -e "$work/ready" ]; then
  rm -rf "$work"
  mkdir -p "$work/files" "$work/sources" "$work/packages"
  for file in "$here"/files/*; do
    name=$(basename "$file")
    case "$name" in
      *.piece-*) cat "$file" >>"$work/files/${name%.piece-*}" ;;
      *) cp "$file" "$work/files/$name" ;;
    esac
  done
  (cd "$work/files" && sha256sum --quiet -c SHA256SUMS)
  tar -xf "$work/files/sources.tar" -C "$work/sources"
  if ls "$work"/files/*.whl >/dev/null 2>&1; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
      --target "$work/packages" "$work"/files/*.whl
  fi
  touch "$work/ready"
fi
export PYTHONPATH="$work/packages${PYTHONPATH:+:$PYTHONPATH}"
cd "$work/sources"
exec "$python" -W ignore::SyntaxWarning scripts/gpu_day.py --out "$here/out" "$@"
