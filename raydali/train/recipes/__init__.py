"""Recipes: the settings of published trainings, with the accuracy that was published."""
