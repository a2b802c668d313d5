"""What does the architecture cost a pipeline? `twinshard penalty`, which simulates and runs nothing.

Encoder-decoder and decoder-only twin on 2 to 16 ranks and over ratios of lengths, under every scheme of
`parallel/penalty.py`. Searches for list schedules take most of the time and are dealt to the cores of this machine.

`python -m launch.penalty` writes `results/penalty.csv` again: all costs of the study, in a quarter of an hour on two
cores. A test computes some of its rows.
"""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from launch.bars import counting_bar
from launch.machine_files import load_machine
from launch.sheets import Cell, Format, Sheet, csv_text, format_option, show
from launch.step_options import counted_model
from parallel import penalty, twin_cases
from parallel.profile_file import load

RESULTS = Path(__file__).resolve().parent.parent / "results"
MODEL, MACHINE = "t5-large", "h100"
POSITIONS = 960
RATIOS = "1/4,1/2,1,2,4"
RANKS = "2,4,8,16"
_FAMILIES = ("1f1b", "interleaved x2", "list x1", "list x2", "list x4", "list")


@click.command("penalty")
@click.option("--model", default=MODEL, show_default=True, help="An encoder-decoder, as for twinshard profile.")
@click.option("--stages", "ranks", default=RANKS, show_default=True, help="Numbers of pipeline ranks.")
@click.option("--ratios", default=RATIOS, show_default=True, help="Source over target length.")
@click.option("--positions", default=POSITIONS, show_default=True, help="Source and target positions together.")
@click.option("--blocks-only", is_flag=True, help="Count FLOPs of the blocks alone: ends are free.")
@click.option("--machine", help="Seconds on a machine in closed form, by its name or file; bfloat16.")
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measured seconds: a file of twinshard profile; once for each pair of lengths, and for the twin.",
)
@click.option("--costs", "name", help="What the costs are called [default: flops, blocks, measured, or the machine].")
@click.option("--coarse", is_flag=True, help="Never cut between sublayers.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write all rows to this CSV file.")
@format_option
def penalty_command(
    *,
    model: str,
    ranks: str,
    ratios: str,
    positions: int,
    blocks_only: bool,
    machine: str | None,
    profiles: tuple[Path, ...],
    name: str | None,
    coarse: bool,
    out: Path | None,
    form: Format,
) -> int:
    """Simulate what a pipeline loses with an encoder-decoder, and with its decoder-only twin of equal depth.

    Makespans are over the ideal: all work dealt evenly, no bubble. Costs are FLOPs unless a machine or profiles are
    given. With one --profile for every pair of lengths and one of the twin, costs are what was measured. Where cuts
    between blocks leave more than 3 % between the twins, cuts between sublayers are simulated too.

    \b
    Examples:
      twinshard penalty
      twinshard penalty --stages 4 --ratios 1/4,1/2 --blocks-only --format markdown
      twinshard penalty --machine h100 --out penalty.csv
      twinshard penalty --ratios 2 --profile t5-large.toml --profile twin.toml
    """  # noqa: D301 - click reads the character
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"cannot write {out}: there is no folder {out.parent}")
    config, _ = counted_model(model)
    pairs = [_pair(text, positions) for text in ratios.split(",")]
    costs, told, dtype_bytes = _costs(blocks_only=blocks_only, machine=machine, profiles=profiles)
    cases = twin_cases.cases(
        name or told, costs, config, pairs, [_count(text) for text in ranks.split(",")], dtype_bytes
    )
    rows = simulated(cases, is_coarse=coarse)
    if out is not None:
        out.write_text(csv_text(penalty.COLUMNS, rows), encoding="utf-8")
    document = {"model": config.name, "costs": name or told, "rows": rows}
    show(form, sheets=_sheets(rows), columns=penalty.COLUMNS, rows=rows, document=document)
    return 0


def simulated(cases: Sequence[twin_cases.Case], *, is_coarse: bool) -> list[penalty.Row]:
    """Rows of all cases, and of the finer grain where it is wanted."""
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool,
        counting_bar("cases", transient=False) as bar,
    ):
        told = _all(pool, bar, "blocks", cases)
        if not is_coarse:
            coarse = penalty.coarse(penalty.joined(told))
            finer = [
                case.finer() for case in cases if any((case.costs, case.pp, *pair) in coarse for pair in case.pairs)
            ]
            told += _all(pool, bar, "sublayers", finer)
    return penalty.joined(told)


def study() -> list[twin_cases.Case]:
    """All cases of `results/penalty.csv`."""
    config = counted_model(MODEL)[0]
    pairs = [_pair(text, POSITIONS) for text in RATIOS.split(",")]
    ranks = [_count(text) for text in RANKS.split(",")]
    kinds: dict[str, tuple[twin_cases.Costs, int]] = {
        "blocks": (twin_cases.counted_blocks, 4),
        "flops": (twin_cases.counted, 4),
        MACHINE: (twin_cases.on_machine(load_machine(MACHINE)), 2),
    }
    for name in ("measured", "again"):
        files = sorted((RESULTS / "reference" / "profiles").glob(f"{MODEL}.*.{name}.toml"))
        kinds[name] = (twin_cases.measured([load(path) for path in files]), 4)
    return [
        case
        for name, (costs, dtype_bytes) in kinds.items()
        for case in twin_cases.cases(name, costs, config, pairs, ranks, dtype_bytes)
    ]


