"""StateDef: the static half of a State."""

from collections.abc import Hashable
from typing import Any

from nnxlite._core.errors import Path
from nnxlite._core.graphdef import ARRAY_LEAF, Leaf
from nnxlite._core.intern import InternTable
from nnxlite._core.variable import Variable


class StateDef:
    """Paths and kinds of a State's leaves, in sorted order; interned, compared by identity.

    Attributes:
      paths: Of the leaves.
      leaves: Their kinds.
      arrays: The numbers of those that are bare arrays.
    """

    __slots__ = ("__weakref__", "arrays", "leaves", "paths")

    paths: tuple[Path, ...]
    leaves: tuple[Leaf, ...]
    arrays: tuple[int, ...]

    @staticmethod
    def of(paths: tuple[Path, ...], leaves: tuple[Leaf, ...]) -> "StateDef":
        """Returns the one `StateDef` of these parts."""
        found = _STATEDEFS.get((paths, leaves))
        if found is None:
            new = StateDef()
            new.paths, new.leaves = paths, leaves
            new.arrays = tuple([n for n, kind in enumerate(leaves) if kind is ARRAY_LEAF])
            found = _STATEDEFS.add(new)
        return found

    @property
    def key(self) -> Hashable:
        """What makes it equal to another one."""
        return self.paths, self.leaves

    def __reduce__(self) -> Any:
        return StateDef.of, (self.paths, self.leaves)

    def __copy__(self) -> "StateDef":
        return self

    def __deepcopy__(self, memo: Any) -> "StateDef":
        return self

    def __repr__(self) -> str:
        return f"<StateDef: {len(self.paths)} leaves, {hash(self) & 0xFFFFFF:06x}>"


_STATEDEFS: InternTable[StateDef] = InternTable()


def kind_of_leaf(leaf: Any) -> Leaf:
    """Returns kind and metadata of a leaf of a State."""
    return (type(leaf), leaf._meta) if isinstance(leaf, Variable) else ARRAY_LEAF
