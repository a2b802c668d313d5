"""How few complete choices show every legal pair of values together?

A covering array of strength two: of all options' product, a small set of rows in which each pair of values that the
rules allow occurs at least once. Most defects need one value or two to meet (Kuhn, Wallace and Gallo 2004, IEEE TSE
30(6)). allpairspy makes the rows greedily, in the same way each time. Under rules its greed may end early; the pairs
that are then left are packed into as few further rows as they fit, which allpairspy completes.

Left out: what options mean (`launch/matrix.py`), triples.
"""

import dataclasses
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from allpairspy import AllPairs

Value = str | int | bool
Options = Mapping[str, Sequence[Value]]
Choice = dict[str, Value]
Pair = frozenset[tuple[str, Value]]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Values that exclude each other; `allows` is asked with the values of `options`, in their order."""

    reason: str
    options: tuple[str, ...]
    allows: Callable[..., bool]

    def holds(self, choice: Mapping[str, Value]) -> bool:
        """True as well while one of the options is not chosen yet."""
        if any(option not in choice for option in self.options):
            return True
        return self.allows(*(choice[option] for option in self.options))


def covering_array(options: Options, rules: Sequence[Rule]) -> tuple[Choice, ...]:
    """Complete legal choices in which every legal pair occurs; the same for the same arguments."""
    rows = list(_greedy(options, rules))
    missing = legal_pairs(options, rules) - pairs(rows)
    while missing:
        packed: Choice = {}
        for pair in sorted(missing, key=lambda pair: sorted(map(str, pair))):
            joined = {**packed, **dict(pair)}
            if all(packed.get(option, value) == value for option, value in pair):
                packed = joined if _can_be_completed(joined, options, rules) else packed
        # What the pairs leave open is shuffled: rows that differ show more triples than rows that are alike.
        shuffled = {option: random.Random(len(rows)).sample(values, len(values)) for option, values in options.items()}
        rows.append(next(_greedy({**shuffled, **{option: (value,) for option, value in packed.items()}}, rules)))
        missing -= pairs(rows[-1:])
    return tuple(rows)


def pairs(rows: Iterable[Choice]) -> set[Pair]:
    """Every pair of values of different options that occurs in some of the rows."""
    return {frozenset(pair) for row in rows for pair in itertools.combinations(row.items(), 2)}


def legal_pairs(options: Options, rules: Sequence[Rule]) -> set[Pair]:
    """Every pair of values of different options that some complete legal choice contains."""
    return {
        frozenset({(one, one_value), (other, other_value)})
        for one, other in itertools.combinations(options, 2)
        for one_value, other_value in itertools.product(options[one], options[other])
        if _can_be_completed({one: one_value, other: other_value}, options, rules)
    }


def _can_be_completed(choice: Choice, options: Options, rules: Sequence[Rule]) -> bool:
    """Whether a partial choice is part of a complete legal one: tries values option by option, and goes back."""
    if not all(rule.holds(choice) for rule in rules):
        return False
    option = next((option for option in options if option not in choice), None)
    return option is None or any(
        _can_be_completed({**choice, option: value}, options, rules) for value in options[option]
    )


def _greedy(options: Options, rules: Sequence[Rule]) -> Iterator[Choice]:
    names = tuple(options)
    ending: list[list[Rule]] = [[] for _ in names]
    for rule in rules:
        ending[max(names.index(option) for option in rule.options)].append(rule)

    def allows(values: Sequence[Value]) -> bool:
        # Called for prefixes that grow by one value: rules that ended earlier were asked then.
        prefix = dict(zip(names, values, strict=False))
        return all(rule.holds(prefix) for rule in ending[len(values) - 1])

    for row in AllPairs(OrderedDict((name, list(values)) for name, values in options.items()), filter_func=allows):
        yield row._asdict()
