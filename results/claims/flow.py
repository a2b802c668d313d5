"""Where does information pass from position to position, and from side to side? Claims P6 and P7.

With the sequence sharded, whatever mixes positions has to communicate. The converse does not hold: tensor parallelism
gathers the sequence in front of every product whose weights it cuts over the same ranks, mixing or not. Such sites are
told apart by the plan. What crosses from the encoder to the decoder is read off the edges of a pipeline: the edge
between the last stage of one and the first of the other shows it all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from results.claims.verdict import Claim, Evidence, Findings, basis_of, of_count
from results.sites import ATTENTION_PARTS
from results.tables import Tables
from results.twins import cell_of, measured, select

SHARDING_AXES = ("tp", "cp")
"""Axes over which a sequence may be sharded."""

CUT_STYLES = ("colwise", "rowwise")
"""Styles of a plan that cut a product's weights over the tp ranks."""

SHARED_GRADIENTS = "gradients summed over both sides"

SHARED_TYING = ("source_target", "all")
"""Tying that gives both sides one embedding."""


# ---- P6: only attention mixes positions -----------------------------------------------------------------------------


def find_mixing(tables: Tables) -> Findings:
    """P6. Sites of all communication of activations while the sequence is sharded."""
    runs = measured(tables.runs)
    runs = runs[runs["sp"].astype(bool) | (runs["cp"] > 1)]
    evidence: list[Evidence] = []
    other_parts: Counter[str] = Counter()
    num_uncut = 0
    for _, run in runs.iterrows():
        events = select(tables.communication, run)
        events = events[events["axis"].isin(SHARDING_AXES) & (events["stream"] != "none")]
        plan = select(tables.plan, run)
        if events.empty or plan.empty:
            continue
        inside = events[events["block_index"] >= 0]
        is_attention = inside["part"].isin(ATTENTION_PARTS)
        others = inside[~is_attention]
        uncut = others[(others["axis"] != "tp") | ~others["site"].isin(_cut_modules(plan))]
        other_parts.update({str(part): 1 for part in set(others["part"])})
        num_uncut += len(uncut)
        evidence += _mixing(run, inside[is_attention], others, uncut)
        evidence.append(_outside(run, select(tables.communication, run)))
    missing = () if evidence else ("a run with a sharded sequence, its plan and its communication",)
    condition = "all sites are attention's where weights are whole"
    if other_parts:
        parts = ", ".join(sorted(other_parts))
        condition = f"in blocks, {parts} communicates too: "
        condition += (
            f"{num_uncut} rows at modules whose weights are whole"
            if num_uncut
            else "only where tensor parallelism cuts the weights over the same ranks, which gathers positions without "
            "mixing them"
        )
    return Findings(evidence=tuple(evidence), missing=missing, condition=condition)


def _cut_modules(plan: pd.DataFrame) -> set[str]:
    return {str(module) for module in plan.loc[plan["style"].isin(CUT_STYLES), "module"]}


def _mixing(
    run: "pd.Series[Any]", attention: pd.DataFrame, others: pd.DataFrame, uncut: pd.DataFrame
) -> Iterator[Evidence]:
    """Events at attention sites count for the claim unless an unexplained one stands beside them."""
    cells, basis = (cell_of(run),), basis_of(run)
    if not len(uncut):
        yield Evidence(
            quantity="events on activations in blocks",
            value=f"{int(attention['count'].sum())} at sites of attention",
            says=of_count(supports=bool(len(attention))),
            basis=basis,
            table="communication",
            cells=cells,
        )
    if len(others):
        places = ", ".join(sorted({str(place) for place in others["place"]}))
        yield Evidence(
            quantity="events on activations in blocks",
            value=f"{int(others['count'].sum())} outside attention: {places}",
            says=of_count(supports=False),
            basis=basis,
            table="communication",
            cells=cells,
            note=f"{len(uncut)} of {len(others)} rows at modules whose weights are whole",
        )


def _outside(run: "pd.Series[Any]", events: pd.DataFrame) -> Evidence:
    """The exceptions that the rule names: vocabulary, loss, gradients of what every rank holds whole."""
    outside = events[events["axis"].isin(SHARDING_AXES) & (events["block_index"] < 0)]
    sums = outside.groupby("part")["count"].sum()
    return Evidence(
        quantity="exceptions outside the blocks",
        value=", ".join(f"{part} {int(count)}" for part, count in sums.items()) or "none",
        says="context",
        basis=basis_of(run),
        table="communication",
        cells=(cell_of(run),),
    )


# ---- P7: the memory is the only link --------------------------------------------------------------------------------


