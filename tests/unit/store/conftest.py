"""Remotes of fsspec: one in memory, and one in files."""

import itertools

import pytest

numbers = itertools.count()


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path) -> str:
    if request.param == "memory":
        return f"memory://bucket/{next(numbers)}"
    return f"file://{tmp_path}/objects"


@pytest.fixture
def memory() -> str:
    return f"memory://bucket/{next(numbers)}"
