"""The global layer's answer, pushed every ~10 s: which cells serve which kind of request.

A cell is a (variant, pool). Entries name their cells cheapest first at the class's SLO; the
router takes the first that can take the request, so a cell without a live worker is a hole
that is stepped over. Without a pushed table the router falls back to `static_table`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from serving.core.errors import UnknownModel
from serving.core.request import Request, SloClass
from serving.core.worker import WorkerInfo

STATIC_VERSION = "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """One place a request may go.

    Attributes:
        variant: model variant id.
        pool: pool name; its prefill and decode workers share it.
        usd_per_request: the global layer's estimate, None when it made none.
    """

    variant: str
    pool: str
    usd_per_request: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """Cells of one kind of request.

    Attributes:
        model: what clients ask for; "" matches requests that name none.
        cells: cheapest first, at least one.
        slo: class it is for, None for every class.
        product: product it is for, "" for every product.
    """

    model: str
    cells: tuple[TableCell, ...]
    slo: SloClass | None = None
    product: str = ""

    def __post_init__(self) -> None:
        if not self.cells:
            raise ValueError(f"entry for model {self.model!r} names no cells")


class RoutingTable:
    """Entries by (model, class, product), the most specific match wins.

    Attributes:
        version: written into every decision record.
        entries: as given.
    """

    def __init__(self, version: str, entries: Iterable[TableEntry]) -> None:
        self.version = version
        self.entries = tuple(entries)
        self._by_key: dict[tuple[str, SloClass | None, str], TableEntry] = {}
        for entry in self.entries:
            key = (entry.model, entry.slo, entry.product)
            if key in self._by_key:
                raise ValueError(f"routing table {version!r} has two entries for {key}")
            self._by_key[key] = entry

    @property
    def models(self) -> tuple[str, ...]:
        """Names clients may ask for, sorted, without the nameless entry."""
        return tuple(sorted({entry.model for entry in self.entries if entry.model}))

    def cells(self, request: Request) -> tuple[TableCell, ...]:
        """Cells for a request, cheapest first.

        Raises:
            UnknownModel: no entry names its model.
        """
        model, slo, product = request.model, request.slo, request.product
        for key in ((model, slo, product), (model, None, product), (model, slo, "")):
            entry = self._by_key.get(key)
            if entry is not None:
                return entry.cells
        entry = self._by_key.get((model, None, ""))
        if entry is not None:
            return entry.cells
        raise UnknownModel("model", model, f"must be one of {list(self.models)}")


def static_table(workers: Iterable[WorkerInfo]) -> RoutingTable:
    """The fallback: every model's pools in registration order, nameless requests anywhere."""
    cells: dict[str, dict[TableCell, None]] = {}
    everywhere: dict[TableCell, None] = {}
    for worker in workers:
        cell = TableCell(variant=worker.model, pool=worker.pool)
        cells.setdefault(worker.model, {})[cell] = None
        everywhere[cell] = None
    entries = [TableEntry(model=model, cells=tuple(of)) for model, of in cells.items()]
    if everywhere and "" not in cells:
        entries.append(TableEntry(model="", cells=tuple(everywhere)))
    return RoutingTable(STATIC_VERSION, entries)
