"""The models computed the long way: everything padded, one attention over all tokens, no cache.

Absent cameras and padding go through the whole network and are masked out; every layer runs both
experts over the concatenation; softmax is written out. Slow and simple, to compare against.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from piston.models.autoregressive import Pi0FAST
from piston.models.flow import Pi0
from piston.models.gemma import Expert
from piston.observation import Observation


def velocity(
    model: Pi0,
    observation: Observation,
    noisy: Tensor,
    time: Tensor,
    target: Tensor | None = None,
) -> Tensor:
    """`time`, and the target time of a distilled model, per sample (b) or per action (b, h)."""
    prefix, valid = embed_padded(model, observation)
    suffix, condition = _suffix(model, observation.state, noisy, time, target)
    starts = torch.zeros(suffix.shape[1], dtype=torch.long)
    starts[0] = 1
    if not model.config.pi05:
        starts[1] = 1
    starts = torch.cat((torch.zeros(prefix.shape[1], dtype=torch.long), starts))
    valid = torch.cat((valid, torch.ones(suffix.shape[:2], dtype=torch.bool)), 1)
    positions = valid.long().cumsum(1) - 1
    outputs = transformer(
        [model.vlm, model.action_expert],
        [prefix, suffix],
        [None, condition],
        full_mask(valid, starts.expand(len(valid), -1)),
        positions,
    )
    horizon = model.config.action_horizon
    return model.suffix.action_out(outputs[1][:, -horizon:])


def language_losses(
    model: Pi0, observation: Observation, actions: Tensor, noise: Tensor, time: Tensor
) -> tuple[Tensor, Tensor]:
    """The squared error of the velocity (b, h, a) and the cross-entropy (b) of written tokens.

    One attention over images, prompt, text, FAST tokens and suffix, with a mask that is drawn
    token by token. What `insulate` detaches is left to the test.
    """
    t = time[:, None, None]
    outputs = with_language(model, observation, t * noise + (1 - t) * actions, time)
    horizon = model.config.action_horizon
    velocity = model.suffix.action_out(outputs[1][:, -horizon:])
    words, learned = observation.tokenized_prompt.long(), observation.token_loss_mask
    losses = []
    for row in range(len(words)):
        found = []
        for place in range(1, words.shape[1]):
            if learned[row, place]:
                before = outputs[0][row, outputs[0].shape[1] - words.shape[1] + place - 1]
                logits = before @ model.vlm.embedding.weight.T
                found.append(logits.logsumexp(0) - logits[words[row, place]])
        losses.append(torch.stack(found).mean() if found else outputs[0].new_zeros(()))
    return (velocity - (noise - actions)).square(), torch.stack(losses)


def with_language(
    model: Pi0, observation: Observation, noisy: Tensor, time: Tensor
) -> list[Tensor]:
    """The outputs of both experts for padded rows whose prompt includes text and FAST tokens."""
    prefix, valid = embed_padded(model, observation)
    suffix, condition = _suffix(model, observation.state, noisy, time)
    prefix, suffix = prefix.to(noisy.dtype), suffix.to(noisy.dtype)
    batch, size, more = len(prefix), prefix.shape[1], suffix.shape[1]
    images = size - observation.tokenized_prompt.shape[1]
    mask = torch.zeros(batch, size + more, size + more, dtype=torch.bool)
    positions = torch.zeros(batch, size + more, dtype=torch.long)
    for row in range(batch):
        kinds = ["image"] * images
        for place in range(size - images):
            is_hidden = bool(observation.token_hidden_mask[row, place])
            is_causal = bool(observation.token_ar_mask[row, place])
            kinds.append("hidden" if is_hidden else "text" if is_causal else "prompt")
        kinds += ["state"] * (more - model.config.action_horizon)
        kinds += ["action"] * model.config.action_horizon
        is_there = [*valid[row].tolist(), *[True] * more]
        for i, one in enumerate(kinds):
            for j, other in enumerate(kinds):
                if one in ("image", "prompt"):
                    sees = other in ("image", "prompt")
                elif one in ("text", "hidden"):
                    sees = j <= i and other not in ("state", "action")
                elif one == "state":
                    sees = other not in ("hidden", "action")
                else:
                    sees = other != "hidden"
                mask[row, i, j] = sees and is_there[j]
        for i, one in enumerate(kinds):
            skipped = {"hidden"} if one in ("state", "action") else set()
            positions[row, i] = sum(is_there[j] and kinds[j] not in skipped for j in range(i))
    return transformer(
        [model.vlm, model.action_expert], [prefix, suffix], [None, condition], mask, positions
    )


def sample(model: Pi0, observation: Observation, noise: Tensor, num_steps: int) -> Tensor:
    x = noise
    for step in range(num_steps):
        time = torch.full((len(noise),), 1 - step / num_steps)
        x = x - velocity(model, observation, x, time) / num_steps
    return x


def fast_loss(model: Pi0FAST, observation: Observation) -> Tensor:
    tokens, valid = embed_padded(model, observation)
    words = observation.tokenized_prompt.long()
    images = tokens.shape[1] - words.shape[1]
    starts = torch.cat((torch.zeros(len(words), images), observation.token_ar_mask), 1).long()
    positions = torch.arange(tokens.shape[1]).expand(len(words), -1)
    (output,) = transformer([model.vlm], [tokens], [None], full_mask(valid, starts), positions)
    logits = output[:, images:-1] @ model.vlm.embedding.weight.T
    chosen = logits.log_softmax(-1).gather(-1, words[:, 1:, None])[..., 0]
    mask = observation.token_loss_mask[:, 1:]
    return -(chosen * mask).sum(1) / mask.sum(1).clamp(min=1)


def fast_greedy(model: Pi0FAST, observation: Observation, num_steps: int) -> Tensor:
    """Recomputes the whole sequence for every token, one sample at a time, without padding."""
    rows = []
    for i in range(observation.batch_size):
        tokens, valid = embed_padded(model, observation)
        tokens, starts = tokens[i, valid[i]], observation.token_ar_mask[i]
        starts = torch.cat((torch.zeros(valid.shape[1] - len(starts)), starts))[valid[i]].long()
        positions, out = list(range(len(tokens))), []
        for step in range(num_steps):
            mask = full_mask(torch.ones(1, len(tokens), dtype=torch.bool), starts[None])
            (output,) = transformer(
                [model.vlm], [tokens[None]], [None], mask, torch.tensor([positions])
            )
            token = (output[0, -1] @ model.vlm.embedding.weight.T).argmax()
            out.append(int(token))
            if token == 1:
                break
            embedded = model.vlm.embedding.weight[token] * model.config.vlm.width**0.5
            tokens = torch.cat((tokens, embedded[None]))
            starts = torch.cat((starts, torch.ones(1, dtype=torch.long)))
            positions.append(int(valid[i].sum()) + step + 1)
        rows.append(torch.tensor(out + [0] * (num_steps - len(out))))
    return torch.stack(rows)


def embed_padded(model: Pi0 | Pi0FAST, observation: Observation) -> tuple[Tensor, Tensor]:
    tokens, valid = [], []
    for camera in model.config.cameras:
        image = model.vision(observation.images[camera], torch.float32)
        image = image.to(model.vlm.embedding.weight.dtype)
        tokens.append(image)
        valid.append(observation.image_masks[camera][:, None].expand(image.shape[:2]))
    if observation.tokenized_prompt is not None:
        words = model.vlm.embedding.weight[observation.tokenized_prompt.long()]
        tokens.append(words * math.sqrt(model.config.vlm.width))
        valid.append(observation.tokenized_prompt_mask)
    return torch.cat(tokens, 1), torch.cat(valid, 1)


def full_mask(valid: Tensor, starts: Tensor) -> Tensor:
    block = starts.cumsum(1)
    return (block[:, None, :] <= block[:, :, None]) & valid[:, None, :]


def _suffix(
    model: Pi0, state: Tensor, noisy: Tensor, time: Tensor, target: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    part, width = model.suffix, model.config.action_expert.width
    fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64)

    def embed(time: Tensor) -> Tensor:
        each = (time if time.ndim == 2 else time[:, None]).expand(noisy.shape[:2])
        angle = 2 * math.pi * each.double()[..., None] / (4e-3 * 1000**fraction)
        return torch.cat((angle.sin(), angle.cos()), -1).to(noisy.dtype)

    embedded = embed(time)
    if target is not None:
        embedded = embedded + part.time.target(embed(time) - embed(target))
    actions = part.action_in(noisy)
    swish = torch.nn.functional.silu
    if model.config.pi05:
        return actions, swish(part.time_out(swish(part.time_in(embedded))))
    both = torch.cat((actions, embedded), -1)
    actions = part.time_action_out(swish(part.time_action_in(both)))
    return torch.cat((part.state(state.to(noisy.dtype))[:, None], actions), 1), None


def transformer(
    experts: list[Expert],
    streams: list[Tensor],
    conditions: list[Tensor | None],
    mask: Tensor,
    positions: Tensor,
) -> list[Tensor]:
    sizes = [stream.shape[1] for stream in streams]
    parts = list(zip(experts, positions.split(sizes, 1), conditions))
    for index in range(experts[0].size.depth):
        layers = [expert.layers[index] for expert in experts]
        queries, keys, values, gates = [], [], [], []
        for layer, x, (expert, position, condition) in zip(layers, streams, parts):
            normed, gate = _norm(layer.attention_norm, x, condition)
            head_dim = expert.size.head_dim
            queries.append(_rope(_heads(layer.attention.query(normed), head_dim), position))
            keys.append(_rope(_heads(layer.attention.key(normed), head_dim), position))
            values.append(_heads(layer.attention.value(normed), head_dim))
            gates.append(gate)
        query, key, value = (torch.cat(part, 1) for part in (queries, keys, values))
        group = query.shape[2] // key.shape[2]
        key, value = (part.repeat_interleave(group, 2) for part in (key, value))
        logits = torch.einsum("bqnd,bknd->bnqk", query, key) / math.sqrt(query.shape[-1])
        weights = logits.masked_fill(~mask[:, None], -1e30).softmax(-1)
        seen = torch.einsum("bnqk,bknd->bqnd", weights, value).flatten(2).split(sizes, 1)
        for i, (layer, (_, _, condition)) in enumerate(zip(layers, parts)):
            streams[i] = streams[i] + layer.attention.output(seen[i]) * gates[i]
            normed, gate = _norm(layer.mlp_norm, streams[i], condition)
            hidden = torch.nn.functional.gelu(layer.mlp.gate(normed), approximate="tanh")
            streams[i] = streams[i] + layer.mlp.down(hidden * layer.mlp.up(normed)) * gate
    return [
        _norm(expert.norm, x, condition)[0] for x, (expert, _, condition) in zip(streams, parts)
    ]


def _norm(norm, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    if condition is None:
        return normed * (1 + norm.scale), 1.0
    scale, shift, gate = norm.modulation(condition).chunk(3, -1)
    return normed * (1 + scale) + shift, gate


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim))


def _rope(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None] / 10_000 ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
