"""Who may have GPUs that HyperSched's pool cannot use: the order of claims, and what each gets.

The pool are the running trials that hold their own at their rungs. A trial that fell runs only on GPUs that
the pool could not use at its largest, and only while nobody in front of it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from stretto.search.halving import order


def in_line(
    scores: Mapping[str, float | None],
    new: Iterable[str],
    *,
    holding: Iterable[str],
    running: Collection[str],
    late: bool,
) -> list[str]:
    """Trials outside the pool, the first claim first; `scores` has those that are not new.

    While a new trial can still come as far as any has, it comes after those that are `holding` their own and
    before those that fell. Late, it cannot, and the better metric goes first, whatever the rungs say. Of
    equals, the one that runs stays.
    """
    best_first = sorted(scores, key=lambda trial: (order(scores[trial], ""), trial not in running, trial))
    if late:
        return [*best_first, *new]
    return list(dict.fromkeys([*(trial for trial in holding if trial in scores), *new, *best_first]))


def seats(
    line: Iterable[str], spare: int, *, most: Callable[[str], int], is_worth: Callable[[str, int], bool]
) -> dict[str, int]:
    """Those in line to whom the spare GPUs go, and how many to each: at most what it can use.

    Who would gain nothing by the deadline with what is left for it is passed over.
    """
    given: dict[str, int] = {}
    for trial in line:
        share = min(most(trial), spare)
        if share <= 0:
            break
        if is_worth(trial, share):
            given[trial] = share
            spare -= share
    return given
