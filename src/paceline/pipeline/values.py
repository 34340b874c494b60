"""What flows through a traced graph: each value's shape, whether it has a gradient, and what overwrites it.

The graph is played once with tensors that have no content. On the way, operations that overwrite an activation are
replaced by those that make a new one: a piece cannot overwrite what it received, because autograd forbids it for
leaves.

    relu_(bn)        ->  relu(bn), and everything after it reads that
    x[:, 0].add_(y)  stays: it changes x through a view. All that touch x are then bound together in one piece.
    half += float    stays too: half + float would be float

What writes to a buffer does so as in the model, and all that see the buffer are bound together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

Bound = tuple[fx.Node, fx.Node]


class Values:
    """The values of a graph, played with its weights' and inputs' stand-ins.

    `bound` are pairs of nodes that one piece must hold together, with all that lies between them; `changed` are the
    weights (buffers) that the graph writes to.
    """

    def __init__(self, graph: fx.Graph, attributes: Mapping[str, Any]) -> None:
        self.bound: list[Bound] = []
        self.changed: set[str] = set()
        self._of: dict[fx.Node, Any] = {}
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        stand_in = next((n.meta["val"] for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode")), None)
        self._attributes = attributes
        self._mode: Any = getattr(stand_in, "fake_mode", None)
        with torch.enable_grad():
            for node in list(graph.nodes):
                if node.op == "call_function":
                    self._make_new(node)
                self._of[node] = self._played(node, node.target)
                node.meta["val"] = self._of[node]
        self._bind_changed()

    def _played(self, node: fx.Node, operation: Any) -> Any:
        if node.op == "get_attr":
            value = self._attributes[str(node.target)]
            return self._mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value
        if node.op != "call_function":
            return node.meta.get("val")
        arguments = fx.node.map_arg(node.args, self._of.__getitem__)
        settings = fx.node.map_arg(node.kwargs, self._of.__getitem__)
        with self._mode:
            return operation(*arguments, **settings)

    def _make_new(self, node: fx.Node) -> None:
        """Where an operation overwrites an activation: make it new, or bind together all that see the change."""
        for written in _written(node):
            weight = self._weight_of(written)
            if weight is not None:
                self.changed.add(str(weight.target))
                if _lies_as(self._of[written], self._of[weight]):  # a second += reads what the first returned
                    node.replace_input_with(written, weight)
                continue
            others = [other for other in self._sharing(written, node) if other is not written]
            seen = [other for other in others if any(self._after(user, node) for user in other.users)]
            new = _without_writing(node)
            if new is None or seen or not self._gives_the_same(node, new, written):
                last = max((user for each in (written, node, *others) for user in each.users), key=self._place)
                first = min((written, *others), key=self._place)
                self.bound.append((first, max(last, node, key=self._place)))
                continue
            node.target = new
            for user in [user for user in written.users if self._after(user, node)]:
                user.replace_input_with(written, node)

    def _gives_the_same(self, node: fx.Node, new: torch._ops.OpOverload, written: fx.Node) -> bool:
        """Whether what is made new has the type and shape of what would be overwritten."""
        made, there = self._played(node, new), self._of[written]
        return isinstance(made, torch.Tensor) and (made.dtype, made.shape) == (there.dtype, there.shape)

    def _bind_changed(self) -> None:
        """All that see a weight that changes, itself or through a view, from the first to the last."""
        for name in self.changed:
            weight = next(node for node in self._of if node.op == "get_attr" and node.target == name)
            storage = _storage(self._of[weight])
            users = [user for node, value in self._of.items() if _storage(value) == storage for user in node.users]
            seen = sorted((user for user in users if user.op == "call_function"), key=self._place)
            if seen:
                self.bound.append((seen[0], seen[-1]))

    def _weight_of(self, written: fx.Node) -> fx.Node | None:
        """The weight whose storage a value has, if it is one."""
        storage = _storage(self._of[written])
        weights = (node for node in self._of if node.op == "get_attr")
        return next((node for node in weights if _storage(self._of[node]) == storage), None)

    def _sharing(self, written: fx.Node, before: fx.Node) -> Iterator[fx.Node]:
        """Activations before a node that have the storage of one."""
        storage = _storage(self._of[written])
        for node, value in self._of.items():
            if node.op != "get_attr" and self._after(before, node) and _storage(value) == storage:
                yield node

    def _place(self, node: fx.Node) -> int:
        return self._order[node]

    def _after(self, later: fx.Node, node: fx.Node) -> bool:
        return self._order[later] > self._order[node]


def _storage(value: Any) -> int | None:
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None


def _lies_as(value: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a value of the same storage is the whole of it, in the same order."""
    return (value.shape, value.stride(), value.storage_offset()) == (
        weight.shape,
        weight.stride(),
        weight.storage_offset(),
    )


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation overwrites."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    given: dict[str, Any] = {
        argument.name: value for argument, value in zip(node.target._schema.arguments, node.args, strict=False)
    }
    given |= dict(node.kwargs)
    writing = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [given[name] for name in writing if isinstance(given.get(name), fx.Node)]


def _without_writing(node: fx.Node) -> torch._ops.OpOverload | None:
    """The same operation that makes a new tensor: relu for relu_. None if there is none."""
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload):
        return None
    space, _, name = operation._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None)
    found = getattr(packet, operation._overloadname, None) if name.endswith("_") else None
    return found if isinstance(found, torch._ops.OpOverload) and not found._schema.is_mutable else None
