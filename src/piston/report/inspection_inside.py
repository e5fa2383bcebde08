"""The section on the inside of one inference: denoising, attention, or the tokens it wrote.

Dims: l layers, r rows and c columns of patches, w words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from piston.inspection.inside import Attention, Inside, WrittenToken
from piston.report.markup import Markup, figure, join, note, picture, table, tag
from piston.report.prediction import denoising_figure

_PICTURE = 112
# Layers that are shown as pictures, evenly spread; the table has all.
_MAX_LAYERS = 6
_MAX_TOKENS = 40
_ORANGE = np.array([253, 140, 30])


def inside_section(result: Inside, names: Sequence[str], cameras: Mapping[str, str]) -> Markup:
    """Return the section; `names` are of the actions, `cameras` the robot's names by slot."""
    parts = [note(f"One inference, at episode {result.episode}, frame {result.frame}.")]
    if result.path is not None and result.recorded is not None:
        parts.append(denoising_figure(result.path, result.recorded, names))
    if result.attention is not None:
        parts.append(attention(result.attention, result.pictures, cameras))
    if result.written:
        parts.append(written(result.written))
    return join(parts)


def attention(
    found: Attention,
    pictures: Mapping[str, UInt8[np.ndarray, "_ _ 3"]],
    cameras: Mapping[str, str],
) -> Markup:
    """Return where the action tokens read from: pictures per layer, words, and shares."""
    text = (
        "From where the action tokens read in each layer of the action expert, averaged over its "
        "heads, the steps of the chunk and the steps of denoising. This is not an answer to what "
        "matters: a policy may read from a region and not use what it reads, and often attends "
        "beside the object that decides its motion. What an input changes is measured by changing "
        "it: see what each input changes. In a picture, orange is the patch with most attention."
    )
    layers = len(found.of_actions)
    chosen = np.unique(np.linspace(0, layers - 1, min(layers, _MAX_LAYERS)).round().astype(int))
    shown = []
    for slot, shares in found.images.items():
        overlaid = (
            picture(overlay(pictures[slot], shares[layer]), f"layer {layer}", _PICTURE)
            for layer in chosen
        )
        name = cameras.get(slot, slot).replace("_", " ")
        shown += [tag("h4", name), tag("div", *overlaid, class_="thumbnails")]
    return join([figure(text, *shown), _words(found), _shares(found, cameras)])


def overlay(
    pixels: UInt8[np.ndarray, "y x 3"], shares: Float[np.ndarray, "r c"]
) -> UInt8[np.ndarray, "y x 3"]:
    """Return a grey image with its patches the more orange, the more attention they have."""
    strength = Image.fromarray((255 * shares / max(shares.max(), 1e-12)).astype(np.uint8))
    height, width = pixels.shape[:2]
    mask = np.asarray(strength.resize((width, height), Image.Resampling.NEAREST))[..., None] / 255
    grey = pixels.mean(-1, keepdims=True)
    return ((1 - 0.7 * mask) * grey + 0.7 * mask * _ORANGE).astype(np.uint8)


def _words(found: Attention) -> Markup:
    shares = found.of_words.mean(0)
    most = max(shares.max(initial=0.0), 1e-12)
    words = (
        tag("div", word, tag("span", _percent(share), style=f"--share: {100 * share / most:.0f}%"))
        for word, share in zip(found.words, shares)
    )
    text = "Below each word: its share of the attention, averaged over the layers."
    return figure(text, tag("div", *words, class_="words"))


def _shares(found: Attention, cameras: Mapping[str, str]) -> Markup:
    """Return a table of the layers with the share of each kind of token."""
    columns = {
        cameras.get(slot, slot).replace("_", " "): shares.sum((1, 2))
        for slot, shares in found.images.items()
    }
    columns["words"] = found.of_words.sum(1)
    if found.of_state is not None:
        columns["state"] = found.of_state
    columns["actions themselves"] = found.of_actions
    rows = [
        (f"layer {layer}", *(_percent(shares[layer]) for shares in columns.values()))
        for layer in range(len(found.of_actions))
    ]
    return table(("", *columns), rows, class_="numbers names")


def written(tokens: Sequence[WrittenToken]) -> Markup:
    """Return the tokens that the model wrote, with the likeliest ones at each place."""
    text = (
        "The tokens that the model wrote for the chunk, with their probabilities, and the "
        "likeliest tokens at each place. Codes are those of FAST; the first ones are the lowest "
        "frequencies of the motion, so that doubt there matters most."
    )
    rows = [
        (str(number), tag("code", token.text), _percent(token.probability), _likely(token))
        for number, token in enumerate(tokens)
    ]
    header = ("place", "token", "probability", "likeliest")
    parts = [table(header, rows[:_MAX_TOKENS], class_="numbers")]
    if more := rows[_MAX_TOKENS:]:
        count = f"{len(more)} more tokens"
        parts.append(tag("details", tag("summary", count), table(header, more, class_="numbers")))
    return figure(text, *parts)


def _likely(token: WrittenToken) -> str:
    return ", ".join(f"{text!r} {_percent(share)}" for text, share in token.likely)


def _percent(share: float) -> str:
    percent = 100 * float(share)
    return f"{percent:.0f} %" if percent >= 9.5 else f"{percent:.2g} %"
