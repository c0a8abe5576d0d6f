"""Compiles histogram calls for TPUs: one JSON request a line in, one JSON answer a line out.

`bench_main` starts it, in a process of its own because libtpu may abort. A request is
{"chip": NAME, "spec": {HistogramSpec fields}}, an answer {KernelTime fields} or
{"error": TEXT}.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from absl import app, flags

from kernels.expert_histogram import tpu_compile
from kernels.expert_histogram.arg_specs import HistogramSpec

_DUMP_FOLDER = flags.DEFINE_string(
    "dump_folder", None, "Empty folder for the compiler's schedules.", required=True
)
_PROFILE = flags.DEFINE_boolean("profile", False, "Also read the compiler's static profile.")


def run(dump_folder: Path, *, profile: bool) -> None:
    """Answers requests from standard input until it ends."""
    tpu_compile.prepare_process(dump_folder, profile=profile)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            spec = HistogramSpec(**request["spec"])
            answer = asdict(tpu_compile.compile_and_time(request["chip"], spec, dump_folder))
        except Exception as error:  # any refusal of the compiler is an answer
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), flush=True)


def main(argv: list[str]) -> None:
    """Flags -> run."""
    del argv
    run(Path(_DUMP_FOLDER.value), profile=_PROFILE.value)


if __name__ == "__main__":
    app.run(main)
