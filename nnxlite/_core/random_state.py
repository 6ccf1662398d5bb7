"""Splits, forks, reseeds and restores the random streams of a whole object graph.

A transform that maps over an axis needs one key per entry. `split_rngs` gives every stream found in
its arguments that many keys, in place, and takes them back afterwards; `with_rngs` does it on a
copy. Which streams are meant is told by a filter, matched against the key and the count of each.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from nnxlite._core import iterate
from nnxlite._core.errors import Path, format_path
from nnxlite._core.filters import Everything, Filter, Predicate, to_predicate
from nnxlite._core.modes import graph_flag, mode_flags
from nnxlite._core.rngs import (
    Rngs,
    RngStream,
    Splits,
    SplitsByFilter,
    key_like,
    splits_by_predicate,
)
from nnxlite._core.trace import check_writable

F = TypeVar("F", bound=Callable[..., Any])
Tree = TypeVar("Tree")

StreamBackup: TypeAlias = tuple[RngStream, jax.Array, jax.Array]
_MISSING = object()

ReseedPolicy: TypeAlias = Callable[[Path, jax.Array, tuple[int, ...]], jax.Array]


class SplitBackups:
    """The keys and counts that streams had before; a context manager that restores them."""

    def __init__(self, backups: Iterable[StreamBackup]) -> None:
        self.backups = list(backups)

    def __iter__(self) -> Iterator[StreamBackup]:
        return iter(self.backups)

    def __enter__(self) -> "SplitBackups":
        return self

    def __exit__(self, *exception: object) -> None:
        restore_rngs(self)


@overload
def split_rngs(
    node: object,
    /,
    *,
    splits: Splits,
    only: Filter = ...,
    squeeze: bool = False,
) -> SplitBackups: ...
@overload
def split_rngs(
    *,
    splits: Splits,
    only: Filter = ...,
    squeeze: bool = False,
) -> Callable[[F], F]: ...
@mode_flags("It works in place; nnx.with_rngs(node, split=n) returns a copy.")
def split_rngs(
    node: Any = _MISSING,
    /,
    *,
    splits: Splits,
    only: Filter = ...,
    squeeze: bool = False,
) -> Any:
    """Gives the random streams of a graph one key per entry of a new leading axis.

    With a graph as argument it changes the streams in place and returns what they were; as a
    decorator it does so for the arguments of each call, and restores them after it.

    Args:
      node: The graph: an object, or a tuple, list or dict of objects.
      splits: The number of keys, or a shape.
      only: Which streams; the default is all.
      squeeze: Drop the new axis, with `splits=1`: one new key.

    Returns:
      The backups, to be given to `restore_rngs` or used as a context manager; or a decorator.

    Raises:
      ValueError: `squeeze` without `splits=1`.
      TraceLevelError: A stream belongs to another trace level; nothing was changed.

    Example:
      >>> rngs = nnx.Rngs(params=0, dropout=1)
      >>> with nnx.split_rngs(rngs, splits=5, only="params"):
      ...     rngs.params.key.shape, rngs.dropout.key.shape
      ((5,), ())
      >>> @nnx.split_rngs(splits=3)
      ... def shapes(rngs):
      ...     return rngs.params.key.shape
      >>> shapes(rngs), rngs.params.key.shape
      ((3,), ())
    """
    if squeeze and splits != 1:
        raise ValueError(f"squeeze=True needs splits=1, found splits={splits}.")
    predicate = to_predicate(only)
    if node is _MISSING:
        return _for_arguments(lambda arguments: _split_all(arguments, predicate, splits, squeeze))
    return _split_all(node, predicate, splits, squeeze)


@overload
def fork_rngs(
    node: object,
    /,
    *,
    split: Splits | SplitsByFilter | None = None,
) -> SplitBackups: ...
@overload
def fork_rngs(
    *,
    split: Splits | SplitsByFilter | None = None,
) -> Callable[[F], F]: ...
@mode_flags("It works in place; nnx.with_rngs(node, fork=...) returns a copy.")
def fork_rngs(
    node: Any = _MISSING,
    /,
    *,
    split: Splits | SplitsByFilter | None = None,
) -> Any:
    """Lets the random streams of a graph go on from new keys, in place.

    With a graph as argument it returns what they were; as a decorator it forks the streams of the
    arguments of each call, and restores them after it.

    Args:
      node: The graph: an object, or a tuple, list or dict of objects.
      split: The number or shape of keys for each stream (None: one key), or a mapping of filters
        to it; then only the streams that match are forked.

    Example:
      >>> rngs = nnx.Rngs(0)
      >>> with nnx.fork_rngs(rngs):
      ...     inner = rngs()
      >>> bool(inner == rngs())
      False
    """
    rules = splits_by_predicate(split)
    if node is _MISSING:
        return _for_arguments(lambda arguments: _fork_all(arguments, rules))
    return _fork_all(node, rules)


@overload
def with_rngs(
    node: Tree,
    /,
    *,
    split: Splits | SplitsByFilter | None = None,
    fork: Filter = None,
    broadcast: Splits | SplitsByFilter | None = None,
    only: Filter = True,
) -> Tree: ...
@overload
def with_rngs(
    *,
    split: Splits | SplitsByFilter | None = None,
    fork: Filter = None,
    broadcast: Splits | SplitsByFilter | None = None,
    only: Filter = True,
) -> Callable[[F], F]: ...
@mode_flags()
def with_rngs(
    node: Any = _MISSING,
    /,
    *,
    split: Splits | SplitsByFilter | None = None,
    fork: Filter = None,
    broadcast: Splits | SplitsByFilter | None = None,
    only: Filter = True,
) -> Any:
    """Returns a copy of a graph whose random streams are split, broadcast or forked.

    The streams of the original hand out one key each for it. Everything else, and each stream that
    no rule matches, is shared with the original. Without a graph it is a decorator that does so
    for the arguments of each call.

    Args:
      node: The graph: an object, or a tuple, list or dict of objects.
      split: The number or shape of keys, or a mapping of filters to it.
      fork: A filter, or a list of them, of the streams that go on from one new key.
      broadcast: As `split`, for streams whose keys shall all be equal.
      only: The streams that are looked at.

    Raises:
      ValueError: A stream matches two rules that both name more than `...`.

    Example:
      >>> rngs = nnx.Rngs(params=0, dropout=1)
      >>> copy = nnx.with_rngs(rngs, split={"params": 4}, fork=...)
      >>> copy.params.key.shape, copy.dropout.key.shape, rngs.params.key.shape
      ((4,), (), ())
    """
    forked: Sequence[Filter] = fork if isinstance(fork, list | tuple) else (fork,)
    rules = [
        *((matches, "split", n) for matches, n in splits_by_predicate(split)),
        *((matches, "broadcast", n) for matches, n in splits_by_predicate(broadcast)),
        *((to_predicate(filter), "fork", ()) for filter in forked),
    ]
    chosen = to_predicate(only)

    def copied(tree: Any) -> Any:
        tree = iterate.around_same_leaves(tree)
        for path, stream in list(_streams(tree)):
            if chosen(path, stream):
                new = _apply_rule(path, stream, rules)
                stream.key, stream.count = new.key, new.count
        return tree

    if node is not _MISSING:
        return copied(node)

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = copied((args, kwargs))
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]  # wraps keeps the signature

    return decorate


@graph_flag
def reseed(
    node: object,
    /,
    *,
    policy: Literal["scalars_only", "match_shape"] | ReseedPolicy = "scalars_only",
    **stream_keys: ArrayLike | RngStream,
) -> None:
    """Starts the random streams of a graph anew, from given seeds or keys.

    Streams of one name get keys that differ. Nothing is changed if one of them cannot be reseeded.

    Args:
      node: The graph: an object, or a tuple, list or dict of objects.
      policy: What to do with a stream of many keys: raise (`"scalars_only"`), split the new key
        into that shape (`"match_shape"`), or call `(path, new key, shape) -> keys`.
      **stream_keys: A seed or key for each stream name.

    Raises:
      ValueError: A stream has many keys, with the policy `"scalars_only"`.

    Example:
      >>> model = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
      >>> nnx.reseed(model, dropout=42)
      >>> first = model(jnp.ones(8))
      >>> nnx.reseed(model, dropout=42)
      >>> bool((model(jnp.ones(8)) == first).all())
      True
    """
    if policy == "scalars_only":
        make_key = _scalars_only
    elif policy == "match_shape":
        make_key = _match_shape
    elif callable(policy):
        make_key = policy
    else:
        raise ValueError(
            f"Unknown policy {policy!r}. Expected 'scalars_only', 'match_shape' or a callable of "
            "(path, key, shape)."
        )
    rngs = Rngs(**stream_keys)
    writes: list[StreamBackup] = []
    for path, stream in _streams(node):
        if stream.tag in stream_keys:
            key = make_key(path, rngs[stream.tag](), stream.count.shape)
            writes.append((stream, key, jnp.zeros(key.shape, jnp.uint32)))
    _write(writes)


def restore_rngs(backups: Iterable[StreamBackup], /) -> None:
    """Puts back the keys and counts that `split_rngs` or `fork_rngs` replaced."""
    for stream, key, count in backups:
        stream.key.set_value(key)
        stream.count.set_value(count)


def _split_all(node: Any, predicate: Predicate, splits: Splits, squeeze: bool) -> SplitBackups:
    def divide(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, splits)
        return keys[0] if squeeze else keys

    return _replace_keys((stream, divide) for _, stream in _streams(node, predicate))


def _fork_all(node: Any, rules: list[tuple[Predicate, Splits | None]]) -> SplitBackups:
    changes = []
    for path, stream in _streams(node):
        for predicate, n in rules:
            if _matches(predicate, path, stream):
                changes.append((stream, functools.partial(_fork_key, n=n)))
                break
    return _replace_keys(changes)


def _fork_key(key: jax.Array, n: Splits | None) -> jax.Array:
    return key if n is None else jax.random.split(key, n)


def _replace_keys(
    changes: Iterable[tuple[RngStream, Callable[[jax.Array], jax.Array]]],
) -> SplitBackups:
    """Draws a key from each stream, and puts what the function makes of it in its place."""
    changes = list(changes)
    _check_all_writable(stream for stream, _ in changes)
    for stream, _ in changes:
        stream.check_single()
    keys = [change(stream()) for stream, change in changes]
    backups = [(stream, stream.key.get_value(), stream.count.get_value()) for stream, _ in changes]
    _write(
        (stream, key, jnp.zeros(key.shape, jnp.uint32))
        for (stream, _), key in zip(changes, keys, strict=True)
    )
    return SplitBackups(backups)


def _write(writes: Iterable[StreamBackup]) -> None:
    writes = list(writes)
    _check_all_writable(stream for stream, _, _ in writes)
    for stream, key, count in writes:
        stream.key.set_value(key_like(key, stream.key.get_value()))
        stream.count.set_value(count)


def _check_all_writable(streams: Iterable[RngStream]) -> None:
    for stream in streams:
        for variable in (stream.key, stream.count):
            check_writable(variable, f"replace the keys of the random stream {stream.tag!r}")


def _streams(node: Any, predicate: Predicate | None = None) -> Iterator[tuple[Path, RngStream]]:
    for path, value in iterate.iter_graph(node):
        if not isinstance(value, RngStream):
            continue
        if predicate is None or _matches(predicate, path, value):
            yield path, value


def _matches(predicate: Predicate, path: Path, stream: RngStream) -> bool:
    return predicate((*path, "key"), stream.key) and predicate((*path, "count"), stream.count)


def _apply_rule(
    path: Path, stream: RngStream, rules: list[tuple[Predicate, str, Any]]
) -> RngStream:
    found: dict[str, tuple[Predicate, Any]] = {}
    for predicate, rule, n in rules:
        if rule not in found and predicate(path, stream):
            found[rule] = (predicate, n)
    found = {rule: (predicate, n) for rule, (predicate, n) in found.items() if n is not None}
    named = [rule for rule, (predicate, _) in found.items() if predicate != Everything()]
    if len(named) > 1:
        raise ValueError(
            f"The random stream at {format_path(path, 'node')} matches the rules "
            f"{' and '.join(named)}. Make their filters exclude each other."
        )
    for rule, divide in (("split", RngStream.split), ("broadcast", RngStream.broadcast)):
        if rule in found:
            return divide(stream, found[rule][1])
    return stream.fork() if "fork" in found else stream


def _for_arguments(enter: Callable[[Any], SplitBackups]) -> Callable[[F], F]:
    """Returns a decorator that runs `enter` on the arguments of each call, as a context."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with enter((args, kwargs)):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]  # wraps keeps the signature

    return decorate


def _scalars_only(path: Path, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if shape:
        raise ValueError(
            f"The random stream at {format_path(path, 'node')} has keys of shape {shape}. Reseed "
            "it with policy='match_shape', which splits the new key, or with a policy of your own."
        )
    return key


def _match_shape(path: Path, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.split(key, shape) if shape else key
