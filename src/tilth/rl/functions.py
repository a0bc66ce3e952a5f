"""Make registry entries of a user's plain functions: argument names are columns, keyword arguments are options.

Arguments without a default name the columns that the function needs; keyword arguments with a default are its options,
checked by their annotation (or else by the type of the default). Every call checks the result; an exception is reported
with file and line.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import torch
from pydantic import Field, create_model
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from torch import Tensor

from tilth.config.code import describe
from tilth.config.flows import SHARED_OPTIONS
from tilth.config.plugins import Declaration
from tilth.config.schema import AlgorithmConfig
from tilth.core.errors import PluginError, TilthError
from tilth.rl.estimators import Advantage, RowAdvantage, Rows, Tokens
from tilth.rl.policy_losses import LossInputs, PolicyLoss, TokenLosses
from tilth.rl.registry import Entry, nearest

ROW_COLUMNS = ("rewards", "groups", "counts", "baselines")
"""Columns with one value for each row that a function over rows can ask for."""
TOKEN_COLUMNS = ("values", "logprobs", "ref_logprobs", "sum_pi_squared", "versions")
"""Columns with one value for each token that a function over tokens can ask for."""
METRICS = "plugin/"
"""Prefix of the metrics that a declared loss returns."""
PART = "part_"
"""Prefix of an argument that is a part of the reward: ``part_style`` is the part that a reward returns as ``style``."""
LOSS_COLUMNS = ("logprobs", "old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs", "versions", "lengths")
"""Columns that a policy loss can ask for. Importance weights multiply what it returns, so it does not see them."""


def advantage_entry(declaration: Declaration) -> type[Entry]:
    """Return the entry of a declared estimator: a class as it is, a function over rows or over tokens by its arguments.

    Over rows: [n] -> float64 [n], all columns of ``ROW_COLUMNS``, rows of all workers without those whose reward is
    missing. Over tokens, where it asks for one of ``TOKEN_COLUMNS`` or ``lengths``: tokens that the policy chose,
    packed, [tokens] -> [tokens] or (advantages, returns); ``rewards`` is then float64 [tokens], ``lengths`` int64 [n].
    It sees the rows of one worker, so it can ask for no groups: statistics of groups or batches are for functions over
    rows.
    Raises PluginError: an argument that is no column, an option without a default.
    """
    if inspect.isclass(declaration.value):
        return _class(declaration, Advantage)
    needs, options = _arguments(declaration, (*ROW_COLUMNS, *TOKEN_COLUMNS, "lengths"))
    over_tokens = any(name in (*TOKEN_COLUMNS, "lengths") for name in needs)
    if over_tokens and "groups" in needs:
        why = (
            "it sees the tokens of one worker, where groups may be cut; take the groups in a function over rows, or "
            "extend tilth.rl.advantages.Advantage"
        )
        raise _wrong(declaration, "groups", why)
    return _entry(declaration, _TokenFunction if over_tokens else _RowFunction, needs, options)


def loss_entry(declaration: Declaration) -> type[Entry]:
    """Return the entry of a declared policy loss: a class as it is, or a function of columns [tokens] of the tokens
    that the policy chose, which returns the loss of each token, or (loss, {metric: column [tokens]}). Only ``logprobs``
    has a gradient.

    Raises PluginError: an argument that is no column, an option without a default.
    """
    if inspect.isclass(declaration.value):
        return _class(declaration, PolicyLoss)
    needs, options = _arguments(declaration, LOSS_COLUMNS)
    if "logprobs" not in needs:
        raise _wrong(declaration, "logprobs", "it has no argument 'logprobs', so it would have no gradient")
    return _entry(declaration, _LossFunction, needs, options)


class _Function(Entry):
    """Base of entries made of a function."""

    function: ClassVar[Callable[..., Any]]
    declaration: ClassVar[Declaration]
    columns: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]]

    @property
    def finite(self) -> tuple[str, ...]:
        """Baselines and parts of the reward: a row where one is missing is missing."""
        return tuple(name for name in self.columns if name == "baselines" or name.startswith("part/"))


class _RowFunction(_Function, RowAdvantage):
    @property
    def needs(self) -> tuple[str, ...]:
        """Its arguments without ``counts``, which always exist."""
        return tuple(name for name in self.columns if name != "counts")

    @property
    def weighs(self) -> bool:
        return "counts" in self.columns

    def rows(self, rows: Rows) -> Tensor:
        known = {**rows.columns, "rewards": rows.scores, "counts": rows.counts}
        given = {name: cast(Tensor, known[name])[rows.valid] for name in self.columns}
        found = _call(self, given)
        _check(self, found, "advantages", "rows", int(rows.valid.sum()))
        return torch.zeros_like(rows.scores).masked_scatter(rows.valid, found.to(torch.float64))


class _TokenFunction(_Function, Advantage):
    @property
    def needs(self) -> tuple[str, ...]:
        """Its arguments without ``counts`` and ``lengths``, which always exist."""
        return tuple(name for name in self.columns if name not in ("counts", "lengths"))

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        counts = tokens.packing.counts
        rows = {"lengths": counts, "counts": counts, **tokens.rows.columns}
        given = {name: tokens.chosen(name) if name in TOKEN_COLUMNS else rows.get(name) for name in self.columns}
        if "rewards" in given:
            given["rewards"] = tokens.rewards[tokens.packing.mask]
        count = int(tokens.packing.mask.sum())
        advantages, returns = _pair(self, _call(self, given), None, "(advantages, returns)")
        _check(self, advantages, "advantages", "tokens", count)
        if returns is not None:
            _check(self, returns, "returns", "tokens", count)
            returns = tokens.scatter(returns.to(torch.float64))
        return tokens.scatter(advantages.to(torch.float64)), returns


class _LossFunction(_Function, PolicyLoss):
    @property
    def needs(self) -> tuple[str, ...]:
        always = super().needs
        return (*always, *(name for name in self.columns if name not in always and name != "lengths"))

    @property
    def takes_ratio(self) -> bool:
        return "old_logprobs" in self.columns

    def tokens(self, step: LossInputs) -> TokenLosses:
        mask, columns = step.packing.mask, {**step.columns, "logprobs": step.logprobs}
        given = {name: step.packing.counts if name == "lengths" else columns[name][mask] for name in self.columns}
        losses, metrics = _pair(self, _call(self, given), {}, "(loss, {metric: column})")
        if not isinstance(metrics, dict):
            why = f"its metrics are a {type(metrics).__name__}, not a dictionary of columns"
            raise _wrong(self.declaration, "metrics", why)
        for name, column in {"loss": losses, **metrics}.items():
            _check(self, column, name, "tokens", int(mask.sum()), floats=name == "loss")
        if step.logprobs.requires_grad and not losses.requires_grad:
            why = "its loss does not depend on logprobs, so it has no gradient"
            raise _wrong(self.declaration, "loss.gradient", why)
        zeros = torch.zeros_like(step.logprobs)
        spread = {f"{METRICS}{name}": zeros.masked_scatter(mask, c.detach().to(zeros)) for name, c in metrics.items()}
        return zeros.masked_scatter(mask, losses.to(zeros)), spread


def _wrong(declaration: Declaration, key: str, why: str) -> PluginError:
    """Return the error of a declaration. key: the part of it that is wrong."""
    return PluginError(f"{declaration.title}: {why}", key=f"{declaration.name}.{key}")


def _class(declaration: Declaration, base: type[Entry]) -> type[Entry]:
    if not issubclass(declaration.value, base):
        raise _wrong(declaration, "class", f"it is no subclass of {base.__module__}.{base.__name__}")
    return cast(type[Entry], declaration.value)


def _arguments(declaration: Declaration, columns: Iterable[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of the columns, and pydantic fields of the options."""
    needs, options = [], {}
    for name, parameter in inspect.signature(declaration.value).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _wrong(declaration, name, f"*{name} names no columns or options; list them one by one")
        if parameter.kind is not parameter.KEYWORD_ONLY:
            if name not in columns and not name.startswith(PART):
                option = parameter.default is not parameter.empty
                hint = "; an option is keyword-only: write it after *" if option else nearest(name, columns)
                raise _wrong(declaration, name, f"no column {name!r}{hint}")
            needs.append(name.replace(PART, "part/", 1) if name.startswith(PART) else name)
        elif name in AlgorithmConfig.model_fields and name not in SHARED_OPTIONS:
            raise _wrong(declaration, name, f"option {name!r} has the name of the key algorithm.{name}; rename it")
        elif parameter.default is parameter.empty:
            why = f"option {name!r} needs a default, as in {name}: float = 0.5"
            raise _wrong(declaration, f"{name}.default", why)
        elif name.startswith("_") or hasattr(Entry, name):
            why = f"option {name!r} has a name that estimators and losses use; rename it"
            raise _wrong(declaration, f"{name}.reserved", why)
        else:
            known = parameter.annotation is not parameter.empty
            kind = parameter.annotation if known else type(parameter.default)
            options[name] = (kind, Field(parameter.default, validate_default=True))
    return tuple(needs), options


