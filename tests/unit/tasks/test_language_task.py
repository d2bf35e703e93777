"""The loss and the evaluation of the language task."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from keepstep.config.schema import DistributedConfig
from keepstep.errors import UsageError
from keepstep.tasks.language.config import ModelConfig
from keepstep.tasks.language.task import LanguageTask
from keepstep.tasks.language.tokens import open_tokens
from tests.helpers.language import SETTINGS, make_config, make_task, make_tokens


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")


def built(task):
    torch.manual_seed(0)
    return task.build_model()


def never() -> bool:
    return False


def test_the_loss_is_the_mean_over_all_next_tokens(source):
    task = make_task(source)
    model = built(task).eval()
    samples = next(task.batches(0)).micro_batches[0]
    logits = model(input_ids=samples[:, :8]).logits
    by_hand = [
        cross_entropy(logits[row, place], samples[row, place + 1])
        for row in range(4)
        for place in range(8)
    ]
    torch.testing.assert_close(task.loss(model, samples), torch.stack(by_hand).mean())


def test_an_untrained_model_knows_nothing(source):
    task = make_task(source)
    metrics = task.evaluate(built(task), never)
    assert metrics["valid_loss"] == pytest.approx(math.log(64), abs=0.05)
    assert metrics["valid_perplexity"] == pytest.approx(math.exp(metrics["valid_loss"]))


def test_a_mixture_trains_its_router_and_is_evaluated_on_text_alone(source):
    settings = {name: value for name, value in SETTINGS.items() if name != "attention_dropout"}
    experts = {"num_local_experts": 4, "router_aux_loss_coef": 10.0}
    mixture = ModelConfig(architecture="mixtral", settings={**settings, **experts})
    task = make_task(source, model=mixture)
    model = built(task)
    samples = next(task.batches(0)).micro_batches[0]
    logits = model(input_ids=samples[:, :8]).logits
    text_alone = cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
    # Balanced experts have a router loss of top_k = 2 exactly; nothing is below that.
    assert task.loss(model, samples) - text_alone > 15
    assert task.evaluate(model, never)["valid_loss"] < 10


@pytest.mark.parametrize("micro_batch", [0, 1, 2])
def test_the_evaluation_weighs_every_token_alike_however_it_is_split(source, micro_batch):
    # Seven held-out samples in batches of four: the last one has three.
    task = make_task(source, micro_batch=micro_batch)
    model = built(task)
    found = task.evaluate(model, never)["valid_loss"]
    tokens = torch.tensor(open_tokens(source).parts["valid"].astype(int))
    samples = torch.stack([tokens[start : start + 9] for start in range(0, 56, 8)])
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=samples[:, :8]).logits
    whole = cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()).item()
    assert found == pytest.approx(whole, rel=1e-6)


def test_the_evaluation_is_the_same_at_any_time_and_for_any_seed(source):
    task = make_task(source, batches=1)
    model = built(task)
    first = task.evaluate(model, never)
    next(task.batches(12))
    torch.rand(5)
    assert task.evaluate(model, never) == first
    assert make_task(source, batches=1, seed=99).evaluate(model, never) == first


def test_the_evaluation_draws_no_random_numbers_and_leaves_the_mode_as_it_was(source):
    task = make_task(source)
    model = built(task)
    before = torch.get_rng_state()
    for training in (True, False):
        model.train(training)
        task.evaluate(model, never)
        assert {module.training for module in model.modules()} == {training}
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_stop_in_the_middle_of_an_evaluation_gives_nothing_and_restores_the_mode(source):
    task = make_task(source)
    model = built(task).train()
    answers = iter([False, True])
    assert task.evaluate(model, lambda: next(answers)) is None
    assert model.training
    assert list(answers) == []


def test_the_identity_is_that_of_the_tokens(source, tmp_path):
    task = make_task(source)
    assert task.identity == {"digest": open_tokens(source).digest}
    other = make_task(make_tokens(tmp_path / "t", train=162))
    assert other.identity != task.identity


def test_training_learns_the_text(source):
    settings = {**SETTINGS, "attention_dropout": 0.0}
    config = make_config(source, model=ModelConfig(settings=settings))
    task = make_task(source, model=config.model)
    assert replace(config) == config
    model = built(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _, batch in zip(range(120), task.batches(0), strict=False):
        loss = task.loss(model, batch.micro_batches[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


def test_a_model_whose_heads_do_not_fit_the_ranks_of_the_config_is_not_built(source):
    config = replace(make_config(source), distributed=DistributedConfig(tp=2))
    with pytest.raises(UsageError, match=r"distributed.tp \(2\) does not divide"):
        LanguageTask(config).build_model()
