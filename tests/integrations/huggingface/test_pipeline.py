"""Pipelines of transformers' models: the wrapper that the page shows, and the errors that lead to it."""

from __future__ import annotations

import pytest
import torch
import transformers

import paceline
from paceline.pipeline import PipelineError
from tests.docs.pages import blocks_run_by

HERE = "tests/integrations/huggingface/test_pipeline.py::test_the_wrapper_of_the_docs_is_what_the_error_says"
SMALL = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
WORDS = torch.arange(32).reshape(4, 8)


def test_the_wrapper_of_the_docs_is_what_the_error_says():
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, **SMALL)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(PipelineError, match=r"GPT2LMHeadModel.*self\.model\(input_ids, use_cache=False\)\.logits"):
        paceline.plan_pipeline(model, WORDS, stages=2, microbatches=2)
    (block,) = blocks_run_by("pipeline.md", HERE)
    scope = {"torch": torch}
    exec(block, scope)
    plan = paceline.plan_pipeline(scope["Logits"](model), WORDS, stages=2, microbatches=2)
    assert plan.evaluates


def test_named_outputs_lead_to_the_wrapper_too():
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    with pytest.raises(PipelineError, match=r"must return a tensor or a tuple of tensors.*wrap it in an nn\.Module"):
        paceline.plan_pipeline(transformers.BertForSequenceClassification(config), WORDS, stages=2, microbatches=2)
