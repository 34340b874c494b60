"""Names that were public in paceline.recipes until 0.1 are found there, with a word on where they are now."""

import pytest

import paceline
import paceline.recipes


@pytest.mark.parametrize("name", ["Race", "Result", "simulate"])
def test_what_was_imported_from_recipes_still_is_with_a_warning(name):
    with pytest.warns(DeprecationWarning, match=f"paceline.recipes.{name} is paceline.{name} now"):
        assert getattr(paceline.recipes, name) is getattr(paceline, name)


def test_a_name_that_never_was_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'paceline.recipes' has no attribute 'simulated'"):
        _ = paceline.recipes.simulated
