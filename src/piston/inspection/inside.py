"""Inside one inference: the denoising path, where action tokens attend, or the written tokens.

Attention says from where a layer reads, not what matters to the actions: a policy may attend to a
region and ignore what it reads there. To learn what matters, ask a `Probe`.

Dims: k steps of the integrator and its result, h horizon, a action dim, l layers, n heads,
t suffix tokens, s tokens attended to, r rows and c columns of patches, w words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from piston.inference.policy import Policy
from piston.inspection.frames import Frame
from piston.inspection.probe import Intervention, Probe
from piston.inspection.results import NOT_IN_JSON
from piston.models.flow import Pi0
from piston.models.gemma import Attention as AttentionOfLayer
from piston.models.gemma import ExpertLayer, KVCache
from piston.models.language import END_ID, PADDING_ID
from piston.models.model import ActOptions
from piston.tokenizers.text import TextTokenizer
from piston.transforms import Data, compose, name_of
from piston.transforms.prompts import TokenizeFASTInputs, TokenizePrompt

T = TypeVar("T")

_NUM_LIKELY = 3
START, END = "(start)", "(end)"


@dataclasses.dataclass(frozen=True)
class Attention:
    """How the action tokens' attention is shared out, per layer, mean over heads, action tokens and
    steps of the integrator. All shares of a layer together are 1.
    """

    # By slot of the model.
    images: Mapping[str, Float[np.ndarray, "l r c"]]
    words: tuple[str, ...]
    of_words: Float[np.ndarray, "l w"]
    # None for a model whose state is in the prompt.
    of_state: Float[np.ndarray, " l"] | None
    of_actions: Float[np.ndarray, " l"]


@dataclasses.dataclass(frozen=True)
class WrittenToken:
    text: str
    probability: float
    # The likeliest of all tokens, with their probabilities.
    likely: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class Inside:
    """One inference. A model either denoises, with attention, or writes tokens."""

    episode: int
    frame: int
    # As the model sees them, by slot.
    pictures: Mapping[str, UInt8[np.ndarray, "_ _ 3"]] = dataclasses.field(metadata=NOT_IN_JSON)
    # From noise (first) to actions (last), in the model's normalised units.
    path: Float[np.ndarray, "k h a"] | None = None
    # What was recorded, in the same units; past the episode's end its last action.
    recorded: Float[np.ndarray, "h a"] | None = None
    attention: Attention | None = None
    written: tuple[WrittenToken, ...] = ()


def inside(probe: Probe, frame: Frame, intervention: Intervention | None = None) -> Inside:
    """Look into the inference for one frame, with the first of the probe's noise seeds."""
    policy, intervention = probe.policy, intervention or Intervention()
    seen = probe.prepare(frame, intervention)
    shown = (frame.episode, frame.frame, probe.pictures(frame, intervention))
    if probe.noise is None:
        return Inside(*shown, written=_written(policy, seen))
    model = policy.model
    assert isinstance(model, Pi0)
    rows: list[list[Tensor]] = [[] for _ in model.action_expert.layers]  # per layer and step

    def record(layer: int, weights: Float[Tensor, "b n t s"]) -> None:
        rows[layer].append(weights[0, :, -model.config.action_horizon :].mean((0, 1)))

    with record_attention(model.action_expert.layers, record):
        path, text = denoise(policy, seen, probe.noise[0])
    shares = torch.stack([torch.stack(steps).mean(0) for steps in rows]).cpu().numpy()
    observation, dim = intervention.on_robot(policy, frame.observation), frame.recorded.shape[-1]
    to_model = compose(policy.data.input_transforms(training=False))
    recorded = to_model({**observation, "actions": frame.recorded})["actions"]
    return Inside(
        *shown,
        path=path[..., :dim],
        recorded=np.asarray(recorded)[..., :dim],
        attention=_attention(model, _the(TokenizePrompt, policy).tokenizer, seen, text, shares),
    )


@torch.no_grad()
def denoise(
    policy: Policy, seen: Data, noise: Float[np.ndarray, "h a"]
) -> tuple[Float[np.ndarray, "k h a"], list[int]]:
    """Return the noisy actions before each step of the integrator and the result, and the tokens of
    the text that the model wrote, without its end.
    """
    start = torch.from_numpy(noise[None]).to(policy.device)
    options = ActOptions(start, num_steps=policy.num_steps)
    _, text, path = policy.model.act_with(policy.runner.observe([seen]), options)
    assert path is not None
    words = [] if text is None else text[0].tolist()
    words = list(itertools.takewhile(lambda token: token not in (PADDING_ID, END_ID), words))
    return path[:, 0].cpu().numpy(), words


