"""Masks of attention, against numpy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx


def test_an_attention_mask_compares_each_query_with_each_key() -> None:
    q, k = jnp.array([[1, 2, 0], [3, 0, 0]]), jnp.array([[1, 0], [2, 3]])
    mask = nnx.make_attention_mask(q, k, jnp.greater_equal, extra_batch_dims=1, dtype=bool)
    assert mask.shape == (1, 2, 1, 3, 2)
    np.testing.assert_array_equal(
        mask[0, :, 0], np.asarray(q)[:, :, None] >= np.asarray(k)[:, None]
    )


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_a_causal_mask_is_a_lower_triangle(dtype: str) -> None:
    mask = nnx.make_causal_mask(jnp.zeros((2, 4)), dtype=dtype)
    np.testing.assert_array_equal(mask, np.broadcast_to(np.tri(4, dtype=dtype), (2, 1, 4, 4)))
    assert mask.dtype == jnp.dtype(dtype)


def test_a_combined_mask_allows_what_all_allow() -> None:
    causal = nnx.make_causal_mask(jnp.zeros((1, 3)))
    padding = jnp.array([True, False, True]).reshape(1, 1, 1, 3)
    combined = nnx.combine_masks(None, causal, padding, dtype=jnp.int32)
    np.testing.assert_array_equal(combined[0, 0], [[1, 0, 0], [1, 0, 0], [1, 0, 1]])
    assert nnx.combine_masks(None, None) is None


@pytest.mark.parametrize("shape", [(3, 3), (1, 1, 3, 2)], ids=str)
def test_masks_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"found shapes \(1, 1, 3, 3\), "):
        nnx.combine_masks(jnp.ones((1, 1, 3, 3)), jnp.ones(shape))


@pytest.mark.parametrize(("q", "k"), [((), (3,)), ((2, 3), (4, 3))])
def test_inputs_without_a_common_batch_are_refused(q: Any, k: Any) -> None:
    with pytest.raises(ValueError, match=r"\(\.\.\., q_length\) and \(\.\.\., kv_length\).*found"):
        nnx.make_attention_mask(jnp.ones(q), jnp.ones(k))
    with pytest.raises(ValueError, match=r"\(\.\.\., length\), found shape \(\)"):
        nnx.make_causal_mask(jnp.ones(()))
