"""A setting that may be left open can be: in a file's words, on the command line and in Python."""

from paceline import Recipe
from paceline.recipes import read_recipe


def test_no_target_loss_is_a_target_loss_of_none():
    assert read_recipe(overrides={"target_loss": "none"}).target_loss is None
    assert Recipe(target_loss=None).target_loss is None
    assert Recipe.from_document(Recipe(target_loss=None).to_document()) == Recipe(target_loss=None)
