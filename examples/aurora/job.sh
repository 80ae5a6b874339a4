#!/bin/bash
#PBS -l select=1
#PBS -l place=scatter
#PBS -l walltime=00:59:00
#PBS -l filesystems=home:flare
#PBS -q debug
# qsub -A PROJECT -v COCODIFF_VENV=$HOME/cocodiff examples/aurora/job.sh
#
# From what must hold first to what takes long; each part writes below $OUT. Never run by this
# project: docs/howto/aurora.md says what to look at in which order, and what to send back.
cd "$PBS_O_WORKDIR" || exit 1
set -o pipefail # what fails behind a pipe has failed
source examples/aurora/environment.sh
OUT=${OUT:-aurora-$PBS_JOBID}
mkdir -p "$OUT"

# 1. One process: versions, xccl, triton, settings. It stops here if ranks cannot run.
cocodiff doctor | tee "$OUT/doctor.txt" || exit 1
cocodiff doctor --json > "$OUT/doctor.json"

# 2. The tests that need one XPU, and nothing else.
python -m pytest tests/compile/test_on_device.py -m xpu -v 2>&1 | tee "$OUT/tests.txt" || exit 1

# 3. All ranks: they meet, they know their tiles, results are those of one process.
on_tiles cocodiff doctor > "$OUT/doctor-ranks.txt" 2>&1
on_tiles cocodiff check --json "$OUT/check.json" 2>&1 | tee "$OUT/check.txt" || exit 1

# 4. The machine as measured, beside the preset.
on_tiles cocodiff topology auto --save "$OUT/topology.json" 2>&1 | tee "$OUT/topology.txt" || exit 1
cocodiff topology aurora --ranks "$NUM_RANKS" > "$OUT/topology-preset.txt"

# 5. What the lab measures over emulated links, on the links there are.
on_tiles cocodiff bench --models qwen-image,sd3.5 --dtypes bf16 --variants inductor,cocodiff \
    --out "$OUT/bench" 2>&1 | tee "$OUT/bench.txt" || exit 1

# 6. Pipelines with real weights, stock and ours: WEIGHTS is a folder with both, fetched before.
if [ -n "$WEIGHTS" ]; then
    for model in Qwen/Qwen-Image stabilityai/stable-diffusion-3.5-large; do
        for backend in inductor cocodiff; do
            on_tiles python examples/aurora/generate.py "$WEIGHTS/$model" --backend "$backend" \
                --out "$OUT" 2>&1 | tee -a "$OUT/generate.txt"
        done
    done
fi
