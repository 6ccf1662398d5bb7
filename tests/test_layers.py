"""The house's plan: a file of nnxlite imports only from rows above its own.

`ROWS` is that plan. A new file gets a place in it: the lowest row it could have without an import
pointing downwards is usually right. Files in one row do not import each other.
"""

import ast
from pathlib import Path

import pytest

import nnxlite

ROWS = [
    "_core.errors _core.versions _core.context _core.extras _core.intern _core.modes",
    "_core.arithmetic _core.oneline _core.traversals",
    "_core.trace _core.keyer _core.names _core.values _core.describe",
    "_core.node _core.function_keys _core.render _core.scope _core.placement",
    "_core.keys _core.treescope_view _core.display",
    "_core.statics",
    "_core.metadata",
    "_core.variable",
    "_core.variable_names _core.stand_in _core.kinds _core.sharding _core.filters _core.records",
    "_core.agreement _core.totals",
    "_core.graphdef _core.nested",
    "_core.statedef",
    "_core.graph _core.spots _core.outline _core.state",
    "_core.owners",
    "_core.recorded",
    "_core.build _core.plan _core.marks _core.state_forms _core.recording",
    "_core.split _core.clone _core.iterate _core.pytree _core.sowing",
    "_core.merge _core.pop _core.attributes _core.capture _core.trees",
    "_core.call _core.flat",
    "_core.module",
    "_core.containers _core.rngs",
    "_core.random_state",
    "_transforms.packing _transforms.arguments",
    "_transforms.axes",
    "_transforms.crossing",
    "_transforms.binding _transforms.changes _transforms.explain",
    "_transforms.traces _transforms.donation _transforms.stages _transforms.carries",
    "_transforms.differentiated _transforms.lift _transforms.roles _transforms.shardings",
    (
        "_transforms.derivatives _transforms.grad _transforms.compiled _transforms.mapped "
        "_transforms.parted _transforms.shapes _transforms.axis_metadata"
    ),
    (
        "_transforms.jit _transforms.likeness _transforms.abstract_model _transforms.observe "
        "_transforms.remat _transforms.vmap _transforms.pmap _transforms.ruled"
    ),
    (
        "_transforms.rules _transforms.jvp _transforms.partial _transforms.scan_body "
        "_transforms.shard_body _transforms.vjp _transforms.family"
    ),
    (
        "_transforms.custom_jvp _transforms.custom_vjp _transforms.scan _transforms.shard "
        "_transforms.checks _transforms.branches _transforms.loops"
    ),
    "_transforms.remat_scan",
    "_transforms.stacked",
]

# Users of the rooms above: each has rows of its own, and none knows of another.
WINGS = {
    "nn": [
        "dtypes flags initializers activations padding pooling masks subscripts bound",
        "statistics",
        "convolution transposed_convolution embedding batch_norm layer_norm group_norm",
        "prelu rotary stochastic weight_norm",
        "linear dot_product",
        "attention cells lora spectral_norm",
        "lstm recurrent",
    ],
    "training": ["metrics optimizer"],
    "profiling": [],
    "bridge": [],
}

# A verb that is offered as a method too lives below its class, which imports it when called.
WHEN_CALLED = {
    ("_core.graphdef", "_core.call"),
    ("_core.graphdef", "_core.outline"),
    ("_core.state", "_core.state_forms"),
}

# Public modules that only gather names; `nnxlite.nn` and the like are doors by their `__init__`.
DOORS = {
    *("errors", "nn.normalization", "sharding"),
    # The module paths of flax.nnx that programs import from.
    *("filterlib", "graph", "graphlib", "helpers", "module", "object", "pytreelib", "rnglib"),
    *("statelib", "traversals", "variablelib"),
}

PACKAGE = Path(nnxlite.__file__).parent


def rank_of_each_module() -> dict[str, int]:
    """Module name without `nnxlite.` -> its row; a wing's rows lie below all shared ones."""
    ranks = {name: row for row, names in enumerate(ROWS) for name in names.split()}
    for wing, rows in WINGS.items():
        for row, names in enumerate(rows, start=len(ROWS)):
            ranks |= {f"{wing}.{name}": row for name in names.split()}
    return ranks


RANKS = rank_of_each_module()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = sorted(module_name(path) for path in PACKAGE.rglob("*.py"))
ALL_DOORS = [name for name in MODULES if name in DOORS or name.split(".")[-1] == "__init__"]
ROOMS = [name for name in MODULES if name not in ALL_DOORS]


def parse(module: str) -> ast.Module:
    return ast.parse(PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text())


def imports(module: str) -> list[tuple[int, int, str]]:
    """(line, column, module without `nnxlite.`) of each import of nnxlite, wherever it is."""
    found: list[tuple[int, int, str]] = []
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, node.col_offset, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            source = str(node.module)
            # `from nnxlite._core import trace` names a module, `... trace import Level` does not.
            names = [f"{source}.{alias.name}" for alias in node.names]
            found += [
                (node.lineno, node.col_offset, name if is_module(name) else source)
                for name in names
            ]
    return [
        (line, column, name.removeprefix("nnxlite").removeprefix("."))
        for line, column, name in found
        if name.split(".")[0] == "nnxlite"
    ]


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.joinpath("__init__.py").exists()


def wing_of(module: str) -> str | None:
    top = module.split(".")[0]
    return top if top in WINGS else None


def test_each_room_has_a_row() -> None:
    unplanned = sorted(set(ROOMS) - set(RANKS))
    assert not unplanned, f"give these files a place in ROWS or WINGS: {unplanned}"


@pytest.mark.parametrize("module", ROOMS)
def test_imports_only_from_rows_above(module: str) -> None:
    for line, column, imported in imports(module):
        place = f"{module}:{line} imports {imported or 'nnxlite itself'}"
        assert imported in RANKS, f"{place}, which is no room with a row: import from the room"
        if (module, imported) in WHEN_CALLED:
            assert column > 0, f"{place} at the top, which is for when it is called"
            continue
        assert RANKS[imported] < RANKS[module], f"{place}, which is not in a row above"
        assert wing_of(imported) in {None, wing_of(module)}, f"{place}, which is another wing"


@pytest.mark.parametrize("door", ALL_DOORS)
def test_doors_hold_names_only(door: str) -> None:
    for statement in parse(door).body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        is_name = isinstance(statement, ast.Assign)
        assert is_text or is_import or is_name, f"{door}:{statement.lineno} holds logic"