def _entry(
    declaration: Declaration, base: type[Entry], columns: tuple[str, ...], options: dict[str, Any]
) -> type[Entry]:
    made = _model(declaration, base, options)
    made.__doc__ = inspect.getdoc(declaration.value)
    made.function = staticmethod(declaration.value)  # type: ignore[attr-defined]
    made.declaration, made.columns, made.options = declaration, columns, tuple(options)  # type: ignore[attr-defined]
    return made


def _model(declaration: Declaration, base: type[Entry], options: dict[str, Any]) -> type[Entry]:
    """Return a subclass with these options. PluginError for types that pydantic cannot check."""
    try:
        made = create_model(declaration.name, __base__=base, __module__=declaration.value.__module__, **options)
        made.model_rebuild()  # raises for an annotation whose name is undefined
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        types = ", ".join(f"{name}: {kind}" for name, (kind, _) in options.items())
        raise _wrong(declaration, "options", f"pydantic cannot check the type of an option ({types})") from error
    return made


def _call(entry: Any, given: dict[str, Any]) -> Any:
    """Call the function. PluginError names it and the line that raised; a TilthError passes through."""
    try:
        return type(entry).function(*given.values(), **{name: getattr(entry, name) for name in entry.options})
    except TilthError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{entry.declaration.title}: {describe(error, entry.declaration.file)}", key=entry.declaration.name
        ) from error


def _pair(entry: Any, found: Any, second: Any, form: str) -> tuple[Any, Any]:
    """Return a function's two results, the second one by default. PluginError for a tuple of another length."""
    if not isinstance(found, tuple):
        return found, second
    if len(found) != 2:
        why = f"it returned {len(found)} results; return one column, or {form}"
        raise _wrong(entry.declaration, "results", why)
    return found


def _check(entry: Any, found: Any, name: str, what: str, count: int, floats: bool = True) -> None:
    if not isinstance(found, Tensor) or found.shape != (count,):
        shown = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        why = f"{name} is {shown}, not a tensor of the {count} {what}"
        raise _wrong(entry.declaration, f"{name}.shape", why)
    if floats and not found.is_floating_point():
        raise _wrong(entry.declaration, f"{name}.dtype", f"{name} is {found.dtype}, not a tensor of floats")
    if not bool(torch.isfinite(found.detach()).all()):
        raise _wrong(entry.declaration, name, f"{name} has values that are not finite, for finite {what}")
