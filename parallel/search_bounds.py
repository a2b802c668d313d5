"""How fast is any layout at best, before anything is simulated? Lower bounds of a step, each quicker than the next.

With m microbatches on p ranks, w the work on one microbatch of a rank, W of the model, all in seconds:

    frame       whatever the cut and schedule. The mean over the ranks: what the first microbatch takes to get to rank
                r, at least r (a block's forward + a message), m w, and its gradients over dp
    linear      one stage a rank and whole backwards: rank r works m w after all forwards of the ranks before it, and
                before their backwards; or sums its gradients then, g w at least. S, the work of the ranks before it, is
                least for every rank at once if w = (T - S) / m, so T = W / (1 - (1 - 1 / m)^p), or with m + g for m
                and forwards alone before it, a share f of w at least: T = W f / (1 - (1 - f / (m + g))^p)
    pipeline    the same with the stages of a cut: for every rank, forwards and messages before it, its work, and where
                backwards are whole backwards and messages after it; then gradients over dp

The update is that of the fullest rank, or of the mean one. No step of `parallel/step_time.py` is shorter. Left out:
sums over tp, pp and tied ranks after the last backward, idle time between the first and the last action of a rank.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from models.config import keys_values_name
from parallel.edges import Edge, edges
from parallel.layouts import Layout, Transport
from parallel.ledger import Operation
from parallel.machine import Link
from parallel.machine_profile import machine_profile, slowest_link
from parallel.mesh import Coordinate
from parallel.partition import Carried, first_blocks, stages_of
from parallel.placement import stage_ranks
from parallel.profile import PIECES, Profile
from parallel.rank_bytes import RankBytes
from parallel.search_answer import Closest
from parallel.search_space import Question
from parallel.stage_costs import stage_seconds
from parallel.step_time import updated_bytes
from parallel.work import Work

_BELOW = 1 - 1e-9
"""Sums of floats in another order differ by less."""


class Bounds:
    """Bounds of the layouts of one question; what several layouts share is computed once.

    Attributes:
        question: what is searched for.
        bytes: of ranks.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.bytes = RankBytes(
            config=question.config,
            source_length=question.source_length,
            target_length=question.target_length,
            dtype_bytes=question.dtype_bytes,
            optimizer=question.optimizer,
            master_weights=question.master_weights,
        )
        self._profiles: dict[tuple[object, ...], Profile] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._link, self._least = functools.cache(self._find_link), functools.cache(self._find_least)
        self._slowest = functools.cache(lambda tp, pp, dp: slowest_link(question.machine, Layout(tp=tp, pp=pp, dp=dp)))
        self._over_dp = functools.cache(self._find_over_dp)
        self._onward = functools.cache(self._find_onward)

    # ---- what a layout is made of -------------------------------------------------------------------------------

    def profile(self, layout: Layout) -> Profile:
        """Seconds of the pieces, as `machine_profile` tells them."""
        size = self.question.size(layout)
        key = (layout.tp, *_inside(layout), layout.transport == "kv", size)
        link = self._slowest(layout.tp, layout.pp, layout.dp)
        if (*key, link) not in self._profiles:
            if key not in self._profiles:
                shape = self.question.shape(layout.dp)
                self._profiles[key] = machine_profile(self.question.machine, self.question.config, layout, shape)
            self._profiles[*key, link] = dataclasses.replace(
                self._profiles[key], transfer_cost=link.latency_seconds, byte_cost=link.occupancy_seconds(1)
            )
        return self._profiles[*key, link]

    def cut(self, layout: Layout) -> tuple[int, ...]:
        """First blocks of stages 1, 2, ... of a layout's cut; the schedule is read where it is `list`."""
        if not isinstance(layout.cut, str):
            return layout.cut
        profile = None if layout.cut == "even" else self.profile(layout)
        key: tuple[object, ...] = (layout.cut, layout.pp, layout.chunks, layout.placement, layout.vocabulary)
        if profile is not None:
            key += (layout.tp, layout.microbatches if layout.schedule == "list" else 0, layout.transport == "kv")
        if profile is not None and layout.cut != "parameters":
            key += (*_inside(layout), profile.num_sequences)
        if profile is not None and layout.cut in ("aligned", "times"):
            key += (profile.transfer_cost, layout.transport)
        if key not in self._cuts:
            self._cuts[key] = first_blocks(self.question.config, layout, profile)
        return self._cuts[key]

    # ---- bounds -------------------------------------------------------------------------------------------------

    def closest(self, frames: Sequence[Layout]) -> Closest:
        """Where nothing fits: the frame whose fullest rank needs least bytes."""
        size = self.question.size
        closest: Closest | None = None
        bounds = sorted((self.bytes.least(frame, size(frame)), index) for index, frame in enumerate(frames))
        for least, index in bounds:
            if closest is not None and closest.fullest_bytes <= least:
                break
            frame = frames[index]
            most, rank = self.bytes.fullest(frame, self.cut(frame), size(frame))
            if closest is None or most < closest.fullest_bytes:
                closest = Closest(layout=frame, fullest_bytes=most, fullest_rank=rank)
        assert closest is not None, "a question has frames"
        return closest

    def frame_seconds(self, layout: Layout) -> float:
        """Of every layout of a frame, whatever its cut and schedule."""
        profile, pp, m = self.profile(layout), layout.pp, layout.microbatches
        model, sides = profile.model, self._blocks(profile)
        if "kv" in self.question.transports(layout):
            sides.append(_reader(profile))
            model -= self._again(profile)
        held = self.bytes.whole(layout)
        summed = [self._gradient_seconds(layout, rank, held.num_elements / pp) for rank in range(pp)]
        before = min(block.forward for block in sides) + self._least_message(layout, profile)
        mean = m * model.total / pp + before * (pp - 1) / 2 + min(summed)
        blocks = math.ceil(self.question.config.num_blocks / pp)
        most = m * blocks * min(block.total for block in sides)
        lone = model.forward + model.backward_input
        update = self.question.machine.traffic_seconds(updated_bytes(self.bytes.states(layout, held), layout) / pp)
        return (max(mean, most, lone) + update) * _BELOW

    def likely_seconds(self, layout: Layout, bound: float, *, split: bool) -> float:
        """No bound, but what a step may take: that of its frame with the first stages of equal chunks to wait for."""
        profile = self.profile(layout)
        model, links = profile.model, self._least_message(layout, profile)
        before = model.forward if split else model.total
        alone = links + min(block.forward for block in self._blocks(profile))
        return bound + (layout.pp - 1) * (before / layout.num_stages + links * (2 - split) - alone / 2)

    @staticmethod
    def _blocks(profile: Profile) -> list[Work]:
        return [block for block in (profile.encoder_block, profile.decoder_block) if block.total]

    def _again(self, profile: Profile) -> Work:
        """What is not recomputed where keys and values are sent."""
        return self.question.config.num_decoder_blocks * (profile.keys_values_spared - profile.keys_values)

    def linear_seconds(self, layout: Layout, *, split: bool) -> float:
        """Of every layout of a frame with one stage a rank and its transport, update and gradients apart."""
        profile, config = self.profile(layout), self.question.config
        works: list[Work] = [getattr(profile, piece) for piece in PIECES if not piece.endswith("_stage")]
        total = config.num_encoder_blocks * profile.encoder_block.total
        total += config.num_decoder_blocks * profile.decoder_block.total
        total += profile.encoder_embedding.total + profile.decoder_embedding.total + profile.head.total
        if layout.transport == "kv":
            works += [_reader(profile), profile.keys_values]
            total -= self._again(profile).total
        share = min(work.forward / work.total for work in works if work.total) if split else 1.0
        often = layout.microbatches + self._summed_share(layout, profile)
        filled = -math.expm1(layout.pp * math.log1p(-share / often)) if share < often else 1.0
        return total * share / filled * _BELOW if share else 0.0

    def _summed_share(self, layout: Layout, profile: Profile) -> float:
        """Gradients of a stage over dp, at least so many times its work on a microbatch."""
        config = self.question.config
        middle, end = config.num_encoder_blocks, config.num_blocks
        works = []
        decoder_block = profile.decoder_block
        if layout.transport == "kv":
            decoder_block = _reader(profile)
            relayed = layout.replace(transport="relay")
            made = self.bytes.block_elements(relayed, middle + 1) - self.bytes.block_elements(layout, middle + 1)
            works.append((profile.keys_values, made))
        for block, first, last in ((profile.encoder_block, 0, middle), (decoder_block, middle, end)):
            if first < last <= first + 2:
                # There is no block without an end of its stack.
                return 0.0
            if first < last:
                works.append((block, self.bytes.block_elements(layout, first + 1)))
        # One tensor may be three ends, and counts once for them.
        for piece, rows in (
            (profile.encoder_embedding, config.source_vocabulary),
            (profile.decoder_embedding, config.vocabulary),
            (profile.head, config.vocabulary),
        ):
            held = rows // layout.tp if layout.shards_vocabulary else rows
            works.append((piece, held * config.width // 3))
        return min(
            self._gradient_seconds(layout, rank, elements, waits=False) / work.total
            for work, elements in works
            if work.total
            for rank in range(layout.pp)
        )

    def pipeline_seconds(
        self, layout: Layout, cut: Sequence[int], makespan_seconds: float | None = None
    ) -> tuple[float, ...]:
        """Of a layout with a cut: under schedules with whole backwards, and with split ones.

        ZeRO changes nothing before the last backward: where the makespan is known of another stage of it, it holds.
        """
        profile, m = self.profile(layout), layout.microbatches
        stages = stages_of(self.question.config, cut)
        ranks = stage_ranks(layout.placement, layout.pp, layout.chunks)
        seconds = stage_seconds(profile, stages)
        sent = [self._sent(layout, profile, ranks, edge) for edge in self._onward(layout.transport, tuple(cut))]
        heads, tails, halves = (
            [0.0, *itertools.accumulate(map(sum, zip(way, (*sent, 0.0), strict=True)))]
            for way in (seconds.forward, seconds.backward, seconds.backward_input)
        )
        works, inputs = [0.0] * layout.pp, [0.0] * layout.pp
        for rank, forward, backward_input, total in zip(
            ranks, seconds.forward, seconds.backward_input, seconds.total, strict=True
        ):
            works[rank] += total
            inputs[rank] += forward + backward_input
        held = self.bytes.held(layout, cut)
        summed = [self._gradient_seconds(layout, rank, held[rank].num_elements) for rank in range(layout.pp)]
        # A rank's first stage is that of its own number, on every placement.
        ends = [heads[rank] + m * works[rank] for rank in range(layout.pp)]
        done = max(map(sum, zip(ends, summed, strict=True)))
        whole = max(end + tails[rank] for rank, end in enumerate(ends))
        split = max(heads[rank] + m * inputs[rank] + halves[rank] for rank in range(layout.pp))
        update = max(
            self.question.machine.traffic_seconds(updated_bytes(self.bytes.states(layout, one), layout)) for one in held
        )
        whole, split = max(whole, heads[-1] + tails[-1]), max(split, heads[-1] + halves[-1])
        known = makespan_seconds or 0.0
        return tuple((max(done, max(last, known) + min(summed)) + update) * _BELOW for last in (whole, split))

    # ---- communication ------------------------------------------------------------------------------------------

    def _sent(self, layout: Layout, profile: Profile, ranks: Sequence[int], edge: Edge) -> float:
        """Seconds of a message from a stage to the next one."""
        if ranks[edge.first] == ranks[edge.last]:
            return 0.0
        link = self._link(layout.tp, layout.pp, layout.dp, ranks[edge.first], ranks[edge.last])
        return link.latency_seconds + link.occupancy_seconds(profile.edge_bytes(edge))

    def _find_onward(self, transport: Transport, cut: tuple[int, ...]) -> tuple[Edge, ...]:
        """From every stage to the next one."""
        made = edges(self.question.config, stages_of(self.question.config, cut), transport)
        return tuple(edge for edge in made if edge.last == edge.first + 1)

    def _least_message(self, layout: Layout, profile: Profile) -> float:
        config = self.question.config
        lengths: list[Carried] = ["source", "target"] if config.has_cross_attention else ["target"]
        if not config.has_decoder:
            lengths = ["source"]
        if "kv" in self.question.transports(layout):
            lengths.append(keys_values_name(0))
        return self._least(layout.tp, layout.pp, layout.dp, min(map(profile.carried_bytes, lengths)))

    def _find_least(self, tp: int, pp: int, dp: int, size_bytes: int) -> float:
        """Seconds of a message to the next rank, wherever it is quickest."""
        links = [self._link(tp, pp, dp, rank, rank + 1) for rank in range(pp - 1)]
        return min((link.latency_seconds + link.occupancy_seconds(size_bytes) for link in links), default=0.0)

    def _find_link(self, tp: int, pp: int, dp: int, first: int, last: int) -> Link:
        machine = self.question.machine
        return machine.link(machine.reach_over(Layout(tp=tp, pp=pp, dp=dp).mesh, first, last))

    def _gradient_seconds(self, layout: Layout, rank: int, num_elements: float, *, waits: bool = True) -> float:
        """What a rank with so many parameters takes for them over dp, with latency or without."""
        if layout.dp == 1:
            return 0.0
        counts = {"all_reduce": 1} if layout.zero == 0 else {"reduce_scatter": 1, "all_gather": 1}
        if layout.zero >= 2:
            counts["reduce_scatter"] = layout.microbatches
        if layout.zero == 3:
            counts["all_gather"] = 2 * layout.microbatches
        seconds = 0.0
        for operation, count in counts.items():
            latency, per_byte = self._over_dp(operation, layout.tp, layout.pp, layout.dp, rank)
            seconds += count * (latency * waits + per_byte * num_elements * self.question.dtype_bytes)
        return seconds

    def _find_over_dp(self, operation: Operation, tp: int, pp: int, dp: int, rank: int) -> tuple[float, float]:
        """Latency, and seconds of a byte, of a collective over the replicas of a pipeline rank."""
        machine, mesh = self.question.machine, Layout(tp=tp, pp=pp, dp=dp).mesh
        costs = []
        for coordinate in range(tp):
            group = mesh.peers(mesh.rank(Coordinate(dp=0, pp=rank, cp=0, tp=coordinate)), "dp")
            latency = machine.collective_seconds(operation, 0, group)
            costs.append((latency, (machine.collective_seconds(operation, dp, group) - latency) / dp))
        return min(latency for latency, _ in costs), min(per_byte for _, per_byte in costs)


def _reader(profile: Profile) -> Work:
    """A decoder block that is sent its keys and values."""
    return profile.decoder_block - profile.keys_values_spared


def _inside(layout: Layout) -> tuple[object, ...]:
    """What changes the cost of blocks and ends, but for tp."""
    words = (layout.recompute, layout.memory_gather, layout.saved_input, layout.vocabulary, layout.attention)
    return (layout.sp, *words)
