"""Bad values are refused in one line that names the value and what to do."""

import pytest

from paceline.models import MODELS, build_model

GOOD = {"name": "mlp", "input_shape": (1, 8, 8), "classes": 10}
SHAPE = r"input_shape must be (three )?whole numbers of at least 1, \(channels, height, width\)"

BAD = [
    ({"name": "lenet", "input_shape": (8, 8)}, rf"{SHAPE}.*input_shape=\(8, 8\)"),
    ({"name": "lenet", "input_shape": (1, 1, 8, 8)}, SHAPE),
    ({"input_shape": (1, 0, 8)}, rf"{SHAPE}.*\(1, 0, 8\)"),
    ({"input_shape": (-3, 8, 8)}, SHAPE),
    ({"input_shape": (1, 8.0, 8)}, SHAPE),
    ({"input_shape": (1, True, 8)}, SHAPE),
    ({"input_shape": 64}, rf"{SHAPE}.*input_shape=64"),
    ({"input_shape": None}, SHAPE),
    ({"input_shape": "3x8"}, SHAPE),
    ({"classes": 0}, r"classes must be at least 1 \(classes=0\)"),
    ({"classes": "ten"}, r"classes must be a whole number \(classes='ten'\)"),
    ({"classes": 2.5}, r"classes must be a whole number \(classes=2.5\)"),
    ({"seed": "now"}, r"seed must be a whole number \(seed='now'\)"),
    ({"seed": None}, r"seed must be a whole number \(seed=None\)"),
    ({"name": "resnet19"}, r"unknown model 'resnet19'; did you mean 'resnet.*choose from mlp, lenet, vgg11"),
    ({"name": ""}, r"unknown model ''; choose from mlp"),
    ({"name": None}, r"unknown model None; choose from mlp"),
    ({"norm": "batch"}, r"model 'mlp' has no normalisation to choose \(norm='batch'\); .*take one of vgg11"),
    ({"name": "lenet", "norm": "none"}, r"model 'lenet' has no normalisation to choose"),
    ({"name": "alexnet", "norm": "group"}, r"model 'alexnet' has no normalisation .*alexnet-bn"),
    ({"name": "torch.nn:Identity", "norm": "group"}, r"model 'torch.nn:Identity' has no normalisation"),
    ({"name": "vgg11", "norm": "layer"}, r"unknown norm for vgg11 'layer'; .*choose from batch, group, none"),
    ({"name": "resnet18", "norm": "none"}, r"unknown norm for resnet18 'none'; .*choose from batch, group"),
    ({"name": "resnet18", "norm": "Batch"}, r"did you mean 'batch'\?"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=[str(changed) for changed, _ in BAD])
def test_bad_values_are_refused(changed, message):
    settings = GOOD | changed
    with pytest.raises(ValueError, match=message) as caught:
        build_model(settings.pop("name"), **settings)
    assert "\n" not in str(caught.value)


def test_whole_numbers_of_any_library_are_taken():
    import numpy as np

    shape = tuple(np.array([1, 8, 8]))
    theirs = build_model("mlp", input_shape=shape, classes=np.int64(10), seed=np.int32(3))
    ours = build_model("mlp", input_shape=(1, 8, 8), classes=10, seed=3)
    assert all((a == b).all() for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))


def test_the_table_cannot_be_changed_by_accident():
    with pytest.raises(TypeError):
        MODELS["mine"] = MODELS["mlp"]
