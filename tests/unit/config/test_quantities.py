"""Quantities as people read them."""

import math

import pytest

from keepstep.config.quantities import number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"), (2.5, "2.5000"), (-281.42661, "-281.4266"), (1e-5, "1.000e-05"),
        (999_999.0, "999999.0000"), (1.2345e9, "1.234e+09"), (-8.5e30, "-8.500e+30"),
        (math.nan, "nan"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_a_small_number_is_not_zero_and_a_huge_one_no_wall_of_digits(value, text):
    assert number_text(value) == text
    assert number_text(3.14159, digits=2) == "3.14"
