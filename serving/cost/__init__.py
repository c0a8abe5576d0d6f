"""What work costs: catalogue, formulas, feasibility, cells, padding, transfer, topology."""
