"""Our five package names belong to this tree and to nobody else in the environment.

The distribution `kernels` of another project owns one of our import names; an editable install
of ours loses to it and a wheel overwrites it silently, so the environment is checked.
"""

import importlib
import importlib.metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "eldr_jax", "bucket_planner", "calibration", "serving")


@pytest.mark.parametrize("name", PACKAGES)
def test_imports_from_this_tree(name):
    package = importlib.import_module(name)
    assert package.__file__ is not None
    assert Path(package.__file__).resolve().parent == ROOT / name


def test_no_other_distribution_owns_a_name():
    owners = {}
    for distribution in importlib.metadata.distributions():
        if distribution.metadata["Name"] == "eldr-router":
            continue
        for file in distribution.files or ():
            if file.parts[0] in PACKAGES:
                owners[file.parts[0]] = distribution.metadata["Name"]
    assert owners == {}


@pytest.mark.parametrize("name", PACKAGES)
def test_top_level_folder_has_a_readme(name):
    assert (ROOT / name / "README.md").is_file()
