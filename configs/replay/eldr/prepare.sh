#!/bin/sh
# Makes what the replays of this folder read: captures of both sides, the fit, the bank.
#   sh configs/replay/eldr/prepare.sh CORPORA_DIR ROUTING_DIR      (from the repository root)
set -eu
corpora=$1
routing=$2
python=${PYTHON:-python}
for name in task; do
  workload=task_qwen3_30b
  out=out/replay/eldr/$name
  [ -e "${out}_calibrate/manifest.json" ] || $python -m calibration.profile_main \
    --workload=$workload --side=calibrate --num_prompts=1000 \
    --corpora="$corpora" --routing="$routing" --out="${out}_calibrate"
  [ -e "${out}_artefact/manifest.json" ] || $python -m calibration.fit_main \
    --capture="${out}_calibrate" --out="${out}_artefact"
  [ -e "${out}_serve/manifest.json" ] || $python -m calibration.profile_main \
    --workload=$workload --side=serve --num_prompts=3000 \
    --corpora="$corpora" --routing="$routing" --out="${out}_serve"
  $python -m calibration.replay_bank_main --capture="${out}_serve" --out="${out}_bank.npz"
done
