"""What a traced graph has fixed and a model has not: whether it is training.

An exported graph holds `dropout(x, 0.1, True)`: training for ever. Here the True becomes `self.training` of whatever
module the graph ends up in, so that train() and eval() do to a piece what they do to a model:

    batch_norm(x, ..., mean, var, True, ...)        ->  training
    dropout(x, p, True), lstm(..., train=True, ...) ->  training
    attention(q, k, v, dropout_p)                   ->  dropout_p * training
    num_batches_tracked += 1                        ->  += training

Python's own branches (`if self.training: ...`) are decided when the graph is traced; nothing can bring them back.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

TRAINING = "training"
FLAGS = ("train", "training", "use_input_stats")
COUNTER = "num_batches_tracked"


def follow_training(graph: fx.Graph) -> None:
    """Let every switch of the graph follow the `training` of its module.

    >>> graph = fx.Graph()
    >>> dropped = graph.call_function(torch.ops.aten.dropout.default, (graph.placeholder("x"), 0.5, True))
    >>> _ = graph.output(dropped)
    >>> follow_training(graph)
    >>> fx.GraphModule({"training": True}, graph).eval()(torch.ones(2))
    tensor([1., 1.])
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            for position, value in _switches(node, node.target):
                with graph.inserting_before(node):
                    switch: Any = graph.create_node("get_attr", TRAINING)
                    if not isinstance(value, bool) and value != 1:
                        switch = graph.call_function(operator.mul, (value, switch))
                    switch.meta[TRAINING] = True
                node.args = (*node.args[:position], switch, *node.args[position + 1 :])


def is_switch(node: fx.Node) -> bool:
    """Whether a node is only a number that follows `training`: it goes wherever it is used.

    >>> is_switch(fx.Graph().placeholder("x"))
    False
    """
    return TRAINING in node.meta


def _switches(node: fx.Node, operation: torch._ops.OpOverload) -> list[tuple[int, Any]]:
    """The positions of arguments that are what they are because the model was training, and their values."""
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, node.args, strict=False))
    if "running_mean" in given and given["running_mean"] is None:
        return []  # it takes the batch's own statistics whether it trains or not
    found: list[tuple[int, Any]] = [(names.index(name), True) for name in FLAGS if given.get(name) is True]
    if given.get("dropout_p"):
        found.append((names.index("dropout_p"), given["dropout_p"]))
    counted = str(getattr(given.get("self"), "target", ""))
    if operation == torch.ops.aten.add_.Tensor and counted.endswith(COUNTER) and given.get("other") == 1:
        found.append((names.index("other"), 1))
    return found
