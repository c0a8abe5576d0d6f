"""The frame the binaries run in: flags first, one error style, exit code 2 when wrong."""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from absl import app, flags

from bucket_planner.errors import PlannerConfigError, PlannerError


def run_main(
    main: Callable[[], None],
    *,
    usage: str,
    errors: tuple[type[Exception], ...] = (PlannerError,),
) -> None:
    """Parses flags, runs `main`, and turns wrong flags or configuration into exit code 2.

    Args:
      main: the binary's work; reads `flags.FLAGS`.
      usage: what `--help` says above the flags.
      errors: what counts as wrong configuration; anything else is a bug and keeps its traceback.
    """
    sys.modules["__main__"].__doc__ = usage

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1:
            _fail(f"unexpected argument {argv[1]!r}: every setting is a --flag")
        try:
            main()
        except errors as error:
            _fail(str(error))

    app.run(guarded, flags_parser=_parse)


def write_json(path: str, report: object) -> None:
    """Writes a report as indented JSON, making its directory.

    Raises:
      PlannerConfigError: the file cannot be written.
    """
    out = Path(path)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise PlannerConfigError("out", path, f"must be a writable file ({error})") from error


def say(line: str) -> None:
    """One progress line on stderr; stdout stays free for results."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _fail(str(error))
        raise


def _fail(message: str) -> None:
    say(f"error: {message}")
    sys.exit(2)
