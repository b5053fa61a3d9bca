"""A run beside its recipe: the published figure, the run's own, and the settings that differ."""

from collections.abc import Iterator, Mapping
from typing import Any

from raydali.errors import UsageError
from raydali.train.recipes.published import find_recipe
from raydali.train.recipes.recipe import Recipe


def recipe_lines(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines on the recipe of a run that begins; none without a recipe.

    Args:
        settings: as `config.json` has them.
    """
    if (recipe := _recipe(settings)) is not None:
        yield f"recipe {settings['recipe']}: top-1 {recipe.top1:.4g} published ({recipe.measured_on}), {recipe.source}"
        for difference in recipe.differences(settings):
            yield f"differs from recipe {settings['recipe']}: {difference}"


def beside_published(settings: Mapping[str, Any], top1: float | None) -> str | None:
    """Return the accuracy of a run, of its last epoch, beside the one that is published; None without a recipe.

    Args:
        settings: as `config.json` has them.
        top1: the accuracy, 0..1, if it was measured.
    """
    if top1 is None or (recipe := _recipe(settings)) is None:
        return None
    said = f"top-1 {top1:.4f}; recipe {settings['recipe']}: {recipe.top1:.4g} published ({recipe.measured_on})"
    differences = ", ".join(recipe.differences(settings))
    return f"{said}; this run differs: {differences}" if differences else said


def _recipe(settings: Mapping[str, Any]) -> Recipe | None:
    name = settings.get("recipe")
    try:
        return find_recipe(name) if isinstance(name, str) else None
    except UsageError:  # of another version
        return None