def _all(
    pool: concurrent.futures.Executor, bar: Progress, words: str, cases: Sequence[twin_cases.Case]
) -> list[dict[str, Any]]:
    """In the order of the cases; the largest are begun first."""
    task = bar.add_task(words, total=len(cases))
    futures = {}
    for index in sorted(range(len(cases)), key=lambda index: -cases[index].pp):
        futures[index] = pool.submit(penalty.rows, cases[index])
        futures[index].add_done_callback(lambda _: bar.advance(task))
    return [row for index in range(len(cases)) for row in futures[index].result()]


# ---- what is asked --------------------------------------------------------------------------------------------------


def _costs(*, blocks_only: bool, machine: str | None, profiles: Sequence[Path]) -> tuple[twin_cases.Costs, str, int]:
    """The costs, their name, and bytes of an element."""
    if sum((blocks_only, machine is not None, bool(profiles))) > 1:
        raise ValueError("--blocks-only, --machine and --profile are different costs; give one of them")
    if profiles:
        loaded = [load(path) for path in profiles]
        widths = {profile.dtype_bytes for profile in loaded}
        if len(widths) > 1 or any(profile.unit != "seconds" or profile.num_sequences != 1 for profile in loaded):
            raise ValueError("profiles must be measured with one dtype and one sequence a microbatch")
        return twin_cases.measured(loaded), "measured", widths.pop()
    if machine is not None:
        return twin_cases.on_machine(load_machine(machine)), Path(machine).stem, 2
    return (twin_cases.counted_blocks, "blocks", 4) if blocks_only else (twin_cases.counted, "flops", 4)


def _pair(text: str, positions: int) -> tuple[int, int]:
    """Source and target positions of a ratio such as 1/4, or 2."""
    source, _, target = text.strip().partition("/")
    parts = [_count(source), _count(target or "1")]
    if positions % sum(parts):
        raise ValueError(
            f"{positions} positions do not divide by {sum(parts)}, as the ratio {text.strip()} wants; "
            f"try {positions // sum(parts) * sum(parts) or sum(parts)}"
        )
    unit = positions // sum(parts)
    return parts[0] * unit, parts[1] * unit


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{text.strip()!r} is no whole number above 0; write lists as 2,4 and ratios as 1/4 or 2")
    return int(text)


# ---- what is told ---------------------------------------------------------------------------------------------------


def _sheets(rows: Sequence[penalty.Row]) -> list[Sheet]:
    """Makespans of every scheme, then the best of each family against the twin's, by ranks."""
    return [sheet for pp in dict.fromkeys(row["pp"] for row in rows) for sheet in _of_ranks(rows, pp)]


def _of_ranks(rows: Sequence[penalty.Row], pp: int) -> list[Sheet]:
    mine = [row for row in rows if row["pp"] == pp]
    pairs = list(dict.fromkeys((row["source_length"], row["target_length"]) for row in mine))
    headings = tuple(f"{source}/{target}" for source, target in pairs)
    made: dict[tuple[str, str, str], dict[tuple[int, int], float]] = {}
    near: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    for row in mine:
        pair = (row["source_length"], row["target_length"])
        who = {"twin": "decoder-only", "others": "others", "ours": "ours"}[row["who"]]
        made.setdefault((who, row["scheme"], row["grain"]), {})[pair] = row["makespan_over_ideal"]
        if row["who"] == "ours" and row["against_twin"] is not None:
            near.setdefault((row["family"], row["grain"]), {})[pair] = row["against_twin"]
    return [
        Sheet(
            title=f"{pp} ranks: makespan over ideal, by source/target",
            headings=("whose", "scheme", "cut between", *headings),
            rows=[[*key, *_cells(values, pairs)] for key, values in made.items()],
        ),
        Sheet(
            title=f"{pp} ranks: ours against the twin's in the same family",
            headings=("family", "cut between", *headings, f"within {penalty.CLOSE:.0%}"),
            rows=[
                [*key, *_cells(near[key], pairs), f"{_num_close(near[key])} of {len(near[key])}"]
                for key in sorted(near, key=lambda key: (_FAMILIES.index(key[0]), key[1]))
            ],
        ),
    ]


def _cells(values: dict[tuple[int, int], float], pairs: Sequence[tuple[int, int]]) -> list[Cell]:
    return [round(values[pair], 3) if pair in values else None for pair in pairs]


def _num_close(values: dict[tuple[int, int], float]) -> int:
    return sum(value <= 1 + penalty.CLOSE for value in values.values())


if __name__ == "__main__":
    (RESULTS / "penalty.csv").write_text(csv_text(penalty.COLUMNS, simulated(study(), is_coarse=False)), "utf-8")
