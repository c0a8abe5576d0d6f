"""The cost table: every offered cell at the reference load, as rows and as text."""

from __future__ import annotations

from typing import Any

from serving.cost import formulas
from serving.cost.catalogue import Catalogue, Offer
from serving.cost.cells import Cell, build_cell

SCHEMA_VERSION = 1


def cost_table(catalogue: Catalogue, *, basis: str = "amortised") -> dict[str, Any]:
    """Prices every offer of a catalogue.

    Args:
        catalogue: what to price.
        basis: price basis; cells whose hardware has no such price become holes.

    Returns:
        JSON-ready: the operating point, `cells`, and `holes` with the rule each breaks.

    Raises:
        ConfigError: an offer names something unknown, or a precision that is not native.
    """
    cells: list[dict[str, Any]] = []
    holes: list[dict[str, Any]] = []
    for offer in catalogue.offers:
        cell, verdict = build_cell(catalogue, offer)
        if cell is None:
            holes.append(_hole(offer, verdict.rule, verdict.detail))
        elif basis not in cell.hardware.usd_per_chip_hour:
            holes.append(_hole(offer, "price_basis", f"{cell.hardware.id} has no {basis} price"))
        else:
            cells.append(cell_row(cell, catalogue, basis=basis))
    return {
        "schema_version": SCHEMA_VERSION,
        "price_basis": basis,
        "batch": catalogue.reference_batch,
        "context_tokens": catalogue.reference_context_tokens,
        "cells": cells,
        "holes": holes,
    }


def cell_row(cell: Cell, catalogue: Catalogue, *, basis: str) -> dict[str, Any]:
    """One cell at the catalogue's reference load."""
    batch, context = catalogue.reference_batch, catalogue.reference_context_tokens
    step_s = cell.decode_step_s(batch, context)
    usd_per_s = cell.usd_per_s(basis=basis)
    row: dict[str, Any] = {
        "variant": cell.variant.id,
        "hardware": cell.hardware.id,
        "chips": cell.num_chips,
        "precision": cell.format.precision,
        "quality_id": cell.format.quality_id,
        "prefill_usd_per_mtok": formulas.usd_per_mtok(usd_per_s / cell.prefill_tokens_per_s()),
        "decode_usd_per_mtok": formulas.usd_per_mtok(step_s / batch * usd_per_s),
        "tpot_ms": 1e3 * step_s,
        "prefill_tokens_per_s": cell.prefill_tokens_per_s(),
        "decode_tokens_per_s": batch / step_s,
        "compute_ms": 1e3 * cell.compute_step_s(batch),
        "usd_per_hour": 3600.0 * usd_per_s,
        "weight_bytes": cell.format.weight_bytes,
        "kv_bytes_per_token": cell.format.kv_bytes_per_token,
    }
    moe = cell.variant.moe
    if moe is not None:
        row["distinct_experts_per_layer"] = formulas.expected_distinct_experts(
            moe.num_experts, moe.top_k, batch
        )
    if cell.format.stand_in_for:
        row["stand_in_for"] = cell.format.stand_in_for
    if cell.prefill_precision != cell.format.precision:
        row["prefill_precision"] = cell.prefill_precision
    if cell.note:
        row["note"] = cell.note
    return row


_COLUMNS = (
    ("variant", "variant", "{}"),
    ("hardware", "hardware", "{}"),
    ("chips", "chips", "{}"),
    ("precision", "precision", "{}"),
    ("prefill $/Mtok", "prefill_usd_per_mtok", "{:.4f}"),
    ("decode $/Mtok", "decode_usd_per_mtok", "{:.4f}"),
    ("TPOT ms", "tpot_ms", "{:.1f}"),
    ("prefill tok/s", "prefill_tokens_per_s", "{:,.0f}"),
    ("$/h", "usd_per_hour", "{:.2f}"),
)


def table_text(table: dict[str, Any]) -> str:
    """The table for people: aligned columns, then notes and holes."""
    rows = [[title for title, _, _ in _COLUMNS]]
    rows += [[form.format(cell[key]) for _, key, form in _COLUMNS] for cell in table["cells"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        f"{table['price_basis']} prices; decode at batch {table['batch']}, "
        f"context {table['context_tokens']:,}"
    ]
    for row in rows:
        left, right = row[:4], row[4:]
        cells = [text.ljust(width) for text, width in zip(left, widths[:4], strict=True)]
        cells += [text.rjust(width) for text, width in zip(right, widths[4:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    for cell in table["cells"]:
        where = f"{cell['variant']} on {cell['hardware']}"
        if "stand_in_for" in cell:
            lines.append(f"{where}: {cell['quality_id']} stands in for {cell['stand_in_for']}")
        if "note" in cell:
            lines.append(f"{where}: {cell['note']}")
    for hole in table["holes"]:
        lines.append(
            f"hole: {hole['variant']} on {hole['chips']} {hole['hardware']}: "
            f"{hole['rule']}: {hole['detail']}"
        )
    return "\n".join(lines)


def _hole(offer: Offer, rule: str, detail: str) -> dict[str, Any]:
    return {
        "variant": offer.variant,
        "hardware": offer.hardware,
        "chips": offer.num_chips,
        "rule": rule,
        "detail": detail,
    }
