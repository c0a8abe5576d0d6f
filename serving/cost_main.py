"""Prints and writes the cost table; see `--help`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from absl import flags

from bucket_planner.command_line import run_main, say, write_json
from bucket_planner.errors import PlannerError
from serving.core.errors import ConfigError
from serving.cost.catalogue import load_catalogue
from serving.cost.table import cost_table, table_text

_USAGE = """What a million tokens cost on every offered (variant, hardware) cell.

  python -m serving.cost_main --table --out=cost.json

Prices, peaks and their provenance come from --hardware_dir, variants and cells from --variants.
"""
_BASES = ("amortised", "list", "three_year")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostMainConfig:
    """What to print and write.

    Attributes:
        variants: catalogue file.
        hardware_dir: directory of hardware files.
        basis: price basis.
        table: whether to print the table.
        out: JSON file, None for none.
    """

    variants: str
    hardware_dir: str
    basis: str
    table: bool
    out: str | None

    def __post_init__(self) -> None:
        if not self.table and self.out is None:
            raise ConfigError("table", False, "give --table, --out, or both")


def run(config: CostMainConfig) -> None:
    """Computes the table, writes the file, prints the text.

    Raises:
        ConfigError: a file or field of the configuration is wrong, named.
        PlannerError: the output file cannot be written.
    """
    catalogue = load_catalogue(config.variants, config.hardware_dir)
    table = cost_table(catalogue, basis=config.basis)
    if config.out is not None:
        write_json(config.out, table)
        say(f"wrote {config.out}: {len(table['cells'])} cells, {len(table['holes'])} holes")
    if config.table:
        print(table_text(table), file=sys.stdout)


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_bool("table", False, "Print the table.")
    flags.DEFINE_string("out", None, "JSON file to write.")
    flags.DEFINE_enum("basis", _BASES[0], list(_BASES), "Price basis.")
    flags.DEFINE_string("variants", "configs/serving/variants.yaml", "Variants and cells.")
    flags.DEFINE_string("hardware_dir", "configs/hardware", "Directory of hardware files.")


def main() -> None:
    """Flags -> config -> run."""
    values = flags.FLAGS
    run(
        CostMainConfig(
            variants=values.variants,
            hardware_dir=values.hardware_dir,
            basis=values.basis,
            table=values.table,
            out=values.out,
        )
    )


def cli() -> None:
    """Entry point."""
    define_flags()
    run_main(main, usage=_USAGE, errors=(ConfigError, PlannerError))


if __name__ == "__main__":
    cli()
