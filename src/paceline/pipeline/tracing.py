"""A model as a graph whose runs of nodes can become modules: by torch.export, or module by module where that fails.

torch.export runs the model once on tensors without content and records every operation: loops are unrolled, branches
are taken, and `self.training` is what it was: a model in eval mode, or a part of it, trains so. Shapes are those of one
micro-batch. Where export fails and the model is an nn.Sequential, its modules are taken whole.

An exported graph is changed in two ways before it can be cut.

Operations that overwrite an activation are replaced by those that make a new one, because a piece cannot overwrite what
it received (autograd forbids it for leaves):

    relu_(bn)        ->  relu(bn), and everything after it reads that
    x[:, 0].add_(y)  stays: it changes x through a view. All that touch x are then bound together in one piece.
    half += float    stays too: half + float would be float

What writes to a buffer does so as in the model, and all nodes that see the buffer are bound together.

Flags that say "training" follow the module that the graph ends up in, so that train() and eval() do to a piece what
they do to a model:

    batch_norm(x, ..., mean, var, True, ...)        ->  training
    dropout(x, p, True), lstm(..., train=True, ...) ->  training
    attention(q, k, v, dropout_p)                   ->  dropout_p * training
    num_batches_tracked += 1                        ->  += training
    bernoulli_(mask, p), floor(p + rand)            ->  p, unless training

The last are what drop path (stochastic depth) does, behind `if not self.training: return x`: it divides by p, so its
mean in place of a mask leaves x as it is. All other branches of Python's own (`if self.training: ...`) are decided when
the graph is traced; nothing can bring them back.
"""

from __future__ import annotations

import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from paceline.pipeline import PipelineError

Inputs = tuple[torch.Tensor, ...]
Bound = tuple[fx.Node, fx.Node]

TRAINING = "training"
TRAINING_FLAGS = ("train", "training", "use_input_stats")
BATCH_COUNTER = "num_batches_tracked"


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedModel:
    """A graph whose placeholders are the model's inputs, and the attributes (weights, modules) that its nodes name.

    `bound` are pairs of nodes that one piece must hold together, with all that lies between them; `changed` are the
    weights (buffers) that the graph writes to.
    """

    graph: fx.Graph
    attributes: dict[str, Any]
    several_outputs: bool = False
    bound: tuple[Bound, ...] = ()
    changed: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def trace(model: nn.Module, inputs: Inputs) -> TracedModel:
    """Return the graph of a model, in the modes that its modules are in, for inputs of these shapes.

    >>> traced = trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.ones(2, 4),))
    >>> [node.name for node in traced.graph.nodes if node.op == "call_function"]
    ['linear', 'relu']
    """
    with modes_kept(model):
        program, why = _export(model, inputs)
        if program is not None:
            _check_outputs(program, model)
            try:
                return _with_weights(program, model)
            except Exception as error:  # an operation that cannot be played by itself
                why = f"its graph cannot be followed ({type(error).__name__}: {_first_line(error)})"
        if type(model) is nn.Sequential:
            note = f"torch.export failed ({why[:120]}), so the modules of the nn.Sequential are taken whole"
            return _module_by_module(model, inputs, note)
    remedy = (
        "a model can be cut if torch.export traces it, or if it is an nn.Sequential whose modules pass one tensor on"
    )
    wrapper = _wrapper_of(model)
    raise PipelineError(
        f"torch.export cannot trace {type(model).__name__}: {why[: 100 if wrapper else 300]}; {wrapper or remedy}"
    )


def _wrapper_of(model: nn.Module) -> str:
    """Return what to write around a model of transformers, which returns a cache and tensors with names; "" for others.

    >>> _wrapper_of(nn.Linear(1, 1))
    ''
    """
    if not any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        return ""
    return (
        "wrap it in an nn.Module whose forward(self, input_ids) returns one tensor: "
        "self.model(input_ids, use_cache=False).logits (use_cache for models that have one)"
    )


@contextmanager
def modes_kept(*models: nn.Module) -> Iterator[None]:
    """Put every module back into the mode (training or not) that it was in.

    >>> model = nn.Linear(1, 1)
    >>> with modes_kept(model):
    ...     _ = model.eval()
    >>> model.training
    True
    """
    before = {module: module.training for model in models for module in model.modules()}
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


# -- torch.export ------------------------------------------------------------------------------------------------------


