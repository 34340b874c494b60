"""The paper's four networks, and the models that stand for each of them."""

from __future__ import annotations

PLAIN, NORMED, RESIDUAL, INCEPTION = "plain", "normed", "residual", "inception"
PAPER_NETWORK = {PLAIN: "alexnet", NORMED: "alexnet-bn"}
SHOWN = {PLAIN: "AlexNet", NORMED: "AlexNet-BN", RESIDUAL: "ResNet-50", INCEPTION: "GoogLeNet"}
LABORATORY_MODEL = {
    PLAIN: "small-cnn",
    NORMED: "small-cnn-bn",
    RESIDUAL: "small-cnn-bn",
    INCEPTION: "small-googlenet",
}
FULL_MODEL = {PLAIN: "alexnet", NORMED: "alexnet-bn", RESIDUAL: "resnet50", INCEPTION: "plain-googlenet"}
