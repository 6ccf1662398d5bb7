"""Owners: which object a record belongs to, by label, at one trace level.

See `records.py` for what labels there are.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nnxlite._core.errors import Path, format_path
from nnxlite._core.extras import Nodes
from nnxlite._core.graph import flatten
from nnxlite._core.graphdef import node_paths
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.records import Below, ById, Label, Stranger
from nnxlite._core.trace import current_level


class Owners:
    """The objects that are known at one trace level, and their labels.

    Attributes:
      level: The trace level.
      owners: By identity each object, which is held so that no other can get it, and its label.
      strangers: Labels of objects that are no part of the root, in the order met, with the object
        if it was seen here.
      paths: Inside a transform, paths of labels for messages and filters.
    """

    def __init__(self) -> None:
        self.level = current_level()
        self.owners: dict[int, tuple[Any, Label]] = {}
        self.strangers: list[tuple[Stranger, Any]] = []
        self.paths: dict[Label, Path] = {}
        self._counts: dict[str, int] = {}

    def know(self, owner: Any, label: Label) -> None:
        """Gives an object a label."""
        self.owners.setdefault(id(owner), (owner, label))

    def label(self, owner: Any) -> Label:
        """Returns the label of an object; one that is met for the first time is a stranger."""
        found = self.owners.get(id(owner))
        if found is None:
            found = owner, self.new_stranger(type(owner).__name__, owner)
            self.owners[id(owner)] = found
        return found[1]

    def new_stranger(self, class_name: str, owner: Any = None) -> Stranger:
        """Returns the next label of a stranger of that class."""
        number = self._counts.get(class_name, 0)
        self._counts[class_name] = number + 1
        label = Stranger(class_name, number)
        self.strangers.append((label, owner))
        return label

    def as_stranger(self, label: Label) -> Stranger:
        """Returns a new label for an object whose place in the root is another's by now."""
        owner = next(owner for owner, known in self.owners.values() if known == label)
        return self.new_stranger(type(owner).__name__, owner)

    def path_of(self, owner: Any) -> Path:
        """Returns the path of an object from the root; that of a stranger is its class name."""
        _, label = self.owners.get(id(owner), (None, None))
        path = self.path(label)
        return (type(owner).__name__,) if path is None else path

    def path(self, label: Label | None) -> Path | None:
        return label if type(label) is tuple else self.paths.get(label)  # type: ignore[arg-type]

    def describe(self, owner: Any) -> str:
        """Writes which object it is, for messages."""
        _, label = self.owners.get(id(owner), (None, None))
        path, name = self.path(label), type(owner).__name__
        return name if path is None else f"{format_path(path)} ({name})"

    def _text(self, label: Label) -> str:
        path = self.path(label)
        return getattr(label, "class_name", "a module") if path is None else format_path(path)

    def describe_label(self, label: Label) -> str:
        """Writes which object has a label, for messages."""
        owners = (owner for owner, known in self.owners.values() if known == label)
        owner = next(owners, None)
        return self._text(label) if owner is None else self.describe(owner)

    def origins(
        self, clones: list[Any], unknown: Mapping[int, Any]
    ) -> Iterator[tuple[Stranger, Any]]:
        """Yields for each stranger where it is, if it lives on: see `Outcome.strangers`."""
        numbers = {id(clone): n for n, clone in unknown.items()}
        paths: dict[int, Below] | None = None
        for label, owner in self.strangers:
            if id(owner) in numbers:
                yield label, numbers[id(owner)]
            elif owner is None:
                yield label, None
            elif owner._level is not None and owner._level != self.level:
                yield label, ById(owner)
            else:  # it was made here, and may have become part of an argument
                paths = _places_below(clones) if paths is None else paths
                yield label, paths.get(id(owner)) or ById(owner)


def _places_below(clones: list[Any]) -> dict[int, Below]:
    """Returns where each object is that hangs on the clones by now, by identity."""
    holders = {n: clone for n, clone in enumerate(clones) if kind_of(clone) == OBJECT}
    found: dict[int, Below] = {}
    for number, holder in holders.items():
        for path, owner in object_paths(holder):
            found.setdefault(id(owner), Below(number, path))
    return found


def object_paths(root: Any) -> list[tuple[Path, Any]]:
    """Returns the path of each object at and below `root`, each once."""
    flat = flatten((root,))
    skeleton = flat.graphdef.skeleton
    paths = node_paths(skeleton, [((), skeleton.roots[0])])
    return [
        (path, flat.nodes[number])
        for number, path in paths.items()
        if kind_of(flat.nodes[number]) == OBJECT
    ]


def found(origin: Any, nodes: Nodes) -> Any:
    """Returns the object that a label of the inside speaks of, None if it is gone."""
    if type(origin) is int:
        return nodes[origin]()
    if type(origin) is ById:
        return origin.ref()
    if type(origin) is Below:
        return next((x for p, x in object_paths(nodes[origin.node]()) if p == origin.path), None)
    return None
