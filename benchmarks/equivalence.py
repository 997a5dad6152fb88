"""Figure: typical training loops give the same result however often workers join and leave.

Every loop of equivalence_loops.LOOPS trains once undisturbed, and once with random resizes among 1, 2 and 3
workers, in which the leader may leave. Judged:

- the loss of every epoch is within 1e-5 of the undisturbed one;
- at the end of every epoch all workers have bit-identical parameters;
- every epoch uses the same examples.

Every loop of REFUSED must fail with an error message, which is printed, and not with a traceback. The loop
that sets the learning rate by its own counter must fail within the first steps after a resize.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import equivalence_loops
from common import TEST_HELPERS, verdict
from equivalence_loops import EXAMPLES, LOOPS, REFUSED

sys.path += TEST_HELPERS
from stretto.wire.messages import Failed, Finished, Ready
from torch_gang import Cradle, Gang, wait_until

ENTRY = f"{equivalence_loops.__file__}:train"
FULL_RESIZES, SHORT_RESIZES = 20, 4
EPOCHS_PER_RESIZE = 3
MOST = 1e-5
GOES_WRONG_AT_A_RESIZE = "own counter sets the rate"


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    seen: dict[int, list[int]]
    """The examples of each epoch, sorted."""
    models: dict[int, set[str]]
    """The hashes of the parameters in each epoch, over all workers."""
    sizes: set[int]


def gang_of(cradle: Cradle, folder: Path, loop: str, epochs: int) -> Gang:
    config = {"loop": loop, "epochs": epochs, "seen": str(folder / "seen"), "go": str(folder / "go")}
    return Gang(cradle, folder, config=config, checkpoint_every_s=1e9)


def result(gang: Gang) -> Trained:
    seen: dict[int, list[int]] = {}
    models: dict[int, set[str]] = {}
    sizes = set()
    for line in (gang.folder / "seen").read_text().splitlines():
        kind, epoch, number, content = json.loads(line)
        if kind == "seen":
            seen.setdefault(epoch, []).extend(content)
            sizes.add(number)
        else:
            models.setdefault(epoch, set()).add(content)
    ends = gang.epoch_ends()
    losses = [ends[epoch].values["loss"] for epoch in sorted(ends)]
    return Trained(losses, {epoch: sorted(numbers) for epoch, numbers in seen.items()}, models, sizes)


def undisturbed(cradle: Cradle, folder: Path, loop: str, epochs: int) -> Trained:
    with gang_of(cradle, folder, loop, epochs) as gang:
        (folder / "go").touch()
        gang.spawn("alone")
        gang.form("alone")
        gang.wait("alone", Finished)
        return result(gang)


def resized(cradle: Cradle, folder: Path, loop: str, resizes: int, chance: random.Random) -> Trained:
    """Trains with random resizes; the leader of each new group was a member of the group before."""
    with gang_of(cradle, folder, loop, resizes * EPOCHS_PER_RESIZE) as gang:
        names = ["w0"]
        gang.spawn("w0")
        gang.form("w0")
        for number in range(resizes):
            size = chance.choice([size for size in (1, 2, 3) if size != len(names)])
            staying = chance.sample(names, min(len(names), chance.randint(1, size)))
            coming = [f"w{number + 1}.{place}" for place in range(size - len(staying))]
            for name in coming:
                gang.spawn(name)
            names = [*staying, *coming]
            gang.form(*names)
            threading.Event().wait(chance.random() * 0.15)
        (folder / "go").touch()
        gang.wait(names[0], Finished)
        return result(gang)


def problems(alone: Trained, ours: Trained) -> list[str]:
    found = []
    if len(alone.losses) != len(ours.losses):
        found.append(f"{len(ours.losses)} epochs instead of {len(alone.losses)}")
    if alone.seen != ours.seen:
        wrong = sorted(epoch for epoch in alone.seen if alone.seen[epoch] != ours.seen.get(epoch))
        found.append(f"other examples in epochs {wrong}")
    if unlike := sorted(epoch for epoch, models in ours.models.items() if len(models) > 1):
        found.append(f"unlike replicas after epochs {unlike}")
    return found


def judge_loop(cradle: Cradle, folder: Path, loop: str, resizes: int, chance: random.Random) -> bool:
    began_s = time.monotonic()
    try:
        alone = undisturbed(cradle, folder / "alone", loop, resizes * EPOCHS_PER_RESIZE)
        ours = resized(cradle, folder / "ours", loop, resizes, chance)
    except AssertionError as error:
        print(f"{loop:<26} {str(error)[-300:]}")
        return False
    found = problems(alone, ours)
    apart = max((abs(a - b) for a, b in zip(alone.losses, ours.losses, strict=False)), default=0.0)
    if apart > MOST:
        found.append(f"a loss is off by {apart:.2g}")
    once = all(numbers == list(range(len(numbers))) for numbers in alone.seen.values())
    print(
        f"{loop:<26} {resizes:>7} {''.join(map(str, sorted(ours.sizes))):>7} {apart:>10.1e} "
        f"{'once' if once else 'as alone':>9}  {'; '.join(found) or 'same replicas':<14} "
        f"({time.monotonic() - began_s:.0f} s)",
        flush=True,
    )
    return not found


def judge_refused(cradle: Cradle, folder: Path, loop: str) -> bool:
    """One worker; then two, for loops that only fail after a resize."""
    with gang_of(cradle, folder, loop, 1000) as gang:
        gang.spawn("w0")
        try:
            gang.wait("w0", Ready | Failed)  # type: ignore[arg-type]  # isinstance takes both
            if any(isinstance(message, Ready) for message in gang.members["w0"].said):
                gang.form("w0", wait=False)
            if loop == GOES_WRONG_AT_A_RESIZE:
                wait_until((folder / "seen").exists, within_s=60)
                gang.spawn("w1")
                gang.form("w0", "w1")
            said = gang.wait("w0", Failed).traceback.strip()
        except AssertionError as error:
            said = f"Traceback: {error}"
    is_sentence = "Traceback" not in said
    print(f"{loop}:\n    {said if is_sentence else said[-500:]}", flush=True)
    return is_sentence


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    resizes_help = f"{FULL_RESIZES} resizes of every loop instead of {SHORT_RESIZES}"
    parser.add_argument("--full", action="store_true", help=resizes_help)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="the loops whose name has this in it")
    options = parser.parse_args()
    resizes = FULL_RESIZES if options.full else SHORT_RESIZES
    chance = random.Random(options.seed)
    print(f"Training loops under random resizes; {EXAMPLES} examples")
    print(f"{'loop':<26} {'resizes':>7} {'workers':>7} {'loss apart':>10} {'examples':>9}")
    reached = True
    with tempfile.TemporaryDirectory() as name, Cradle(ENTRY, Path(name)) as cradle:
        for place, loop in enumerate([*LOOPS, *REFUSED]):
            if options.only and options.only not in loop:
                continue
            folder = Path(name) / str(place)
            if loop in LOOPS:
                reached &= judge_loop(cradle, folder, loop, resizes, chance)
            else:
                reached &= judge_refused(cradle, folder, loop)
    print(f"all the same within {MOST:g}, or refused in a sentence: {verdict(reached)}")


if __name__ == "__main__":
    main()
