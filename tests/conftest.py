"""What holds for every test: strict promotion, and property tests that repeat themselves.

The library must never depend on weak types or implicit rank promotion, so both are errors while the
suite runs. optax adds Python floats to int32 arrays in its own code; a test that runs it is marked
`standard_promotion`.
"""

from collections.abc import Iterator

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The default suite draws the same examples each time: a change is to blame when it fails. Compiling
# takes longer than any deadline. `--hypothesis-profile=search` looks for new examples.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("search", deadline=None, max_examples=500)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives tests marked `standard_promotion` the dtype promotion that users have by default."""
    if request.node.get_closest_marker("standard_promotion") is None:
        yield
        return
    with jax.numpy_dtype_promotion("standard"):
        yield
