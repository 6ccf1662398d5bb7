"""What an einsum says: the names of axes of two operands and a result, such as `ab,bc->ac`.

A *term* names the axes of one array, a letter each; `...` stands for any number of axes more.
"""


def terms(einsum_str: str) -> tuple[str, str, str]:
    """Returns the terms of input, kernel and result, without blanks.

    Args:
      einsum_str: As `jnp.einsum` takes it.

    Raises:
      ValueError: There are not two operands and an arrow.

    Example:
      >>> terms("...a, ab -> ...b")
      ('...a', 'ab', '...b')
    """
    operands, arrow, result = einsum_str.replace(" ", "").partition("->")
    left, comma, right = operands.partition(",")
    if not arrow or not comma or "," in right or "->" in result:
        raise ValueError(
            "Einsum expects two operands, the input and the kernel, and an arrow, such as "
            f"'ab,bc->ac', found {einsum_str!r}."
        )
    return left, right, result


def names_of(term: str, rank: int) -> list[str]:
    """Returns a name per axis; those of an ellipsis count from its end, where they line up.

    Args:
      term: Names axes.
      rank: The number of axes, which an ellipsis brings the names to.

    Example:
      >>> names_of("a...b", 4)
      ['a', '...2', '...1', 'b']
    """
    before, dots, after = term.partition("...")
    unnamed = rank - len(before) - len(after) if dots else 0
    return [*before, *(f"...{n}" for n in range(unnamed, 0, -1)), *after]


def sizes_of(term: str, shape: tuple[int, ...]) -> dict[str, int] | None:
    """Returns the sizes by name, or None if there are more or fewer axes than names.

    Args:
      term: Names axes.
      shape: Their sizes.

    Example:
      >>> sizes_of("ab", (2, 3)), sizes_of("ab", (2,))
      ({'a': 2, 'b': 3}, None)
    """
    names = names_of(term, len(shape))
    return dict(zip(names, shape, strict=True)) if len(names) == len(shape) else None
