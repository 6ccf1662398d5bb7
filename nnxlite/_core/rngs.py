"""Named streams of random keys, as objects.

A *stream* holds a key and a count. Each call folds the count into the key, adds one to the count
and returns the result, so that no key is handed out twice. `Rngs` is a set of streams by name, with
one called `default` to stand in for names it lacks. Both are ordinary objects: their keys and
counts are Variables (`RngKey`, `RngCount`, whose `tag` is the stream's name), so a transform can
split, carry or donate them like any other state.

Old-style keys (`uint32` arrays) are stored as they are given, since they can be saved with numpy;
what a stream hands out is always a new-style key.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from nnxlite._core.filters import Filter, to_predicate
from nnxlite._core.module import Pytree
from nnxlite._core.variable import RngCount, RngKey, Variable

P = ParamSpec("P")
R = TypeVar("R")

Splits: TypeAlias = int | tuple[int, ...]
SplitsByFilter: TypeAlias = Mapping[Filter, Splits | None]


def _draw(sample: Callable[Concatenate[jax.Array, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Returns a method that calls a function of `jax.random` with the next key."""

    def method(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return sample(self(), *args, **kwargs)

    return _named_after(sample, method, "Draws with `jax.random.{}` and the next key.")


def _initialize(
    constructor: Callable[P, jax.nn.initializers.Initializer],
) -> Callable[Concatenate[Any, P], Callable[..., jax.Array]]:
    """Returns a method that makes an initializer which takes its keys from the stream."""

    def method(self: Any, *args: P.args, **kwargs: P.kwargs) -> Callable[..., jax.Array]:
        initializer = constructor(*args, **kwargs)
        return lambda *shape_dtype, **options: initializer(self(), *shape_dtype, **options)

    doc = "Returns `jax.nn.initializers.{}` as a function of shape and dtype, which draws its keys."
    return _named_after(constructor, method, doc)


def _named_after(function: Callable[..., Any], method: Any, doc: str) -> Any:
    functools.update_wrapper(method, function, assigned=("__name__",), updated=())
    method.__qualname__ = f"Draws.{method.__name__}"
    method.__doc__ = doc.format(method.__name__)
    return method


class Draws:
    """Random numbers and initial values, each from the next key of a stream."""

    __slots__ = ()

    ball = _draw(jax.random.ball)
    bernoulli = _draw(jax.random.bernoulli)
    beta = _draw(jax.random.beta)
    binomial = _draw(jax.random.binomial)
    bits = _draw(jax.random.bits)
    categorical = _draw(jax.random.categorical)
    cauchy = _draw(jax.random.cauchy)
    chisquare = _draw(jax.random.chisquare)
    choice = _draw(jax.random.choice)
    dirichlet = _draw(jax.random.dirichlet)
    double_sided_maxwell = _draw(jax.random.double_sided_maxwell)
    exponential = _draw(jax.random.exponential)
    f = _draw(jax.random.f)
    gamma = _draw(jax.random.gamma)
    generalized_normal = _draw(jax.random.generalized_normal)
    geometric = _draw(jax.random.geometric)
    gumbel = _draw(jax.random.gumbel)
    laplace = _draw(jax.random.laplace)
    loggamma = _draw(jax.random.loggamma)
    logistic = _draw(jax.random.logistic)
    lognormal = _draw(jax.random.lognormal)
    maxwell = _draw(jax.random.maxwell)
    multinomial = _draw(jax.random.multinomial)
    multivariate_normal = _draw(jax.random.multivariate_normal)
    normal = _draw(jax.random.normal)
    orthogonal = _draw(jax.random.orthogonal)
    pareto = _draw(jax.random.pareto)
    permutation = _draw(jax.random.permutation)
    poisson = _draw(jax.random.poisson)
    rademacher = _draw(jax.random.rademacher)
    randint = _draw(jax.random.randint)
    rayleigh = _draw(jax.random.rayleigh)
    t = _draw(jax.random.t)
    triangular = _draw(jax.random.triangular)
    truncated_normal = _draw(jax.random.truncated_normal)
    uniform = _draw(jax.random.uniform)
    wald = _draw(jax.random.wald)
    weibull_min = _draw(jax.random.weibull_min)

    delta_orthogonal = _initialize(jax.nn.initializers.delta_orthogonal)
    glorot_normal = _initialize(jax.nn.initializers.glorot_normal)
    glorot_uniform = _initialize(jax.nn.initializers.glorot_uniform)
    he_normal = _initialize(jax.nn.initializers.he_normal)
    he_uniform = _initialize(jax.nn.initializers.he_uniform)
    kaiming_normal = _initialize(jax.nn.initializers.kaiming_normal)
    kaiming_uniform = _initialize(jax.nn.initializers.kaiming_uniform)
    lecun_normal = _initialize(jax.nn.initializers.lecun_normal)
    lecun_uniform = _initialize(jax.nn.initializers.lecun_uniform)
    variance_scaling = _initialize(jax.nn.initializers.variance_scaling)
    xavier_normal = _initialize(jax.nn.initializers.xavier_normal)
    xavier_uniform = _initialize(jax.nn.initializers.xavier_uniform)


class RngStream(Draws, Pytree):
    """A stream of random keys.

    Args:
      key: A seed, a new-style key, or an old-style `uint32` key.
      tag: The stream's name, which filters match: `nnx.split(model, "dropout", ...)`.

    Attributes:
      key: The key that all others are made from; an array of keys once the stream is split.
      count: How many keys were handed out, `uint32` of the shape of `key`.

    Example:
      >>> stream = RngStream(0, tag="dropout")
      >>> key = stream()
      >>> bool(key == jax.random.fold_in(jax.random.key(0), 0)), int(stream.count[...])
      (True, 1)
      >>> stream.normal((2, 3)).shape
      (2, 3)
    """

    def __init__(self, key: ArrayLike, *, tag: str) -> None:
        key = _check_key(key, tag)
        self.tag = tag
        self.key = RngKey(key, tag=tag)
        self.count = RngCount(jnp.zeros(_new_style(key).shape, jnp.uint32), tag=tag)

    def __call__(self) -> jax.Array:
        """Returns the next key."""
        self.check_single()
        count = self.count.get_value()
        self.count.set_value(count + 1)  # first: a refused write hands out no key
        return jax.random.fold_in(_new_style(self.key.get_value()), count)

    def split(self, k: Splits) -> "RngStream":
        """Returns a stream of `k` keys (an int or a shape), all made from the next key."""
        return self._of(jax.random.split(self(), k))

    def fork(self, *, split: Splits | None = None) -> "RngStream":
        """Returns an independent stream that starts from the next key, split if asked for."""
        return self._of(self()) if split is None else self.split(split)

    def broadcast(self, k: Splits) -> "RngStream":
        """Returns a stream of keys of shape `k`, each equal to the next key."""
        return self._of(jnp.broadcast_to(self(), (k,) if isinstance(k, int) else k))

    def check_single(self) -> None:
        """Raises `ValueError` if the stream was split, so that it has no next key."""
        shape = self.count.get_value().shape
        if shape:
            raise ValueError(
                f"The random stream {self.tag!r} was split into keys of shape {shape}, so it "
                "has no next key. Use it inside nnx.vmap or nnx.scan, which take one key per call, "
                "or undo the split with nnx.restore_rngs."
            )

    def _of(self, key: jax.Array) -> "RngStream":
        return type(self)(key_like(key, self.key.get_value()), tag=self.tag)


class Rngs(Draws, Pytree):
    """Random streams by name.

    A name that was not given stands for the stream `default`, if there is one. Calling the object
    itself, or one of its draws (`rngs.normal(shape)`), takes the next key of `default`.

    Args:
      default: The seed or key of the stream `default`; or a mapping of names to seeds and keys.
      **rngs: Seeds or keys of other streams. Of a stream its first key is taken, not its count.

    Example:
      >>> rngs = nnx.Rngs(0, dropout=jax.random.key(1))
      >>> list(rngs), "params" in rngs
      (['dropout', 'default'], False)
      >>> key = rngs.params()  # there is no stream 'params': `default` hands out the key
      >>> int(rngs.default.count[...]), int(rngs.dropout.count[...])
      (1, 0)
      >>> rngs.uniform((3,)).shape
      (3,)
    """

    def __init__(
        self,
        default: ArrayLike | RngStream | Mapping[str, Any] | None = None,
        **rngs: ArrayLike | RngStream,
    ) -> None:
        if isinstance(default, Mapping):
            rngs = {**default, **rngs}
        elif default is not None:
            rngs["default"] = default
        for name, key in rngs.items():
            if isinstance(key, RngStream):
                key = key.key.get_value()
            setattr(self, name, RngStream(key, tag=name))

    def __call__(self) -> jax.Array:
        """Returns the next key of the stream `default`."""
        return self["default"]()

    def __getitem__(self, name: str) -> RngStream:
        stream = self._find(name)
        if stream is None:
            raise KeyError(self._missing(name))
        return stream

    def __getattr__(self, name: str) -> RngStream:
        # Reached for names that are not set. Those with an underscore are asked for by tools
        # (copy, pickle, notebooks) and never mean a stream.
        stream = None if name.startswith("_") else self._find(name)
        if stream is None:
            raise AttributeError(self._missing(name))
        return stream

    def __contains__(self, name: object) -> bool:
        return name in vars(self)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items())

    def __len__(self) -> int:
        return sum(1 for _ in self.items())

    def items(self) -> Iterator[tuple[str, RngStream]]:
        """Yields the streams with their names."""
        for name, value in vars(self).items():
            if isinstance(value, RngStream):
                yield name, value

    def split(self, k: Splits | SplitsByFilter) -> "Rngs":
        """Returns streams of many keys each, for a transform to map over.

        Args:
          k: The number or shape of keys for every stream, or a mapping of filters to it; the first
            filter that matches counts. A stream that none matches, or whose value is None, is not
            split: the result has one that starts anew from the same key.

        Example:
          >>> rngs = nnx.Rngs(params=0, dropout=1).split({"params": 5, ...: (2, 3)})
          >>> rngs.params.key.shape, rngs.dropout.key.shape
          ((5,), (2, 3))
        """
        return self._each(k, RngStream.split, lambda stream: stream)

    def broadcast(self, k: Splits | SplitsByFilter | None) -> "Rngs":
        """Returns streams of equal keys: `split`, but each key of a stream is the same."""
        return self._each(k, RngStream.broadcast, lambda stream: stream)

    def fork(self, *, split: Splits | SplitsByFilter | None = None) -> "Rngs":
        """Returns independent streams of the same names, split where asked for.

        Args:
          split: As in `Rngs.split`, for the streams that shall be split too.

        Example:
          >>> rngs = nnx.Rngs(0)
          >>> bool(rngs.fork().params() == rngs.params())
          False
        """
        return self._each(split, RngStream.split, RngStream.fork)

    def _each(
        self,
        k: Splits | SplitsByFilter | None,
        divide: Callable[[RngStream, Splits], RngStream],
        otherwise: Callable[[RngStream], RngStream],
    ) -> "Rngs":
        rules = splits_by_predicate(k)
        streams: dict[str, RngStream] = {}
        for name, stream in self.items():
            found = next((n for matches, n in rules if matches((), stream)), None)
            streams[name] = otherwise(stream) if found is None else divide(stream, found)
        return Rngs(**streams)

    def _find(self, name: str) -> RngStream | None:
        streams = vars(self)
        return streams.get(name, streams.get("default"))

    def _missing(self, name: str) -> str:
        return (
            f"Rngs has no stream {name!r}; its streams are {sorted(self)}. Give it one, as in "
            f"nnx.Rngs({name}=0), or a default for all names, as in nnx.Rngs(0)."
        )


