"""The global layer's answer, pushed every ~10 s: which cells serve which kind of request.

A cell is a (variant, pool). Entries name their cells cheapest first at the class's SLO. The
first few are compared worker by worker when a request comes; the others are tried one after
another when none of those can take it. A cell without a live worker is a hole that is stepped
over. Without a pushed table the router falls back to `static_table`.
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
        usd_per_request: the global layer's estimate (J of a mean request), None when it made
            none.
        source: "measured" or "prior", what the estimate rests on; "" without one.
    """

    variant: str
    pool: str
    usd_per_request: float | None = None
    source: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """(variant, pool)."""
        return self.variant, self.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """Cells of one kind of request.

    Attributes:
        model: what clients ask for; "" matches requests that name none.
        cells: cheapest first, at least one.
        slo: class it is for, None for every class.
        product: product it is for, "" for every product.
        num_compared: how many of the cheapest cells a request is compared over.
    """

    model: str
    cells: tuple[TableCell, ...]
    slo: SloClass | None = None
    product: str = ""
    num_compared: int = 1

    def __post_init__(self) -> None:
        if not self.cells:
            raise ValueError(f"entry for model {self.model!r} names no cells")
        if self.num_compared < 1:
            raise ValueError(f"{self.num_compared=} must be >= 1")

    @property
    def choices(self) -> tuple[tuple[TableCell, ...], ...]:
        """Groups of cells in the order they are tried; those of a group are compared."""
        rest = self.cells[self.num_compared :]
        return (self.cells[: self.num_compared], *((cell,) for cell in rest))


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
        self._choices: dict[int, tuple[tuple[TableCell, ...], ...]] = {}
        for entry in self.entries:
            key = (entry.model, entry.slo, entry.product)
            if key in self._by_key:
                raise ValueError(f"routing table {version!r} has two entries for {key}")
            self._by_key[key] = entry
            self._choices[id(entry)] = entry.choices

    @property
    def models(self) -> tuple[str, ...]:
        """Names clients may ask for, sorted, without the nameless entry."""
        return tuple(sorted({entry.model for entry in self.entries if entry.model}))

    def cells(self, request: Request) -> tuple[TableCell, ...]:
        """Cells for a request, cheapest first.

        Raises:
            UnknownModel: no entry names its model.
        """
        return self._entry(request).cells

    def choices(self, request: Request) -> tuple[tuple[TableCell, ...], ...]:
        """The same in groups: cells of a group are compared, groups are tried in order.

        Raises:
            UnknownModel: no entry names its model.
        """
        return self._choices[id(self._entry(request))]

    def _entry(self, request: Request) -> TableEntry:
        model, slo, product = request.model, request.slo, request.product
        for key in ((model, slo, product), (model, None, product), (model, slo, "")):
            entry = self._by_key.get(key)
            if entry is not None:
                return entry
        entry = self._by_key.get((model, None, ""))
        if entry is not None:
            return entry
        raise UnknownModel("model", model, f"must be one of {list(self.models)}")


def static_table(workers: Iterable[WorkerInfo]) -> RoutingTable:
    """The fallback: every model's pools, compared; nameless requests anywhere.

    Without estimates nothing orders the variants of nameless requests but registration: the
    pools of the first are compared, the others are tried after them.
    """
    cells: dict[str, dict[TableCell, None]] = {}
    for worker in workers:
        cell = TableCell(variant=worker.model, pool=worker.pool)
        cells.setdefault(worker.model, {})[cell] = None
    entries = [
        TableEntry(model=model, cells=tuple(of), num_compared=len(of))
        for model, of in cells.items()
    ]
    if cells and "" not in cells:
        order = [cell for of in cells.values() for cell in of]
        first = len(next(iter(cells.values())))
        entries.append(TableEntry(model="", cells=tuple(order), num_compared=first))
    return RoutingTable(STATIC_VERSION, entries)
