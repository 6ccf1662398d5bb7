"""What the benchmark must show, as data.

A gate compares columns of one row: `nnxlite / raw` from above, `flax / nnxlite` and
`equinox / nnxlite` from below; `(nnxlite - 200us) / raw` where a fixed cost is allowed. Limits are
by size, in leaves; `ANY` is every size, and that of the rows that have only one. A gate on a row
whose control failed is not judged.
"""

from __future__ import annotations

import dataclasses
import math

ANY = "any"


@dataclasses.dataclass(frozen=True)
class Gate:
    """One requirement.

    Attributes:
      row: Name of the row.
      ratio: What is compared, as `ratio_of` takes it.
      limits: By size; `ANY` stands for sizes that are not named.
      aim: Stricter limits that are shown, never failed.
    """

    row: str
    ratio: str
    limits: dict[int | str | None, float]
    aim: dict[int | str | None, float] = dataclasses.field(default_factory=dict)

    def limit_at(self, size: int | None) -> float | None:
        """The limit for a size, or `None` where the gate does not apply."""
        return self.limits.get(size, self.limits.get(ANY))

    def passes(self, measured: float, limit: float) -> bool:
        return measured <= limit if self.ratio in AT_MOST else measured >= limit

    def described(self, size: int | None) -> str:
        """The requirement in words, such as `nnxlite/raw <= 1.25 (aim 1.1)`."""
        sign = "<=" if self.ratio in AT_MOST else ">="
        aim = self.aim.get(size, self.aim.get(ANY))
        text = f"{self.ratio} {sign} {self.limit_at(size):g}"
        return text if aim is None else f"{text} (aim {aim:g})"


OVER_RAW = "nnxlite/raw"
OF_FLAX = "flax/nnxlite"
OF_EQUINOX = "equinox/nnxlite"
OVERHEAD = "(flax-raw)/(nnxlite-raw)"
BEYOND = "(nnxlite-200us)/raw"
BEYOND_US = 200
AT_MOST = (OVER_RAW, BEYOND)


def ratio_of(name: str, us: dict[str, float]) -> float | None:
    """The ratio from medians by column, or `None` where a column is missing."""
    if name == OVERHEAD:
        if not {"raw", "nnxlite", "flax"} <= us.keys():
            return None
        over = us["nnxlite"] - us["raw"]
        return (us["flax"] - us["raw"]) / over if over > 0 else math.inf
    if name == BEYOND:
        return (us["nnxlite"] - BEYOND_US) / us["raw"] if {"raw", "nnxlite"} <= us.keys() else None
    above, below = name.split("/")
    return us[above] / us[below] if above in us and below in us else None


GATES = (
    # nnx.jit
    Gate("no-op", OVER_RAW, {72: 1.6, 282: 1.55, 702: 1.35}, aim={72: 1.4, 282: 1.35, 702: 1.2}),
    Gate("no-op", OF_FLAX, {702: 60}, aim={702: 100}),
    Gate("no-op", OF_EQUINOX, {72: 3, 282: 3, 702: 3}, aim={ANY: 4}),
    Gate("Adam step", OVER_RAW, {ANY: 1.25}, aim={72: 1.15, 282: 1.10, 702: 1.10, 2802: 1.10}),
    Gate("Adam step", OF_FLAX, {72: 8, 282: 8, 702: 5}),
    Gate("Adam step", OVERHEAD, {702: 30}, aim={702: 60}),
    Gate("Adam step", OF_EQUINOX, {72: 1.6, 282: 1.6, 702: 1.6}, aim={ANY: 2}),
    Gate("Adam step, donated", OVER_RAW, {ANY: 1.25}),
    Gate("Adam step, optax", OVER_RAW, {ANY: 1.25}),
    # functions of States
    Gate("split", OF_FLAX, {ANY: 100}),
    Gate("split, fresh model each call", OF_FLAX, {ANY: 5}),
    Gate("state(Param)", OF_FLAX, {ANY: 100}),
    Gate("update", OF_FLAX, {ANY: 40}),
    Gate("merge", OF_FLAX, {ANY: 5}),
    Gate("clone", OF_FLAX, {ANY: 6}),
    Gate("clone(share=True)", OF_FLAX, {ANY: 20}),
    # plain JAX
    Gate("jax.jit(State)", OVER_RAW, {72: 2.9, 282: 3.0, 702: 3.0, 2802: 3.8}),
    Gate("jax.jit(State)", OF_FLAX, {ANY: 1.9}),
    Gate("jax.jit(State), three metadata", OF_FLAX, {ANY: 2.2}),
    Gate("jax.jit(State) -> State", OVER_RAW, {ANY: 1.8}),
    Gate("jax.jit(State) -> State", OF_FLAX, {ANY: 2.0}),
    Gate("jitted adam over States", OVER_RAW, {ANY: 1.9}),
    Gate("jitted adam over States", OF_FLAX, {72: 1.8, 282: 1.8, 702: 1.5}),
    Gate("jax.tree.map(State)", OF_FLAX, {ANY: 3.2}),
    Gate("jax.jit(Module)", OVER_RAW, {ANY: 3.0}),
    Gate("jax.jit(Module)", OF_FLAX, {ANY: 6.5}),
    Gate("jax.jit(Module) -> Module", OVER_RAW, {ANY: 2.5}),
    Gate("jax.jit(Module) -> Module", OF_FLAX, {ANY: 4, 2802: 2.8}),
    Gate("jax.tree.leaves(Module)", OF_FLAX, {ANY: 10}),
    Gate("jax.tree.map(Module)", OF_FLAX, {ANY: 6}),
    Gate("trace jax.jit(State)", OVER_RAW, {ANY: 2.0}),
    Gate("trace jax.jit(State)", OF_FLAX, {ANY: 1.35}),
    Gate("trace jax.jit(Module)", OVER_RAW, {ANY: 2.0}),
    Gate("trace jax.jit(Module)", OF_FLAX, {ANY: 2.7}),
    # the other transforms
    Gate("eager vmap", BEYOND, {ANY: 2.0}),
    Gate("eager scan", BEYOND, {ANY: 2.0}),
    Gate("eager remat", BEYOND, {ANY: 2.0}),
    Gate("eager cond", BEYOND, {ANY: 2.0}),
    Gate("eager while_loop", BEYOND, {ANY: 2.0}),
    Gate("eager fori_loop", BEYOND, {ANY: 2.0}),
    # once
    Gate("eager forward, 24 blocks", OVER_RAW, {ANY: 1.1}),
    Gate("lower forward, 24 blocks", OVER_RAW, {ANY: 1.2}, aim={ANY: 1.1}),
    Gate("lower Adam step, 24 blocks", OVER_RAW, {ANY: 1.2}, aim={ANY: 1.05}),
    Gate("import", OVER_RAW, {ANY: 1.25}),
    # memory
    Gate("output bytes, forward", OVER_RAW, {ANY: 1.0}),
    Gate("output bytes, Adam step", OVER_RAW, {ANY: 1.0}),
    Gate("temp bytes, Adam step", OVER_RAW, {ANY: 1.05}),
    Gate("temp bytes, gradient through scan", OVER_RAW, {ANY: 1.05}),
    Gate("temp bytes, gradient through scan of remat", OVER_RAW, {ANY: 1.05}),
    Gate("temp bytes, gradient through remat_scan", OVER_RAW, {ANY: 1.05}),
    Gate("temp bytes, gradient through Stacked", OVER_RAW, {ANY: 1.05}),
    Gate("temp bytes, gradient through Stacked, remat", OVER_RAW, {ANY: 1.05}),
)
