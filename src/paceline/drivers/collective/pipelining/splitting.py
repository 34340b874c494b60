"""Which pieces' backward may be taken apart, into the gradient of what came in (I) and that of the weights (W).

torch finds the weights' part by walking from each weight up to where the path of the inputs is met, remembers what
arrives there during I, and goes on from there in W:

        input ──> mul ──> linear ──> output            W begins at linear, with the gradient that came there
                            ▲
        weight ─────────────┘

That is right if every weight meets the path of the inputs, and at one place. It is not where a weight is used several
times (an unrolled RNN), where an output depends on weights alone (an embedding of ids that were only handed on), where
nothing that came in has a gradient, or inside an operation that uses its weights many times (aten.lstm). Such a piece
has its whole backward in I, and nothing to do in W: the same gradients, less to fill idle time with.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from paceline.pipeline.graph import PieceModule

MANY_TIMES = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")


def splits(piece: PieceModule) -> bool:
    """Whether backward of this piece may be taken apart.

    >>> from paceline.pipeline.graph import ModelGraph
    >>> from paceline.pipeline.graph import cut_piece
    >>> from torch import nn
    >>> layer = nn.Linear(4, 4)
    >>> once = ModelGraph(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), layer), (torch.ones(2, 4),))
    >>> twice = ModelGraph(nn.Sequential(nn.Linear(4, 4), layer, nn.ReLU(), layer), (torch.ones(2, 4),))
    >>> splits(cut_piece(once, 1, 3)), splits(cut_piece(twice, 1, 4))
    (True, False)
    """
    graph = piece.module.graph
    if any(node.op == "call_module" for node in graph.nodes):
        return False
    came = {value.name for value in piece.takes if value.needs_gradient}
    on_path = _reached(node for node in graph.nodes if node.op == "placeholder" and node.name in came)
    weights = dict(piece.module.named_parameters(remove_duplicate=False))
    reads = [node for node in graph.nodes if node.op == "get_attr" and str(node.target) in weights]
    trained = [node for node in reads if weights[str(node.target)].requires_grad]
    once = len({id(weights[str(node.target)]) for node in trained}) == len(trained)
    return once and all(_meets_once(node, on_path) for node in trained)


def _reached(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += list(node.users)
    return found


def _meets_once(weight: fx.Node, on_path: set[fx.Node]) -> bool:
    """Whether all ways from a weight to the outputs lead through one operation on the path of the inputs."""
    meetings: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    left = list(weight.users)
    while left:
        node = left.pop()
        if node in on_path and node.op != "output":
            meetings.add(node)
        elif node.op == "output":
            return False
        elif node not in seen:
            seen.add(node)
            left += list(node.users)
    return len(meetings) == 1 and all(_is_plain(node) for node in meetings | seen)


def _is_plain(node: fx.Node) -> bool:
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload):
        return callable(operation) and getattr(operation, "__name__", "") in ("getitem", "hand_on")
    return operation._schema.name.partition("::")[2] not in MANY_TIMES
