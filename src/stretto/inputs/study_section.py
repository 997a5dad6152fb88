"""The sections [study] and [halving] of a study file: what is tuned, and when trials are compared."""

from __future__ import annotations

from stretto.core.errors import InputError
from stretto.inputs.fields import Fields
from stretto.search.halving import check_rungs, make_rungs
from stretto.search.study import Direction, Study

SECTIONS = ("study", "halving", "space", "limits", "machine", "cluster", "ray", "profile", "world")
"""All sections of a study file."""
STUDY_KEYS = (
    "name",
    "metric",
    "direction",
    "trials",
    "sampler",
    "entry",
    "command",
    "checkpoints",
    "in_folder",
)
HALVING_KEYS = ("rungs", "min_epochs", "eta", "max_epochs")
MOST_TRIALS = 10**6
MOST_EPOCHS = 10**6


def study_in(sections: Fields) -> Study:
    """Reads the two sections."""
    fields, halving = sections.table("study", STUDY_KEYS), sections.table("halving", HALVING_KEYS)
    max_epochs = halving.whole("max_epochs", at_most=MOST_EPOCHS)
    eta = halving.whole("eta", at_least=2, at_most=MOST_TRIALS)
    return Study(
        name=fields.text("name"),
        metric=fields.text("metric"),
        direction=Direction(fields.choice("direction", tuple(Direction))),
        trials=fields.whole("trials", at_most=MOST_TRIALS),
        rungs=_rungs(halving, eta, max_epochs),
        eta=eta,
        max_epochs=max_epochs,
    )


def _rungs(halving: Fields, eta: int, max_epochs: int) -> tuple[int, ...]:
    written = halving.raw("rungs", rule='"additive", "geometric" or a list of epochs')
    if isinstance(written, list):
        rungs = halving.list("rungs", of=int, rule='"additive", "geometric" or a list of whole numbers')
        if "min_epochs" in halving:
            raise InputError(
                "min_epochs has no meaning where rungs are written out.",
                where=halving.where("min_epochs"),
                remedy="Leave it out.",
            )
        return check_rungs(rungs, max_epochs, where=halving.where("rungs"))
    spacing = halving.choice("rungs", ("additive", "geometric"))
    min_epochs = halving.whole("min_epochs", at_most=MOST_EPOCHS)
    if min_epochs >= max_epochs:
        another = "Raise max_epochs" if max_epochs == 1 else "Lower it"
        raise halving.wrong(
            "min_epochs",
            f"below max_epochs {max_epochs}",
            f"{another}, or write rungs = [] and no min_epochs: then trials are never compared.",
        )
    return make_rungs(
        "additive" if spacing == "additive" else "geometric",
        min_epochs=min_epochs,
        eta=eta,
        max_epochs=max_epochs,
    )
