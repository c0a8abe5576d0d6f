"""The last requests' lines in memory, for Explain."""

from __future__ import annotations

from collections import OrderedDict

from serving.core.decision import LogLine


class LineRing:
    """Lines of at most `max_requests` requests; the request touched longest ago goes first."""

    def __init__(self, max_requests: int) -> None:
        if max_requests < 1:
            raise ValueError(f"{max_requests=} must be >= 1")
        self._max_requests = max_requests
        self._lines: OrderedDict[str, list[LogLine]] = OrderedDict()

    def add(self, line: LogLine) -> None:
        """Takes a line."""
        lines = self._lines.get(line.request_id)
        if lines is None:
            lines = self._lines[line.request_id] = []
            if len(self._lines) > self._max_requests:
                self._lines.popitem(last=False)
        else:
            self._lines.move_to_end(line.request_id)
        lines.append(line)

    def lines(self, request_id: str) -> list[LogLine]:
        """A request's lines, oldest first; [] when unknown."""
        return list(self._lines.get(request_id, ()))

    def request_ids(self) -> list[str]:
        """Ids still known, longest untouched first."""
        return list(self._lines)
