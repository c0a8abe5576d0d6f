"""Step-time coefficients from a measured latency table (FACTS section 1, "Decode step cost")."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

import numpy as np

from serving.core.errors import ArtefactError
from serving.signatures.manifest import StepTime

_COLUMNS = ("tokens", "activated_experts", "time_us")


def fit_step_time(path: str | Path, *, min_tokens: int, max_tokens: int) -> StepTime:
    """Least squares t = base + per_expert * A + per_token * T over a range of T.

    Args:
        path: CSV with the columns tokens, activated_experts, time_us.
        min_tokens: smallest T used; below it other effects rule.
        max_tokens: largest T used.

    Raises:
        ArtefactError: unreadable, a missing column, a value that is no positive number, or
            too few rows; names file, line and rule.
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ArtefactError(file, f"cannot be read ({error.strerror})") from error
    reader = csv.DictReader(raw.decode("utf-8", errors="replace").splitlines())
    if missing := [name for name in _COLUMNS if name not in (reader.fieldnames or ())]:
        raise ArtefactError(file, f"column {missing[0]!r} is missing")
    rows = []
    for line, row in enumerate(reader, start=2):
        try:
            values = [float(row[name]) for name in _COLUMNS]
        except (TypeError, ValueError) as error:
            raise ArtefactError(file, f"line {line}: must be numbers ({error})") from error
        if not all(np.isfinite(values)) or min(values) <= 0:
            raise ArtefactError(file, f"line {line}: {values} must be finite and > 0")
        if min_tokens <= values[0] <= max_tokens:
            rows.append(values)
    table = np.array(rows).reshape(-1, 3)
    design = np.column_stack([np.ones(len(table)), table[:, 1], table[:, 0]])
    if len(table) < 4 or np.linalg.matrix_rank(design) < 3:
        raise ArtefactError(
            file,
            f"must hold at least 4 rows of {min_tokens}..{max_tokens} tokens that vary in tokens "
            f"and experts, has {len(table)}",
        )
    time_us = table[:, 2]
    coefficients, *_ = np.linalg.lstsq(design, time_us, rcond=None)
    residual = time_us - design @ coefficients
    centred = time_us - time_us.mean()
    return StepTime(
        base_us=float(coefficients[0]),
        per_expert_us=float(coefficients[1]),
        per_token_us=float(coefficients[2]),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        r_squared=float(1.0 - residual @ residual / (centred @ centred)),
        num_rows=len(table),
        source=f"{file.name} sha256 {hashlib.sha256(raw).hexdigest()}",
    )
