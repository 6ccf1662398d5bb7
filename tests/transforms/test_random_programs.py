"""Random programs through each transform, alone and with each other one inside of it.

The fuzzer (`python -m tests.fuzz`, `nox -s fuzz`) runs the same law over all pairs, and longer.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.strategies import examples
from tests.transforms.cases import cases, check, nestings
from tests.transforms.table import TRANSFORMS

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("outer", TRANSFORMS)
@examples(0.4)
@given(data=st.data())
def test_lifted_program_is_the_plain_one_or_the_error_names_the_path(outer, data):
    check(data.draw(st.sampled_from(nestings(outer)).flatmap(cases)))
