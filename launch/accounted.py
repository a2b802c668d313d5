"""What is told of one accounted model, to programs: a JSON document, and rows of a long table?

The document's `ranks` has one entry for each distinct rank; a row has one figure, so that nothing has to be parsed.
Bytes of communication are those of all `count` equal events, as in `communication.csv` of a study. Left out: how a
reader sees it (`launch/accounting_sheets.py`).
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from launch.sheets import Cell
from launch.step_options import Step
from models.costs import parameter_counts
from parallel.account import RankAccount
from parallel.figures import PhaseFlops, RankFigures, StepShape
from parallel.flops import model_flops
from parallel.ledger import Total
from parallel.plan import Plan

COLUMNS = (
    "model",
    "architecture",
    "dp",
    "pp",
    "cp",
    "tp",
    "num_ranks",
    "quantity",
    "component",
    "operation",
    "axis",
    "group_size",
    "site",
    "stream",
    "phase",
    "count",
    "value",
)
"""Of the long table."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DryRank:
    """One rank's dry run.

    Attributes:
        figures: that were traced.
        differences: lines on quantities that must be exact, or lie outside of what is allowed.
        remarks: lines on closed forms that are off, but within what is allowed.
    """

    figures: RankFigures
    differences: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Accounted:
    """One model on one layout.

    Attributes:
        notes: what was passed over.
        accounts: one for each kind of rank.
        device_bytes: what a device holds; None if nothing is compared with it.
        dry: a dry run of each, in the same order; empty without one.
    """

    plan: Plan
    shape: StepShape
    step: Step
    notes: tuple[str, ...]
    accounts: tuple[RankAccount, ...]
    device_bytes: int | None
    dry: tuple[DryRank, ...] = ()

    def document(self) -> dict[str, Any]:
        """Everything, for JSON."""
        config, layout, shape = self.plan.config, self.plan.layout, self.shape
        counts = parameter_counts(config)
        return {
            "model": config.name,
            "architecture": config.architecture,
            "notes": list(self.notes),
            "parameters": {"total": counts.total, "by_component": dataclasses.asdict(counts)},
            "layout": layout.to_dict(),
            "world_size": layout.world_size,
            "step": {
                "microbatch": self.step.microbatch,
                "microbatches": layout.microbatches,
                "source_length": shape.source_length,
                "target_length": shape.target_length,
                "dtype": self.step.dtype,
                "dtype_bytes": shape.dtype_bytes,
                "optimizer": self.step.optimizer,
                "master_weights": self.step.master_weights,
                "model_flops": layout.dp * model_flops(config, shape),
            },
            "device_bytes": self.device_bytes,
            "ranks": [
                self._rank(account, dry)
                for account, dry in zip(self.accounts, self.dry or [None] * len(self.accounts), strict=True)
            ],
        }

    def rows(self) -> Iterator[dict[str, Cell]]:
        """One row a figure: `value` is it, `quantity` its name with the unit."""
        for rank in self.document()["ranks"]:
            where: dict[str, Cell] = {
                "model": self.plan.config.name,
                "architecture": self.plan.config.architecture,
                **rank["coordinates"],
                "num_ranks": rank["num_ranks"],
            }
            yield from (where | row for row in _figure_rows(rank))

    def fits(self, account: RankAccount) -> bool | None:
        """Whether a rank's states and activations fit on the device; None if there is none to compare with."""
        return None if self.device_bytes is None else account.prediction.peak_bytes <= self.device_bytes

    def _rank(self, account: RankAccount, dry: DryRank | None) -> dict[str, Any]:
        prediction, figures = account.prediction, account.prediction.figures
        states = prediction.states
        entry: dict[str, Any] = {
            "coordinates": dataclasses.asdict(figures.coordinate),
            "num_ranks": prediction.num_ranks,
            "parameters": {
                "total": figures.parameters.total,
                "by_component": dataclasses.asdict(figures.parameters),
            },
            "parameter_bytes": states.parameters,
            "master_weight_bytes": states.master_weights,
            "gradient_bytes": states.gradients,
            "optimizer_bytes": states.optimizer,
            "state_bytes": states.total,
            "activation_bytes_per_microbatch": figures.saved_bytes,
            "activation_bytes_per_microbatch_by_component": dict(prediction.saved.by_part),
            "peak_activation_bytes": figures.peak_saved_bytes,
            "total_bytes": prediction.peak_bytes,
            "fits": self.fits(account),
            **_flops(figures.flops),
            "hardware_flops": figures.flops.total,
            "hardware_flops_by_component": {part: _flops(flops) for part, flops in prediction.flops.items()},
            "model_forward_flops": account.model_forward_flops,
            "model_backward_flops": 2 * account.model_forward_flops,
            "model_flops": 3 * account.model_forward_flops,
            "communication": [_event(total) for total in figures.events],
            "communication_payload_bytes": sum(total.payload_bytes for total in figures.events),
            "communication_wire_bytes": sum(total.wire_bytes for total in figures.events),
            "kv_cache_bytes_per_sequence": {
                "self_attention": account.cache.self_attention,
                "cross_attention": account.cache.cross_attention,
                "total": account.cache.total,
            },
        }
        if dry is not None:
            entry["traced"] = _traced(dry)
        return entry


