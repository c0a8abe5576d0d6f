"""Strict dtypes for every test of the histogram."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def strict_dtypes():
    """Under test no value is promoted silently."""
    with jax.numpy_dtype_promotion("strict"):
        yield
