"""The request's way, in pure values: types, errors, the pipeline."""
