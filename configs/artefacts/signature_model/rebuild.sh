#!/bin/sh
# Rebuilds this folder from the reference model; run from the repository root with the folder of
# the corpora as the only argument.
set -eu
corpora=$1
here=configs/artefacts/signature_model
work=$(mktemp -d)
python -m calibration.capture_main --corpora="$corpora" --out="$work/train" --num_prompts=1000
python -m calibration.capture_main --corpora="$corpora" --out="$work/heldout" --split=heldout \
  --num_prompts=2400 --seed=1
python -m calibration.fit_main --capture="$work/train" --out=$here \
  --regions=2,3,4,5,6,7,8,12,16
python -m calibration.evaluate_main --artefact=$here --capture="$work/heldout" \
  --out=$here/evaluation.json --card=$here/README.md --card_commands=$here/rebuild.sh
rm -r "$work"