def find_links(tables: Tables) -> Findings:
    """P7. Tensors on every edge of an encoder-decoder's pipeline, and gradients shared by both sides."""
    runs = measured(tables.runs)
    runs = runs[(runs["architecture"] == "encoder_decoder") & (runs["pp"] > 1)]
    evidence: list[Evidence] = []
    has_boundary = False
    for _, run in runs.iterrows():
        edges = _placed(select(tables.edges, run), select(tables.stages, run))
        boundary = edges[edges["where"] == "boundary"]
        has_boundary |= bool(len(boundary))
        evidence += _crossing(run, edges)
        evidence += _shared(run, select(tables.communication, run))
        evidence += _relay(run, edges)
    missing = () if has_boundary else ("an encoder-decoder run with a stage boundary between its sides",)
    return Findings(evidence=tuple(evidence), missing=missing, condition=_links(evidence))


def _links(evidence: Sequence[Evidence]) -> str:
    """The condition: what crosses, and which runs sum a gradient over both sides."""
    crossing = [row for row in evidence if row.table == "edges" and row.says != "context"]
    alone = sum(row.says == "supports" for row in crossing)
    shared = [row.value for row in evidence if row.quantity == SHARED_GRADIENTS and row.says == "contradicts"]
    condition = f"only the memory crosses on {alone} of {len(crossing)} kinds of edges"
    if shared:
        condition += f", but {len(shared)} runs sum the gradient of a shared embedding over both sides ({shared[0]})"
    return condition


def _placed(edges: pd.DataFrame, stages: pd.DataFrame) -> pd.DataFrame:
    """Edges with `where` they fall: `encoder` before a stage that holds encoder blocks, `boundary`, or `decoder`."""
    encoder = dict(zip(stages["stage"], stages["num_encoder_blocks"], strict=True))
    decoder = dict(zip(stages["stage"], stages["num_decoder_blocks"], strict=True))
    where = []
    for edge in edges["edge"]:
        left, right = sorted(int(stage) for stage in str(edge).split(">"))
        if encoder.get(right, 0):
            where.append("encoder")
        else:
            where.append("decoder" if decoder.get(left, 0) else "boundary")
    return edges.assign(where=where)


def _crossing(run: "pd.Series[Any]", edges: pd.DataFrame) -> Iterator[Evidence]:
    """Only the memory may cross the boundary, and no source hidden state may be seen behind it."""
    allowed = {"boundary": {"memory"}, "decoder": {"memory", "target"}}
    for where, tensors in allowed.items():
        told = edges[edges["where"] == where]
        if len(told):
            seen = {str(tensor) for tensor in told["tensor"]}
            yield Evidence(
                quantity=f"tensors across the {where}" if where == "boundary" else "tensors on edges of the decoder",
                value=", ".join(sorted(seen)),
                says=of_count(supports=seen <= tensors and "memory" in seen),
                basis=basis_of(run),
                table="edges",
                cells=(cell_of(run),),
                note=f"edges {', '.join(sorted(set(map(str, told['edge']))))}; {run['layout_label']}",
            )


def _shared(run: "pd.Series[Any]", events: pd.DataFrame) -> Iterator[Evidence]:
    tied = events[(events["axis"] == "tied") & events["site"].str.contains("embedding", regex=False)]
    sent = int(tied["wire_bytes"].sum()) if run["tying"] in SHARED_TYING else 0
    yield Evidence(
        quantity=SHARED_GRADIENTS,
        value=f"{sent:,} bytes sent a step, tying {run['tying']}",
        says=of_count(supports=sent == 0),
        basis=basis_of(run),
        table="communication",
        cells=(cell_of(run),),
    )


def _relay(run: "pd.Series[Any]", edges: pd.DataFrame) -> Iterator[Evidence]:
    total = int(edges["payload_bytes"].sum())
    relayed = edges[(edges["where"] == "decoder") & (edges["tensor"] == "memory")]
    if total:
        added = int(relayed["payload_bytes"].sum())
        yield Evidence(
            quantity="the memory relayed through decoder stages",
            value=f"{added:,} of {total:,} bytes on edges, {added / total:.1%}",
            says="context",
            basis=basis_of(run),
            table="edges",
            cells=(cell_of(run),),
        )


CLAIMS = (
    Claim(
        id="P6",
        article="C",
        section="summary",
        statement="Attention is the only operation that mixes positions.",
        quantity="sites of the communication of activations while the sequence is sharded",
        rule="supported if every event in a block has a site of attention, contradicted if events stand at modules "
        "whose weights are whole, conditional if the others stand only where tensor parallelism cuts the weights; "
        "exceptions outside the blocks are listed",
        find=find_mixing,
    ),
    Claim(
        id="P7",
        article="D",
        section="§1, §9",
        statement="The encoder's output, read by cross-attention, is the only link between the two sides.",
        quantity="tensors that cross each edge of a pipeline, gradients that both sides share, bytes of the relay",
        rule="supported if only the memory crosses from encoder to decoder and no gradient is shared, contradicted if "
        "something else crosses and gradients are shared; needs a stage boundary between the sides",
        find=find_links,
    ),
)