@contextlib.contextmanager
def record_attention(
    layers: Sequence[ExpertLayer], record: Callable[[int, Float[Tensor, "b n t s"]], object]
) -> Iterator[None]:
    """Call `record(layer, weights)` for every pass through a layer; results do not change.

    The weights are computed again, from the queries and keys that the layer uses.
    """

    def compute(
        number: int, attention: AttentionOfLayer, inputs: Any, output: tuple[Tensor, KVCache]
    ) -> None:
        tokens, rope, _, mask = inputs
        size = attention.size
        query = attention.project(tokens, rope)[0].transpose(1, 2)
        keys = output[1].read()[0].repeat_interleave(size.num_heads // size.num_kv_heads, 1)
        logits = query.float() @ keys.float().transpose(-1, -2) / size.head_dim**0.5
        if mask is not None:
            logits = logits + mask[:, None]
        record(number, logits.softmax(-1))

    with contextlib.ExitStack() as hooks:
        for number, layer in enumerate(layers):
            use = functools.partial(compute, number)
            hooks.callback(layer.attention.register_forward_hook(use).remove)
        yield


def _attention(
    model: Pi0,
    tokenizer: TextTokenizer,
    seen: Data,
    text: Sequence[int],
    shares: Float[np.ndarray, "l s"],
) -> Attention:
    """Share out the packed tokens: present cameras, words, the state if it is a token, actions.

    The words are those of the prompt, then of the text that the model wrote.
    """
    side = model.config.image_size // model.config.vision.patch
    images, begin = {}, 0
    for camera in model.config.cameras:
        if seen["image_mask"][camera]:
            end = begin + side * side
            images[camera] = shares[:, begin:end].reshape(-1, side, side)
            begin = end
    prompt = seen["tokenized_prompt"][np.asarray(seen["tokenized_prompt_mask"])]
    ids = [*prompt.tolist(), *text]
    words, places = words_of(tokenizer, ids)
    belongs = np.eye(len(words), dtype=shares.dtype)[places]
    suffix = shares[:, begin + len(ids) :]
    horizon = model.config.action_horizon
    return Attention(
        images=images,
        words=words,
        of_words=shares[:, begin : begin + len(ids)] @ belongs,
        of_state=suffix[:, 0] if model.suffix.has_state else None,
        of_actions=suffix[:, -horizon:].sum(1),
    )


def words_of(tokenizer: TextTokenizer, ids: Sequence[int]) -> tuple[tuple[str, ...], list[int]]:
    """Return the words of a prompt, and the place among them that each token belongs to."""
    text = tokenizer.decode(ids)
    words = (START, *text.split(), END)
    length = len(text.rstrip())
    places = []
    for count, index in enumerate(ids, 1):
        before = tokenizer.decode(ids[:count])
        if index == tokenizer.bos_id:
            places.append(0)
        elif len(before) > length:
            places.append(len(words) - 1)
        else:
            places.append(min(len(before.split()), len(words) - 2))
    return words, places


def _written(policy: Policy, seen: Data) -> tuple[WrittenToken, ...]:
    """Return the tokens of a model that writes them, with those that it could have written."""
    logits: list[Tensor] = []
    tokens = policy.model.act(policy.runner.observe([seen]), visit=logits.append)[0].tolist()
    prompt = _the(TokenizeFASTInputs, policy).prompt
    written = []
    for token, one in zip(tokens, logits, strict=True):
        probabilities = one[0].softmax(-1)
        best = probabilities.topk(min(_NUM_LIKELY, len(probabilities)))
        likely = zip(best.indices.tolist(), best.values.tolist())
        written.append(
            WrittenToken(
                text=prompt.describe(token),
                probability=float(probabilities[token]),
                likely=tuple((prompt.describe(index), value) for index, value in likely),
            )
        )
    return tuple(written)


def _the(kind: type[T], policy: Policy) -> T:
    """Return the transform of this kind in the policy's pipeline."""
    transforms = policy.data.model_transforms.inputs
    found = [one for one in transforms if isinstance(one, kind)]
    if not found:
        names = ", ".join(map(name_of, transforms))
        raise LookupError(f"The policy's pipeline has no {kind.__name__}; it has {names}.")
    return found[0]
