"""A peer in its own process and its own python: one JSON line asked, one answered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from serving.core.errors import ConfigError


class Peer:
    """A running peer script.

    Attributes:
        hello: its first answer.
    """

    def __init__(self, process: subprocess.Popen[str], hello: dict[str, Any]) -> None:
        self._process = process
        self.hello = hello

    @classmethod
    def start(cls, script: Path, python: str) -> tuple[Peer | None, str]:
        """Starts a peer.

        Args:
            script: the file to run.
            python: interpreter with the peer's package; "" tries this one.

        Returns:
            The peer and "", or None and why it is not there (only without `python`).

        Raises:
            ConfigError: `python` was given and the peer does not run in it.
        """
        try:
            process = subprocess.Popen(
                [python or sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise ConfigError("peer_python", python, str(error)) from error
        try:
            return cls(process, _ask(process, {"op": "hello"})), ""
        except (BrokenPipeError, EOFError):
            _, stderr = process.communicate()
            reason = stderr.strip().splitlines()[-1] if stderr.strip() else "it said nothing"
            if python:
                raise ConfigError("peer_python", python, f"{script.stem}: {reason}") from None
            return None, reason

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends one request and waits for the answer."""
        return _ask(self._process, request)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def _ask(process: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise EOFError("the peer ended")
    return json.loads(line)
