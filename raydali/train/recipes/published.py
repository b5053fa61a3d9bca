"""The recipes by name: a function each, whose docstring has the source, the accuracy and what differs from it."""

import difflib
from collections.abc import Callable

from raydali.errors import UsageError
from raydali.train.recipes.recipe import Recipe, Settings

FASHION = "https://github.com/zalandoresearch/fashion-mnist#benchmark"


def fashion() -> Recipe:
    """Return a recipe for Fashion-MNIST (Xiao et al., 2017): a Wide ResNet 40-4 on its images of 28 pixels.

    Published: top-1 96.7 % of a WRN40-4 with flips and crops, in the table of FASHION. No settings are published with
    it, so these are raydali's own: SGD with shifts, flips, label smoothing and a moving average.
    """
    return Recipe(
        top1=0.967,
        measured_on="Fashion-MNIST, WRN40-4",
        source=FASHION,
        settings=Settings(
            model="wrn40_4",
            epochs=100,
            global_batch_size=512,
            batch_size=512,
            image_size=28,
            resize_size=28,
            random_area=(1.0, 1.0),
            augment="shift:4",
            label_smoothing=0.1,
            learning_rate=0.4,
            weight_decay=5e-4,
            warmup_epochs=5,
            ema_decay=0.999,
            ema_warmup=True,
        ),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "fashion": fashion,
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of this name.

    Raises:
        UsageError: there is none. The message suggests similar names.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=3, cutoff=0.4) or RECIPES
        raise UsageError(f"--recipe {name} is unknown: try {' or '.join(near)}")
    return RECIPES[name]()
