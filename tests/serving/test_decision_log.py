import threading

import pytest

from serving.core.decision import OutcomeRecord, OutcomeStatus, encode_line
from serving.core.errors import ConfigError
from serving.decision_log import FileDecisionLog, ReadCounters, read_lines


def line(number):
    return OutcomeRecord(
        request_id=f"r{number}",
        ended_at_s=1.0,
        status=OutcomeStatus.OK,
        num_output_tokens=number,
    )


def test_what_is_written_is_read_back_in_order(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    for start in (0, 50):  # a second run appends
        with FileDecisionLog(path) as log:
            for number in range(start, start + 50):
                log.write(line(number))
        assert (log.num_written, log.num_dropped) == (50, 0)
    assert list(read_lines(path)) == [line(number) for number in range(100)]


def test_lines_reach_the_disk_without_closing(tmp_path):
    log = FileDecisionLog(tmp_path / "log", flush_s=0.01)
    log.write(line(1))
    for _ in range(500):
        if log.num_written:
            break
        threading.Event().wait(0.01)
    assert list(read_lines(log.path)) == [line(1)]
    log.close()


class SlowFile:
    """A disk that waits for permission, then refuses or takes."""

    def __init__(self, refuses):
        self.entered, self.go, self.refuses, self.data = (
            threading.Event(),
            threading.Event(),
            refuses,
            b"",
        )

    def write(self, data):
        self.entered.set()
        self.go.wait(10)
        if self.refuses:
            raise OSError(28, "No space left on device")
        self.data += data

    def flush(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("refuses", [False, True])
def test_a_slow_or_full_disk_drops_and_counts_and_never_blocks(tmp_path, refuses):
    log = FileDecisionLog(tmp_path / "log", max_buffered=3, flush_s=0.01)
    real, slow = log._file, SlowFile(refuses)
    log._file = slow
    log.write(line(0))
    assert slow.entered.wait(10)
    for number in range(1, 6):
        log.write(line(number))
    assert log.num_dropped == 2
    slow.go.set()
    log.close()
    real.close()
    log.write(line(9))
    written = [] if refuses else [line(number) for number in range(4)]
    assert slow.data == b"".join(encode_line(entry) for entry in written)
    assert log.num_written == len(written)
    assert log.num_written + log.num_dropped == 7
    log.close()


def test_damaged_and_unknown_lines_are_counted_not_fatal(tmp_path):
    path = tmp_path / "log"
    newer = encode_line(line(2)).replace(b'"error":""', b'"error":"","from_the_future":1')
    other = b'{"kind":"quota","request_id":"x"}\n'
    cut = encode_line(line(3))[:20]
    path.write_bytes(encode_line(line(1)) + other + newer + b"\xff\xfe\n" + cut)
    counters = ReadCounters()
    assert list(read_lines(path, counters)) == [line(1), line(2)]
    assert (counters.num_lines, counters.num_skipped) == (2, 3)


def test_paths_that_do_not_work_are_named(tmp_path):
    with pytest.raises(ConfigError, match="log="):
        list(read_lines(tmp_path / "nothing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="decision_log="):
        FileDecisionLog(tmp_path / "file" / "log")


@pytest.mark.parametrize("bad", [{"max_buffered": 0}, {"flush_s": 0.0}])
def test_rules(tmp_path, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        FileDecisionLog(tmp_path / "log", **bad)
