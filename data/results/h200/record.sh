#!/usr/bin/env bash
# Measures what is recorded in this folder anew, on the GPU of this machine:
#
#   bash data/results/h200/record.sh OUT             everything, about 25 minutes
#   bash data/results/h200/record.sh OUT kernels quant combined
#
# OUT gets one JSON file a part, written as soon as the part has something, and a log. A part that fails or takes longer
# than its seconds leaves the others alone. From a copy without .git, LABKIT_COMMIT names the commit.
# Afterwards: copy the JSON files here and rewrite the pages that show them (see data/README.md).
set -u
out=$1; shift
parts=${*:-tests memcheck kernels quant formats combined claims serve quality heads tp}
mkdir -p "$out"
cd "$(dirname "$0")/../../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
cli="python3 -m labkit.cli"

limited() {  # limited SECONDS NAME COMMAND...
    local seconds=$1 name=$2; shift 2
    echo "== $name at $(date +%T)"
    timeout -s INT -k 10 "$seconds" "$@" > "$out/$name.log" 2>&1
    echo "   ended with $?: $(tail -n 1 "$out/$name.log" | cut -c1-200)"
}

tests() {
    local run="python3 -m pytest -q -m gpu -p no:cacheprovider --tb=short"
    limited 240 tests_kernel $run tests/kernel
    limited 150 tests_engine $run tests/parity tests/unit tests/property
}
memcheck() { limited 170 memcheck python3 tests/kernel/memcheck.py "$out/memcheck.json" 140; }
kernels() { limited 150 kernels python3 -m labkit.kernels.bench --json "$out/kernels.json" --only decode prefill mixed write swap steps; }
quant() { limited 120 quant python3 -m labkit.kernels.bench --json "$out/quant.json" --no-peers --only quantised quantised-write quantised-prefill; }
formats() { limited 120 formats python3 -m labkit.experiments.kv_formats "$out/quant.json"; }  # under "engine"
combined() {
    cp -n data/results/h200/combined.json "$out/combined.json"  # with the predictions made before
    for shape in llama-2-13b llama-2-7b; do
        limited 240 "combined_$shape" $cli experiment combined --model $shape --memory-limit 40 --window 4 --out "$out/combined.json"
    done
}
claims() { limited 120 claims python3 -m labkit.experiments.claims --out "$out/claims.json"; }
serve() {
    for shape in llama-2-7b llama-3-8b smollm2-135m; do
        limited 120 "serve_$shape" $cli bench serve --shape $shape --out "$out/serve.json"
    done
    limited 120 serve_peers $cli bench serve --shape smollm2-135m --num-requests 16 --lengths 64x64 \
        --system labkit --system transformers-cb --system transformers-generate --out "$out/serve.json"
}
quality() {
    cp -n data/results/quality.json "$out/quality.json"
    limited 240 quality $cli experiment quality --device cuda --out "$out/quality.json"
    limited 120 sensitivity $cli experiment sensitivity --device cuda --out "$out/kv_sensitivity.json"
}
heads() { limited 300 heads $cli experiment heads --out "$out/heads.json"; }
tp() {
    if [ "$(nvidia-smi --list-gpus | wc -l)" -lt 2 ]; then echo "== tp needs two GPUs"; return; fi
    limited 240 tp python3 -m labkit.experiments.tensor_parallel --out "$out/tp.json"
}

for part in $parts; do "$part"; done
