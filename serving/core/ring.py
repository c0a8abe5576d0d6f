"""The last requests' lines in memory, for Explain.

Lines are kept encoded: half the memory of the objects, and nothing for the collector to walk.
"""

from __future__ import annotations

from collections import OrderedDict

from serving.core.decision import LogLine, decode_line, encode_line


class LineRing:
    """Lines of at most `max_requests` requests; the request touched longest ago goes first."""

    def __init__(self, max_requests: int) -> None:
        if max_requests < 1:
            raise ValueError(f"{max_requests=} must be >= 1")
        self._max_requests = max_requests
        self._lines: OrderedDict[str, list[bytes]] = OrderedDict()

    def add(self, line: LogLine) -> None:
        """Takes a line."""
        lines = self._lines.get(line.request_id)
        if lines is None:
            lines = self._lines[line.request_id] = []
            if len(self._lines) > self._max_requests:
                self._lines.popitem(last=False)
        else:
            self._lines.move_to_end(line.request_id)
        lines.append(encode_line(line))

    def lines(self, request_id: str) -> list[LogLine]:
        """A request's lines, oldest first; [] when unknown."""
        return [decode_line(line) for line in self._lines.get(request_id, ())]

    def request_ids(self) -> list[str]:
        """Ids still known, longest untouched first."""
        return list(self._lines)