def splits_by_predicate(
    k: Splits | SplitsByFilter | None,
) -> list[tuple[Callable[[Any, Any], bool], Splits | None]]:
    """Returns (predicate, number or shape) pairs; `k` without filters is meant for every stream."""
    rules = k if isinstance(k, Mapping) else {...: k}
    return [(to_predicate(filter), n) for filter, n in rules.items()]


def key_like(key: jax.Array, old: Any) -> jax.Array:
    """Returns `key` in the style, old or new, of the key `old`."""
    return key if _is_new_style(old) else jax.random.key_data(key)


def _new_style(key: Any) -> jax.Array:
    return key if _is_new_style(key) else jax.random.wrap_key_data(key)


def _is_new_style(key: Any) -> bool:
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def _check_key(key: Any, tag: str) -> jax.Array:
    """Returns `key` as a JAX array that is a new-style or old-style key."""
    if isinstance(key, Variable):
        key = key.get_value()
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return jax.random.key(operator.index(key))
    if isinstance(key, jax.Array | np.ndarray):
        if _is_new_style(key) or (key.dtype == jnp.uint32 and key.ndim):
            return jnp.asarray(key)
        if jnp.issubdtype(key.dtype, jnp.integer) and not key.ndim:
            return jax.random.key(key)
    is_array = isinstance(key, jax.Array | np.ndarray)
    found = f"{key.dtype}{list(key.shape)}" if is_array else f"{key!r}"
    raise ValueError(
        f"Cannot make the random stream {tag!r} from {found} of type {type(key).__name__}. "
        "Expected a seed (int), a key such as jax.random.key(0), or another stream."
    )
