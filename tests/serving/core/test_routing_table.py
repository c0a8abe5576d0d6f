import pytest

from serving.core.errors import UnknownModel
from serving.core.request import SloClass
from serving.core.routing_table import RoutingTable, TableCell, TableEntry, static_table
from tests.serving import decision_parts as parts

ANY, B_ONLY, CHAT = (TableCell(variant="m", pool=pool) for pool in ("any", "b", "chat"))
TABLE = RoutingTable(
    "t1",
    [
        TableEntry(model="m", cells=(ANY,)),
        TableEntry(model="m", slo=SloClass.B, cells=(B_ONLY, ANY)),
        TableEntry(model="m", product="chat", cells=(CHAT,)),
    ],
)


def test_the_most_specific_entry_wins():
    assert TABLE.cells(parts.request(model="m", slo=SloClass.A)) == (ANY,)
    assert TABLE.cells(parts.request(model="m", slo=SloClass.B)) == (B_ONLY, ANY)
    assert TABLE.cells(parts.request(model="m", slo=SloClass.B, product="chat")) == (CHAT,)


def test_an_unknown_model_names_the_known():
    with pytest.raises(UnknownModel, match="must be one of \\['m'\\]"):
        TABLE.cells(parts.request(model="x"))


def test_entries_must_differ_and_name_cells():
    with pytest.raises(ValueError, match="two entries"):
        RoutingTable("t", [TableEntry(model="m", cells=(ANY,))] * 2)
    with pytest.raises(ValueError, match="no cells"):
        TableEntry(model="m", cells=())


def test_the_static_table_lists_pools_in_registration_order():
    table = static_table(
        [parts.worker("a", pool="y"), parts.worker("b", pool="x"), parts.worker("c", model="n")]
    )
    assert table.version == "static"
    cells = table.cells(parts.request(model="m"))
    assert [cell.pool for cell in cells] == ["y", "x"]
    nameless = table.cells(parts.request())
    assert [(cell.variant, cell.pool) for cell in nameless] == [("m", "y"), ("m", "x"), ("n", "p")]


def test_the_static_table_of_nobody_knows_nothing():
    with pytest.raises(UnknownModel):
        static_table([]).cells(parts.request())
