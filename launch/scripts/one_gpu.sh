#!/usr/bin/env bash
# All that one GPU can tell, in one go: a world of one over NCCL, streams and events, the allocator, bfloat16, and one
# process against transformers' Llama and T5.
#
#   launch/scripts/one_gpu.sh [FOLDER] [BACKEND] [FILE]
#   launch/scripts/one_gpu.sh results/one_gpu
#   launch/scripts/one_gpu.sh build/try gloo launch/experiments/single_process.toml     (a try without a GPU)
#
# Records, tables, pictures and verdicts are put into FOLDER. What is measured already is kept, so that a second start
# goes on where the first one stopped.
set -euo pipefail

folder=${1:-results/one_gpu}
backend=${2:-nccl}
file=${3:-launch/experiments/one_gpu.toml}
twinshard=.venv/bin/twinshard
[ -x "$twinshard" ] || twinshard=twinshard

# Right before fast: both families in float64, on this device, against themselves unpartitioned and against transformers.
for model in tiny-llama tiny-t5; do
    for engine in native transformers; do
        "$twinshard" verify --model "$model" --microbatches 2 --engine "$engine" --backend "$backend"
    done
done

mkdir -p "$folder"
"$twinshard" bench "$file" --backend "$backend" --output "$folder/records" --out "$folder/bench.csv"
"$twinshard" report "$folder/records" "$folder"
