"""What the package's binaries share: strict flags, one exit status for wrong input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging

_INTERRUPTED = 130


def run_binary(main: Callable[[], None], errors: tuple[type[Exception], ...]) -> None:
    """Parses the flags and runs a binary.

    A wrong flag, an argument that is no flag, or one of `errors` (and any `OSError`, which names
    the file) ends the process with status 2 and the message on stderr; an interrupt with 130.

    Args:
      main: what to run once the flags are parsed.
      errors: errors of input, whose message says what is wrong.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            rest = flags.FLAGS(argv)
        except flags.Error as error:
            _stop(error)
        if len(rest) > 1:
            _stop(f"unexpected argument {rest[1]!r}: flags only")
        return rest

    def guarded(argv: Sequence[str]) -> None:
        del argv
        # The checkpoint library reports every step of its own start at INFO.
        logging.set_verbosity(logging.WARNING)
        try:
            main()
        except (*errors, OSError) as error:
            _stop(error)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            sys.exit(_INTERRUPTED)

    app.run(guarded, flags_parser=parse)


def _stop(message: object) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)
