#!/usr/bin/env bash
# Make docs/images/report.png again: a real run of the default job with a node killed at 60 %, and a picture of its
# report. Needs chromium. Prints where the text of the report is, for README.md and docs/bill.md.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
export EBBFLOW_RUNS="$folder/runs" METAFLOW_DATASTORE_SYSROOT_LOCAL="$folder/metaflow"
.venv/bin/python flows/train_flow.py run --job first-run --set store="$folder/store" --rehearse node-loss@60% "$@" \
    | tee "$folder/output.txt"
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,960 \
    --screenshot=docs/images/report.png "file://$folder/runs/first-run/report.html"
echo "docs/images/report.png from $folder/runs/first-run/report.json, output in $folder/output.txt"
