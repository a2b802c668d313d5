"""How do the weights of a published checkpoint become ours, and ours theirs?

    ours  =  theirs, stacked row by row, transposed where stored as [in, out]       tables in `models.checkpoint_names`

The translation is complete or an error: each parameter has a source, sources of one parameter agree, and each entry of
the checkpoint is used or known to be no parameter of this model. Left out: reading files.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from models.architectures import build
from models.checkpoint_names import CHECKPOINT_NAMES, CheckpointNames
from models.config import ModelConfig
from models.layers import FusedLinear
from models.slicing import tie


def load_weights(model: nn.Module, config: ModelConfig, state_dict: Mapping[str, Tensor], family: str) -> None:
    """Copy a checkpoint into a model, or into a slice of one.

    Args:
        model: its parameters must exist (not on the meta device) and keep their device and dtype.
        config: of the whole model.
        state_dict: of the whole model, named as transformers does.
        family: `model_type` of the checkpoint.

    Raises ValueError as `translate` does.
    """
    values = translate(config, state_dict, family)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and cannot hold values; give the model memory first")
        with torch.no_grad():
            parameter.copy_(values[name])
    tie(model, config)


def translate(config: ModelConfig, state_dict: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """The whole parameter of every qualified name, tied ones under each of their names, in the checkpoint's dtype.

    Raises ValueError for an unknown family, a parameter without a source, an entry without a use, a shape that the
    config does not have, or entries that should be one tensor and differ.
    """
    if family not in CHECKPOINT_NAMES:
        raise ValueError(f"weights of family {family!r} are not known; those of {', '.join(CHECKPOINT_NAMES)} are")
    names = CHECKPOINT_NAMES[family]
    entries = {_plain_name(name, names.prefix): value for name, value in state_dict.items()}
    if len(entries) < len(state_dict):
        raise ValueError(f"the checkpoint holds a name with and without {names.prefix!r}")
    with torch.device("meta"):
        model = build(config)
    sources: dict[str, list[tuple[str, Tensor]]] = {}
    used: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = model.get_submodule(name.rpartition(".")[0])
        sources[name] = []
        for rows in _places(name, names):
            if not entries.keys() >= set(rows):
                continue
            value = _stacked(rows, [entries[row] for row in rows], module, names)
            if value.shape != parameter.shape:
                raise ValueError(
                    f"{name} has shape {tuple(parameter.shape)}, but {_listed(rows)} gives {tuple(value.shape)}"
                )
            sources[name].append((_listed(rows), value))
            used.update(rows)
    values = _agreed(sources, config)
    _check_unused({name: value for name, value in entries.items() if name not in used}, names)
    return values


def store_weights(
    values: Mapping[str, Tensor], state_dict: Mapping[str, Tensor], config: ModelConfig, family: str
) -> None:
    """Copy whole parameters of ours into the entries of a state dict as transformers has it: `translate` undone.

    Args:
        values: by qualified name; of a tied parameter any of its names will do.
        state_dict: entries keep their device and dtype. What is no parameter of the model stays as it is.
        config: of the whole model.
        family: `model_type` of the state dict.

    Raises ValueError as `translate` does, of what the entries hold in the end.
    """
    names = CHECKPOINT_NAMES[family]
    entries = {_plain_name(name, names.prefix): value for name, value in state_dict.items()}
    groups = {name: group for group in config.tie_groups for name in group}
    with torch.no_grad():
        for value_name, value in values.items():
            for rows in [rows for name in groups.get(value_name, (value_name,)) for rows in _places(name, names)]:
                if entries.keys() >= set(rows):
                    _split_into([(row, entries[row]) for row in rows], value, names)
    translate(config, state_dict, family)


def _split_into(rows: list[tuple[str, Tensor]], value: Tensor, names: CheckpointNames) -> None:
    """Copies the rows of one parameter of ours into theirs, in their order."""
    theirs = [entry.t() if _is_transposed(row, names) else entry for row, entry in rows]
    for entry, part in zip(theirs, value.split([entry.shape[0] for entry in theirs]), strict=True):
        entry.copy_(part)


def _is_transposed(row: str, names: CheckpointNames) -> bool:
    return row.endswith(".weight") and row.split(".")[-2] in names.transposed


def _plain_name(name: str, prefix: str) -> str:
    # Checkpoints converted from TensorFlow call the parameters of a norm gamma and beta.
    name = re.sub(r"\.gamma$", ".weight", name.removeprefix(prefix))
    return re.sub(r"\.beta$", ".bias", name)


def _places(name: str, names: CheckpointNames) -> list[list[str]]:
    """Where one of our parameters may be stored: their names, row by row, for each place."""
    module, _, leaf = name.rpartition(".")
    block = re.search(r"\.block\.(\d+)\.", module)
    pattern = module if block is None else module.replace(block.group(), ".block.{}.")
    index = "" if block is None else block.group(1)
    return [[f"{row.format(index)}.{leaf}" for row in rows.split()] for ours, rows in names.rules if ours == pattern]


def _stacked(rows: list[str], values: list[Tensor], module: nn.Module, names: CheckpointNames) -> Tensor:
    """Their tensors one below the other, each as [out, in]."""
    values = [value.t() if _is_transposed(row, names) else value for row, value in zip(rows, values, strict=True)]
    if len(values) == 1:
        return values[0]
    assert isinstance(module, FusedLinear)
    for row, value, part in zip(rows, values, module.parts, strict=False):
        if value.shape[0] != part:
            raise ValueError(f"{row} has {value.shape[0]} rows, but the config has {part}")
    return torch.cat(values)


def _agreed(sources: Mapping[str, list[tuple[str, Tensor]]], config: ModelConfig) -> dict[str, Tensor]:
    """One value for each name. Wherever the names of a tie group are stored, the values have to be the same."""
    groups = {name: group for group in config.tie_groups for name in group}
    values: dict[str, Tensor] = {}
    missing = []
    for name in sources:
        found = [source for member in groups.get(name, (name,)) for source in sources[member]]
        if not found:
            missing.append(name)
            continue
        origin, values[name] = found[0]
        for other_origin, other in found[1:]:
            if not torch.equal(values[name], other):
                raise ValueError(f"{origin} and {other_origin} differ, but are one parameter here: {name}")
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} parameters: {_listed(missing)}")
    return values


def _check_unused(entries: Mapping[str, Tensor], names: CheckpointNames) -> None:
    unknown = []
    for name, value in entries.items():
        if name in names.zero:
            if bool(value.any()):
                raise ValueError(f"{name} is not zero, but the model has no place for it")
        elif not any(re.search(pattern, name) for pattern in names.ignored):
            unknown.append(name)
    if unknown:
        raise ValueError(f"{len(unknown)} entries of the checkpoint are no parameters here: {_listed(unknown)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
