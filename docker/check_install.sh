#!/usr/bin/env bash
# Runs the install steps of Dockerfile.cpu without a container engine: the RUN lines of its first stage, as they stand,
# in an empty folder that holds what .dockerignore lets through. Then it asks the program that came out for its version.
#   TORCH_INDEX=URL   another index for torch than the Dockerfile's
#   PYTHON=python3.11 the Python to build with; 3.11 is what the image has
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/bin" "$work/src"
python=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)')
printf '#!/bin/sh\nexec "%s" "$@"\n' "$python" >"$work/bin/python"
printf '#!/bin/sh\nexec "%s" -m pip "$@"\n' "$python" >"$work/bin/pip"
chmod +x "$work/bin/"*

echo "== what .dockerignore lets through"
sed -n 's/^!//p' "$root/.dockerignore" | while read -r name; do
    [ -e "$root/$name" ] || { echo "  absent: $name" && continue; }
    mkdir -p "$work/src/$(dirname "$name")"
    cp -R "$root/$name" "$work/src/$name"
done
find "$work/src" -name __pycache__ -type d -prune -exec rm -rf {} +
rm -rf "$work/src/bench/results"
du -sh "$work/src" | cut -f1

default_index=$(sed -n 's/^ARG TORCH_INDEX=//p' "$root/docker/Dockerfile.cpu")
export TORCH_INDEX=${TORCH_INDEX:-$default_index} PATH="$work/bin:$PATH"
cd "$work/src"
# Joins continued lines, keeps the RUN lines before the second FROM, and drops the mounts that only a builder knows.
awk '/\\$/ { sub(/\\$/, ""); held = held $0; next } { print held $0; held = "" }' "$root/docker/Dockerfile.cpu" |
    awk '/^FROM / { stage++ } stage == 1 && sub(/^RUN /, "")' |
    sed -E "s,--mount=[^ ]+,,g; s,/opt/venv,$work/venv,g" >"$work/steps"
while read -r step; do
    echo "== $step"
    bash -euo pipefail -c "$step" </dev/null >"$work/log" 2>&1 || { tail -n 30 "$work/log" && exit 1; }
done <"$work/steps"

echo "== what came out"
cd /
rm -rf "$work/src"
sed "s,/opt/venv,$work/venv," "$root/docker/swiftopt.sh" >"$work/bin/swiftopt"
chmod +x "$work/bin/swiftopt"
"$work/bin/pip" --python "$work/venv/bin/python" check
swiftopt --version
swiftopt layers list --db "$work/check.db" --json >/dev/null # makes a database: the migrations came along
"$work/venv/bin/python" -c 'import torch, swiftopt.store; print("torch", torch.__version__, "at", torch.version.cuda or "CPU")'
if "$work/venv/bin/python" -c 'import pytest' 2>/dev/null; then echo "error: pytest is in the image" && exit 1; fi
du -sh "$work/venv" | cut -f1