def _export(model: nn.Module, inputs: Inputs) -> tuple[Any, str]:
    """Return the exported program; or None, and why there is none."""
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")  # of attributes that export sets back; nothing that users could act on
        try:
            return torch.export.export(model, inputs, strict=False), ""
        except Exception as error:  # whatever the model's own code raises while it is traced
            return None, _first_line(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch, which prints pages about what it cannot trace; the reason is in the error."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _with_weights(program: Any, model: nn.Module) -> TracedModel:
    """Let a program read the model's weights where they are, in place of taking them as arguments."""
    graph, signature = program.graph, program.graph_signature
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    names = signature.inputs_to_parameters | signature.inputs_to_buffers | signature.inputs_to_lifted_tensor_constants
    attributes: dict[str, Any] = {TRAINING: True}
    canonical: dict[int, str] = {}
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in names:
            name = names[node.name]
            value = held[name] if name in held else program.constants[name]
            name = canonical.setdefault(id(value), name)  # a weight with two names is one weight
            attributes[name] = value
            with graph.inserting_before(node):
                read = graph.create_node("get_attr", name)
            read.meta = dict(node.meta)
            node.replace_all_uses_with(read)
            graph.erase_node(node)
        elif node.op == "get_attr":  # a part of the graph that runs without gradients, or under autocast
            attributes[str(node.target)] = program.graph_module.get_submodule(str(node.target))
    values = _Values(graph, attributes)
    follow_training(graph)
    for node in reversed(list(graph.nodes)):
        if node.op in ("get_attr", "call_function") and not node.users and not _has_side_effects(node):
            graph.erase_node(node)
    read_names = {node.target for node in graph.nodes if node.op == "get_attr"}
    unused = [name for name, value in held.items() if canonical.get(id(value)) not in read_names]
    return TracedModel(
        graph=graph,
        attributes=attributes,
        several_outputs=not program.call_spec.out_spec.is_leaf(),
        bound=tuple(values.bound),
        changed=frozenset(values.changed),
        notes=(_unused_note(unused),) if unused else (),
    )


def _has_side_effects(node: fx.Node) -> bool:
    """Whether a node changes a tensor. Normalisation moves its running mean, though its schema does not say so."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    return node.target._schema.is_mutable or "running_mean" in names


def _check_outputs(program: Any, model: nn.Module) -> None:
    """Refuse what a pipeline cannot return."""
    spec = program.call_spec.out_spec
    plain = spec.is_leaf() or (spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()))
    kinds = {output.kind.name for output in program.graph_signature.output_specs}
    (returned,) = next(node for node in program.graph.nodes if node.op == "output").args
    tensors = all(isinstance(each, fx.Node) and isinstance(each.meta["val"], torch.Tensor) for each in returned)
    if not plain or not tensors or kinds - {"USER_OUTPUT"}:
        remedy = _wrapper_of(model)
        raise PipelineError(
            "the model must return a tensor or a tuple of tensors, and change nothing but its buffers in place "
            f"(it returns {spec if not plain else list(returned)}){'; ' * bool(remedy)}{remedy}"
        )


# -- an nn.Sequential --------------------------------------------------------------------------------------------------


def _unused_note(names: Sequence[str]) -> str:
    """Return that weights are not used, the first few by name.

    >>> _unused_note(["a.weight"]), _unused_note(["a", "b", "c", "d", "e"])
    ("a.weight is not used by the model's forward", "a, b, c and 2 more are not used by the model's forward")
    """
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'} not used by the model's forward"


def _module_by_module(model: nn.Sequential, inputs: Inputs, note: str) -> TracedModel:
    """Take each module of an nn.Sequential whole. They are run once, in eval mode, to see what they pass on."""
    if len(inputs) != 1:
        raise PipelineError(f"an nn.Sequential takes one input (inputs={len(inputs)})")
    graph = fx.Graph()
    node, value = graph.placeholder("input"), inputs[0]
    node.meta["val"] = value
    attributes: dict[str, Any] = {}
    model.eval()  # so that no statistics move; `trace` sets every module back
    names: dict[nn.Module, str] = {}
    for place, module in model._modules.items():  # named_children would leave out what stands there twice
        if module is None:
            continue
        name = names.setdefault(module, place)
        with torch.enable_grad():
            value = module(value)
        if not isinstance(value, torch.Tensor):
            raise PipelineError(f"module {place} of the nn.Sequential must return a tensor ({type(value).__name__})")
        node = graph.create_node("call_module", name, (node,))
        node.meta |= {"val": value, "nn_module_stack": {place: (place, type(module).__name__)}}
        attributes[name] = module
    graph.output((node,))
    moved = frozenset(f"{name}.{inner}" for name, module in attributes.items() for inner, _ in module.named_buffers())
    return TracedModel(graph=graph, attributes=attributes, changed=moved, notes=(note,))


# -- operations that overwrite -----------------------------------------------------------------------------------------


class _Values:
    """The values of a graph, computed once with fake tensors; overwriting operations are replaced on the way.

    `bound` and `changed` are those of `TracedModel`.
    """

    def __init__(self, graph: fx.Graph, attributes: Mapping[str, Any]) -> None:
        self.bound: list[Bound] = []
        self.changed: set[str] = set()
        self._of: dict[fx.Node, Any] = {}
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        fake = next((n.meta["val"] for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode")), None)
        self._attributes = attributes
        self._mode: Any = getattr(fake, "fake_mode", None)
        with torch.enable_grad():
            for node in list(graph.nodes):
                if node.op == "call_function":
                    self._replace_overwriting(node)
                self._of[node] = self._computed(node, node.target)
                node.meta["val"] = self._of[node]
        self._bind_changed()

    def _computed(self, node: fx.Node, operation: Any) -> Any:
        if node.op == "get_attr":
            value = self._attributes[str(node.target)]
            return self._mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value
        if node.op != "call_function":
            return node.meta.get("val")
        arguments = fx.node.map_arg(node.args, self._of.__getitem__)
        settings = fx.node.map_arg(node.kwargs, self._of.__getitem__)
        with self._mode:
            return operation(*arguments, **settings)

    def _replace_overwriting(self, node: fx.Node) -> None:
        """Let a node that overwrites an activation make a new one, or bind together all that see the change."""
        for written in _overwritten(node):
            weight = self._weight_of(written)
            if weight is not None:
                self.changed.add(str(weight.target))
                if _layout(self._of[written]) == _layout(self._of[weight]):  # a second += reads what the first returned
                    node.replace_input_with(written, weight)
                continue
            others = [other for other in self._sharing_storage(written, node) if other is not written]
            seen = [other for other in others if any(self._after(user, node) for user in other.users)]
            new = _out_of_place(node)
            if new is None or seen or not self._gives_the_same(node, new, written):
                order = self._order.__getitem__
                last = max((user for each in (written, node, *others) for user in each.users), key=order)
                first = min((written, *others), key=order)
                self.bound.append((first, max(last, node, key=order)))
                continue
            node.target = new
            for user in [user for user in written.users if self._after(user, node)]:
                user.replace_input_with(written, node)

    def _gives_the_same(self, node: fx.Node, new: torch._ops.OpOverload, written: fx.Node) -> bool:
        """Whether an operation makes a tensor of the same type and shape as the one that would be overwritten."""
        made, there = self._computed(node, new), self._of[written]
        return isinstance(made, torch.Tensor) and (made.dtype, made.shape) == (there.dtype, there.shape)

    def _bind_changed(self) -> None:
        """Bind all nodes that see a weight that changes, itself or through a view, from the first to the last."""
        for name in self.changed:
            weight = next(node for node in self._of if node.op == "get_attr" and node.target == name)
            storage = _storage(self._of[weight])
            users = [user for node, value in self._of.items() if _storage(value) == storage for user in node.users]
            seen = sorted((user for user in users if user.op == "call_function"), key=self._order.__getitem__)
            if seen:
                self.bound.append((seen[0], seen[-1]))

    def _weight_of(self, written: fx.Node) -> fx.Node | None:
        """Return the weight whose storage a value has, if it is one."""
        storage = _storage(self._of[written])
        weights = (node for node in self._of if node.op == "get_attr")
        return next((node for node in weights if _storage(self._of[node]) == storage), None)

    def _sharing_storage(self, written: fx.Node, before: fx.Node) -> Iterator[fx.Node]:
        """Yield the activations before a node that have the storage of another."""
        storage = _storage(self._of[written])
        for node, value in self._of.items():
            if node.op != "get_attr" and self._after(before, node) and _storage(value) == storage:
                yield node

    def _after(self, later: fx.Node, node: fx.Node) -> bool:
        return self._order[later] > self._order[node]


def _storage(value: Any) -> int | None:
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    """Return where the elements of a tensor lie in its storage."""
    return value.shape, value.stride(), value.storage_offset()


def _overwritten(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation overwrites."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    arguments = node.target._schema.arguments
    given: dict[str, Any] = {each.name: value for each, value in zip(arguments, node.args, strict=False)}
    given |= dict(node.kwargs)
    writing = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return [given[name] for name in writing if isinstance(given.get(name), fx.Node)]


def _out_of_place(node: fx.Node) -> torch._ops.OpOverload | None:
    """Return the same operation that makes a new tensor, relu for relu_; None if there is none."""
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload):
        return None
    space, _, name = operation._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None)
    found = getattr(packet, operation._overloadname, None) if name.endswith("_") else None
    return found if isinstance(found, torch._ops.OpOverload) and not found._schema.is_mutable else None


# -- flags that follow `training` --------------------------------------------------------------------------------------


def follow_training(graph: fx.Graph) -> None:
    """Let every training flag of the graph follow the `training` of its module.

    >>> graph = fx.Graph()
    >>> dropped = graph.call_function(torch.ops.aten.dropout.default, (graph.placeholder("x"), 0.5, True))
    >>> _ = graph.output(dropped)
    >>> follow_training(graph)
    >>> fx.GraphModule({"training": True}, graph).eval()(torch.ones(2))
    tensor([1., 1.])
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if (mean := _mean_of_mask(node)) is not None:
                with graph.inserting_after(node):
                    mask = graph.call_function(mask_or_mean, (node, mean))
                node.replace_all_uses_with(mask, delete_user_cb=lambda user, mask=mask: user is not mask)
                with graph.inserting_before(mask):
                    trains = graph.create_node("get_attr", TRAINING)
                trains.meta[TRAINING] = True
                mask.args, mask.meta = (node, mean, trains), dict(node.meta)
            for position, value in _training_flags(node, node.target):
                with graph.inserting_before(node):
                    flag: Any = graph.create_node("get_attr", TRAINING)
                    if not isinstance(value, bool) and value != 1:
                        flag = graph.call_function(operator.mul, (value, flag))
                    flag.meta[TRAINING] = True
                node.args = (*node.args[:position], flag, *node.args[position + 1 :])


def is_training_flag(node: fx.Node) -> bool:
    """Whether a node is only a number that follows `training`: it goes wherever it is used.

    >>> is_training_flag(fx.Graph().placeholder("x"))
    False
    """
    return TRAINING in node.meta


def mask_or_mean(mask: torch.Tensor, mean: float, training: bool) -> torch.Tensor:
    """Return a random mask where a model trains, and its mean where it does not.

    >>> mask_or_mean(torch.tensor([0.0, 1.0]), 0.9, False)
    tensor([0.9000, 0.9000])
    """
    return mask if training else torch.full_like(mask, mean)


def _mean_of_mask(node: fx.Node) -> float | None:
    """Return the share of ones of a mask of zeros and ones that is drawn at random; None if a node makes none."""
    aten = torch.ops.aten
    share: Any = None
    if node.target == aten.bernoulli_.float and len(node.args) > 1:
        share = node.args[1]
    elif node.target in (aten.floor.default, aten.floor_.default):
        drawn: Any = node.args[0]
        if drawn.target == aten.add.Tensor and getattr(drawn.args[0], "target", None) == aten.rand.default:
            share = drawn.args[1]
    return share if isinstance(share, float) and 0 < share < 1 else None


def _training_flags(node: fx.Node, operation: torch._ops.OpOverload) -> list[tuple[int, Any]]:
    """Return the positions and values of the arguments that are what they are because the model was training."""
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, node.args, strict=False))
    if "running_mean" in given and given["running_mean"] is None:
        return []  # it takes the batch's own statistics whether it trains or not
    found: list[tuple[int, Any]] = [(names.index(name), True) for name in TRAINING_FLAGS if given.get(name) is True]
    if given.get("dropout_p"):
        found.append((names.index("dropout_p"), given["dropout_p"]))
    counted = str(getattr(given.get("self"), "target", ""))
    if operation == torch.ops.aten.add_.Tensor and counted.endswith(BATCH_COUNTER) and given.get("other") == 1:
        found.append((names.index("other"), 1))
    return found
