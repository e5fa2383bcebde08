"""The language side of flow models: losses, gradients, written text and actions."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from piston.models.configs import Pi0Config
from piston.models.language import END_ID, PADDING_ID
from piston.models.model import ActOptions

from . import plain, tiny

ROOM = 16  # tokens of prompt, text and FAST together


def language_model(pi05=False, **changes):
    options = {"targets": ("text", "fast"), "max_token_len": ROOM, "max_text_len": 6}
    return tiny.flow(pi05=pi05, **(options | changes))


def observe(model, present, rows, seed=1):
    """`rows` are (prompt, text, FAST) lengths; None for a sample that has none of it.

    Behind a text and before FAST stands an end token, which the action expert does not see.
    """
    lengths, causal, hidden, learned = [], [], [], []
    for prompt, text, fast in rows:
        end = 0 if text is None else 1
        total = prompt + (text or 0) + end + (fast or 0)
        lengths.append(total)
        place = torch.arange(ROOM)
        causal.append((place >= prompt) & (place < total))
        hidden.append((place >= prompt + (text or 0)) & (place < total))
        learned.append(causal[-1])
    observation = tiny.observe(model, present, lengths, seed)
    return dataclasses.replace(
        observation,
        # No padding or end among the words: they would end a text.
        tokenized_prompt=observation.tokenized_prompt.clamp(min=2),
        token_ar_mask=torch.stack(causal).int(),
        token_hidden_mask=torch.stack(hidden),
        token_loss_mask=torch.stack(learned),
    )


def float64(model):
    """A copy in float64, but for the vision tower."""
    exact = copy.deepcopy(model).double()
    exact.vision.float()
    return exact


lengths = st.tuples(
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 4)),
    st.one_of(st.none(), st.integers(1, 5)),
)


@settings(max_examples=12, deadline=None)
@given(
    pi05=st.booleans(),
    kv_heads=st.sampled_from([1, 2]),
    rows=st.lists(
        st.tuples(st.lists(st.booleans(), min_size=2, max_size=2), lengths), min_size=1, max_size=4
    ),
    weight=st.sampled_from([1.0, 0.25]),
    checkpointing=st.booleans(),
)
def test_losses_and_gradients_equal_a_plain_float64_computation(
    pi05, kv_heads, rows, weight, checkpointing
):
    vlm, expert = tiny.gemma(num_kv_heads=kv_heads), tiny.gemma(14, num_kv_heads=kv_heads)
    model = language_model(
        pi05, num_cameras=2, vlm=vlm, action_expert=expert, token_loss_weight=weight
    )
    model.set_gradient_checkpointing(checkpointing)
    observation = observe(model, [row[0] for row in rows], [row[1] for row in rows])
    batch = observation.batch_size
    actions, noise = tiny.chunk(model, batch, seed=3), tiny.chunk(model, batch, seed=4)
    time = torch.linspace(0.1, 0.9, batch)
    found = model.training_losses(
        observation, actions, {"noise": noise[:, None], "time": time[:, None]}
    )
    exact = float64(model)
    error, tokens = plain.language_losses(
        exact, observation, actions.double(), noise.double(), time.double()
    )
    assert_close(found["velocity"].double(), error, atol=2e-4, rtol=2e-4)
    assert_close(found["tokens"].double(), weight * tokens, atol=2e-5, rtol=2e-5)
    total = found["velocity"].sum() + found["tokens"].sum()
    parameters, reference = list(model.parameters()), list(exact.parameters())
    ours = torch.autograd.grad(total, parameters, allow_unused=True)
    theirs = torch.autograd.grad(error.sum() + weight * tokens.sum(), reference, allow_unused=True)
    largest = max(one.abs().max().item() for one in theirs if one is not None)
    for name, one, other in zip(dict(model.named_parameters()), ours, theirs):
        if other is None:
            assert one is None or not one.any(), name
        else:
            other = other.double()
            one = torch.zeros_like(other) if one is None else one.double()
            scale = other.abs().max().clamp(min=0.02 * largest)
            assert_close(one / scale, other / scale, atol=5e-4, rtol=0, msg=name)


ROWS = [(3, 2, 4), (4, None, 3), (2, 3, None), (5, None, None)]
PRESENT = [[True, True], [True, False], [True, True], [False, True]]


def losses_of(model, observation, draws=1):
    batch = observation.batch_size
    drawn = model.draw(batch, draws, torch.Generator().manual_seed(0))
    return model.training_losses(observation, tiny.chunk(model, batch), drawn)


def gradients_of(model, loss):
    names, parameters = zip(*model.named_parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {name: None if one is None else one.abs().max() for name, one in zip(names, found)}


@pytest.mark.parametrize("pi05", [False, True])
def test_insulated_flow_loss_never_reaches_the_vlm(pi05):
    observation_of = lambda model: observe(model, PRESENT, ROWS)  # noqa: E731
    for insulate in (True, False):
        model = language_model(pi05, num_cameras=2, insulate=insulate)
        flow = gradients_of(
            model, losses_of(model, observation_of(model), draws=3)["velocity"].sum()
        )
        of_vlm = {n: g for n, g in flow.items() if n.startswith(("vlm.", "vision."))}
        tail = set(tiny.flow(num_cameras=2).unused_parameters())  # on which no action depends
        for name, gradient in of_vlm.items():
            if insulate or name in tail:
                assert gradient is None or gradient == 0, name
            else:
                assert gradient > 0, name
        assert all(g > 0 for n, g in flow.items() if n.startswith(("action_expert.", "suffix.")))


@pytest.mark.parametrize("insulate", [False, True])
def test_cross_entropy_never_reaches_the_action_expert(insulate):
    model = language_model(num_cameras=2, insulate=insulate)
    found = gradients_of(model, losses_of(model, observe(model, PRESENT, ROWS))["tokens"].sum())
    for name, gradient in found.items():
        if name.startswith(("action_expert.", "suffix.")):
            assert gradient is None or gradient == 0, name
        else:
            assert gradient > 0, name


@pytest.mark.parametrize("pi05", [False, True])
def test_insulation_changes_gradients_only(pi05):
    one, other = (language_model(pi05, num_cameras=2, insulate=value) for value in (False, True))
    other.load_state_dict(one.state_dict())
    observation = observe(one, PRESENT, ROWS)
    expected, found = (losses_of(model, observation, draws=2) for model in (one, other))
    for name in ("velocity", "tokens"):
        assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize("pi05", [False, True])
def test_without_targets_nothing_has_changed(pi05):
    """Losses and actions are bit for bit those of a model without a language side."""
    plain_model = tiny.flow(pi05=pi05, max_token_len=ROOM)
    model = language_model(pi05)
    model.load_state_dict(plain_model.state_dict())
    observation = tiny.observe(plain_model, [[True] * 3, [True, False, True]], [5, 3])
    unlabelled = dataclasses.replace(
        observation,
        token_ar_mask=torch.zeros(2, ROOM, dtype=torch.int32),
        token_loss_mask=torch.zeros(2, ROOM, dtype=torch.bool),
        token_hidden_mask=torch.zeros(2, ROOM, dtype=torch.bool),
        writes_text=torch.zeros(2, dtype=torch.bool),
    )
    noise = tiny.chunk(model, 2)
    assert torch.equal(model.act(unlabelled, noise), plain_model.act(observation, noise))
    drawn = model.draw(2, 1, torch.Generator().manual_seed(0))
    expected = plain_model.training_losses(observation, noise, drawn)
    found = model.training_losses(unlabelled, noise, drawn)
    assert list(expected) == ["velocity"]
    assert_close(found["velocity"], expected["velocity"], atol=1e-6, rtol=1e-6)
    assert not found["tokens"].any()


def written_by_hand(model, observation, row, limit):
    """The text of one sample, written by running the whole sequence again for every token."""
    one = dataclasses.replace(
        observation,
        **{
            name: getattr(observation, name)[row : row + 1]
            for name in ("state", "tokenized_prompt", "tokenized_prompt_mask", "token_ar_mask")
        },
        images={name: image[row : row + 1] for name, image in observation.images.items()},
        image_masks={name: mask[row : row + 1] for name, mask in observation.image_masks.items()},
        token_loss_mask=None,
        token_hidden_mask=None,
        writes_text=None,
    )
    text = []
    words, mask = one.tokenized_prompt.clone(), one.tokenized_prompt_mask.clone()
    causal = one.token_ar_mask.clone()
    for _ in range(limit):
        now = dataclasses.replace(
            one, tokenized_prompt=words, tokenized_prompt_mask=mask, token_ar_mask=causal
        )
        output = model.prefix_output(now)[0]
        last = output.shape[0] - ROOM + int(mask.sum()) - 1
        token = int((output[last] @ model.vlm.embedding.weight.T).argmax())
        text.append(token)
        if token == END_ID:
            break
        words[0, int(mask.sum())] = token
        causal[0, int(mask.sum())] = 1
        mask[0, int(mask.sum())] = True
    return text, now if token == END_ID else dataclasses.replace(
        one, tokenized_prompt=words, tokenized_prompt_mask=mask, token_ar_mask=causal
    )


@pytest.mark.parametrize("pi05", [False, True])
@pytest.mark.parametrize("end_bias", [0.0, 3.0], ids=["to the limit", "ends early"])
def test_written_text_and_its_actions_equal_recomputing_everything(pi05, end_bias):
    """Rows of one batch write texts of different lengths; one has its text given."""
    model = language_model(pi05, num_cameras=2)
    with torch.no_grad():  # makes the end token likelier, so that rows end at different times
        model.vlm.embedding.weight[END_ID] *= 1 + end_bias
    rows = [(3, None, None), (6, None, None), (2, 3, None), (5, None, None)]
    observation = observe(model, PRESENT, rows)
    given = observation.token_ar_mask.bool() & ~observation.token_hidden_mask
    observation = dataclasses.replace(
        observation,
        tokenized_prompt_mask=observation.tokenized_prompt_mask & ~observation.token_hidden_mask,
        token_ar_mask=given.int(),
        token_hidden_mask=None,
        token_loss_mask=None,
        writes_text=torch.tensor([True, True, False, True]),
    )
    noise = tiny.chunk(model, 4)
    with torch.no_grad():
        response = model.act_with(observation, ActOptions(noise, num_steps=3))
    ends = []
    for row in range(4):
        written = response.text[row].tolist()
        if not observation.writes_text[row]:
            assert set(written) == {PADDING_ID}
            continue
        with torch.no_grad():
            expected, whole = written_by_hand(model, observation, row, model.config.max_text_len)
        ends.append(len(expected))
        assert written[: len(expected)] == expected
        assert set(written[len(expected) :]) <= {PADDING_ID}
        given_text = dataclasses.replace(whole, writes_text=torch.tensor([False]))
        alone = model.act(given_text, noise[row : row + 1], num_steps=3)
        assert_close(response.actions[row : row + 1], alone, atol=2e-5, rtol=2e-5)
    if end_bias:
        assert len(set(ends)) > 1  # the case is not trivial


def test_without_being_told_samples_without_text_write_it():
    model = language_model(num_cameras=2)
    observation = tiny.observe(model, PRESENT[:2], [4, 4])
    assert model.act_with(observation, ActOptions(tiny.chunk(model, 2))).text is not None
    silent = dataclasses.replace(observation, writes_text=torch.zeros(2, dtype=torch.bool))
    assert model.act_with(silent, ActOptions(tiny.chunk(model, 2))).text is None
    without = language_model(num_cameras=2, targets=("fast",))
    assert without.act_with(observation, ActOptions(tiny.chunk(without, 2))).text is None


def test_candidates_share_the_text():
    model = language_model(num_cameras=2)
    observation = tiny.observe(model, PRESENT[:2], [4, 3])
    noise = tiny.chunk(model, 2, 3)
    together = model.act(observation, noise)
    for number in range(3):
        alone = model.act(observation, noise[:, number])
        assert_close(together[:, number], alone, atol=1e-5, rtol=1e-5)


def test_fast_tokens_never_change_the_actions():
    model = language_model(num_cameras=2)
    with_fast = observe(model, PRESENT[:2], [(3, 2, 6), (4, 1, 2)])
    without = observe(model, PRESENT[:2], [(3, 2, None), (4, 1, None)])
    same = with_fast.tokenized_prompt
    without = dataclasses.replace(without, tokenized_prompt=same)
    noise = tiny.chunk(model, 2)
    assert_close(model.act(with_fast, noise), model.act(without, noise), atol=1e-5, rtol=1e-5)


def test_text_changes_the_actions():
    model = language_model(num_cameras=2)
    one = observe(model, PRESENT[:1], [(3, 3, None)])
    other = dataclasses.replace(one, tokenized_prompt=(one.tokenized_prompt + 1).clamp(2, 49))
    other.tokenized_prompt[:, :3] = one.tokenized_prompt[:, :3]
    noise = tiny.chunk(model, 1)
    assert (model.act(one, noise) - model.act(other, noise)).abs().max() > 1e-3


def test_a_frozen_insulated_model_still_trains():
    """Nothing may be written in place into keys that the backward pass of the VLM needs."""
    model = language_model(num_cameras=2, insulate=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("action_expert", "suffix")))
    observation = observe(model, PRESENT[:2], [(2, 1, 9), (2, 1, 9)])
    losses_of(model, observation)["tokens"].sum().backward()
    assert model.vlm.embedding.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"insulate": True}, "nothing would train the VLM"),
        ({"targets": ("text", "text")}, "twice"),
        ({"targets": ("fast",), "token_loss_weight": 0.0}, "token_loss_weight"),
        ({"fast_tokenizer": "bytes"}, "does not name fast"),
        ({"targets": ("text",), "max_text_len": 0}, "max_text_len"),
    ],
)
def test_options_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Pi0Config(**changes)


def test_all_parameters_of_a_model_that_writes_are_used():
    combinations = itertools.chain.from_iterable(
        itertools.combinations(("text", "fast"), n) for n in (1, 2)
    )
    for targets in combinations:
        assert language_model(targets=targets).unused_parameters() == []
