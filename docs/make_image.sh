#!/usr/bin/env bash
# Make docs/images/live.png and report.png again: a real run of the default job with a node killed at 60 %, its live page
# at half of its steps, and its report. Needs chromium. Prints where the text of the report is, for README.md and
# docs/bill.md.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
export EBBFLOW_RUNS="$folder/runs" METAFLOW_DATASTORE_SYSROOT_LOCAL="$folder/metaflow"

take_picture() { # take_picture PAGE NAME
    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,1240 \
        --virtual-time-budget=1000 --user-data-dir="$folder/browser" --screenshot="docs/images/$2.png" "file://$1"
}

.venv/bin/python flows/train_flow.py run --job first-run --set store="$folder/store" --rehearse node-loss@60% "$@" \
    > "$folder/output.txt" &
run=$!
live="$folder/runs/first-run/live.html"
until grep -qsE 'Running: [0-9,]+ of [0-9,]+ steps \((4[5-9]|5[0-9]) %\)' "$live"; do
    kill -0 $run || break
    sleep 1
done
take_picture "$live" live
wait $run
take_picture "$folder/runs/first-run/report.html" report
cat "$folder/output.txt"
echo "docs/images/live.png and report.png from $folder/runs/first-run, output in $folder/output.txt"
