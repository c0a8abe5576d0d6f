from __future__ import annotations

import io

from calibration.progress import progress


def test_plain_lines_come_now_and_then_and_at_the_end():
    out = io.StringIO()
    times = iter([0.0, 1.0, 11.0, 11.5, 12.0])
    with progress("work", 4, stream=out, now_s=lambda: next(times)) as advance:
        for _ in range(4):
            advance(1)
    assert out.getvalue().splitlines() == ["work: 2/4 (11 s)", "work: 4/4 (12 s)"]


def test_a_terminal_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with progress("work", 2, stream=out) as advance:
        advance(2)
    assert "2/2" in out.getvalue()