def wire_bytes(events: Iterable[Total]) -> int:
    """Bytes on the wire of all events."""
    return sum(total.wire_bytes for total in events)


def _traced(dry: DryRank) -> dict[str, Any]:
    figures = dry.figures
    return {
        "parameters": {"total": figures.parameters.total, "by_component": dataclasses.asdict(figures.parameters)},
        "parameter_bytes": figures.parameter_bytes,
        "gradient_bytes": figures.gradient_bytes,
        "activation_bytes_per_microbatch": figures.saved_bytes,
        "peak_activation_bytes": figures.peak_saved_bytes,
        **_flops(figures.flops),
        "communication": [_event(total) for total in figures.events],
        "differences": list(dry.differences),
        "remarks": list(dry.remarks),
    }


def _flops(flops: PhaseFlops) -> dict[str, int]:
    return {
        "forward_flops": flops.forward,
        "recompute_flops": flops.recompute,
        "backward_flops": flops.backward,
    }


def _event(total: Total) -> dict[str, Any]:
    event = total.event
    return {
        "operation": event.operation,
        "axis": event.axis,
        "group_size": event.group_size,
        "site": event.site,
        "stream": event.stream,
        "phase": event.phase,
        "count": total.count,
        "payload_bytes": total.payload_bytes,
        "wire_bytes": total.wire_bytes,
    }


def _figure_rows(rank: dict[str, Any], prefix: str = "") -> Iterator[dict[str, Cell]]:
    """The numbers of a rank's entry, and of what is nested in it."""
    for name, value in rank.items():
        quantity = prefix + name
        if isinstance(value, int) and name != "num_ranks":
            yield {"quantity": quantity, "value": int(value)}
        elif name == "communication":
            for event in value:
                others = {key: cell for key, cell in event.items() if not key.endswith("_bytes")}
                for key in ("payload_bytes", "wire_bytes"):
                    yield {"quantity": f"{quantity}_{key}_of_events", **others, "value": event[key]}
        elif name == "parameters":
            yield {"quantity": quantity, "value": value["total"]}
            yield from _by_component(quantity, value["by_component"])
        elif name == "hardware_flops_by_component":
            for part, flops in value.items():
                for key, count in flops.items():
                    yield {"quantity": key, "component": part, "value": count}
        elif name in ("activation_bytes_per_microbatch_by_component", "kv_cache_bytes_per_sequence"):
            yield from _by_component(quantity.removesuffix("_by_component"), value)
        elif name == "traced":
            yield from _figure_rows(value, "traced_")


def _by_component(quantity: str, parts: dict[str, int]) -> Iterator[dict[str, Cell]]:
    for part, count in parts.items():
        if part == "total":
            yield {"quantity": quantity, "value": count}
        else:
            yield {"quantity": quantity, "component": part, "value": count}
