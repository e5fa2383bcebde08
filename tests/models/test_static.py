"""Prefill and denoising with static shapes: equal to the packed path, and without waiting.

That each is one graph is tested in `compiled_graphs.py`.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from piston.models.static import StaticDenoise, StaticPrefill
from piston.weights.checkpoint import build_on_meta, shapes_of

from . import tiny
from .static_inputs import inputs_of

FAMILIES = pytest.mark.parametrize("pi05", [False, True], ids=["π0", "π0.5"])


@FAMILIES
@pytest.mark.parametrize(("cameras", "words"), [(3, (7, 7)), (3, (2, 5)), (1, (6, 0)), (2, (0, 3))])
@torch.no_grad()
def test_padded_rows_compute_what_packed_ones_do(pi05, cameras, words):
    model = tiny.flow(pi05=pi05)
    present = [i < cameras for i in range(3)]
    observation = tiny.observe(model, [present, present], words)
    noise = tiny.chunk(model, 2)
    expected = model.act(observation, noise, num_steps=3)
    images, prompt, lengths, state = inputs_of(model, observation)
    cache = StaticPrefill(model)(images, prompt, lengths)
    found = StaticDenoise(model, 3)(cache, lengths, state, noise)[-1]
    assert_close(found, expected, atol=2e-6, rtol=1e-5)


class Indexing(TorchFunctionMode):
    """Indexing by slices and None in plain operations.

    Python's own indexing sets the current device, which fails for "cuda" where torch has no CUDA.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return self._indexed(*args)
        if func is torch.Tensor.__setitem__:
            tensor, index, value = args
            place = self._indexed(tensor, index)
            assert (place.shape, place.device) == (value.shape, value.device)
            return None  # nothing to write: these tensors have no values
        return func(*args, **(kwargs or {}))

    def _indexed(self, tensor, index):
        axis = 0
        for one in index if isinstance(index, tuple) else (index,):
            if one is None:
                tensor = tensor.unsqueeze(axis)
            elif isinstance(one, slice):
                assert one.step is None
                tensor = torch.ops.aten.slice.Tensor(tensor, axis, one.start, one.stop)
            else:
                assert one is Ellipsis, f"not expected in a graph: an index of {one!r}"
                axis = tensor.ndim - 1
            axis += 1
        return tensor


@FAMILIES
@torch.no_grad()
def test_nothing_waits_for_a_gpu_or_mixes_devices(pi05):
    config = tiny.flow(pi05=pi05, max_delay=2).config
    model = build_on_meta(config)
    # Raises if a value is asked for, and if an operation gets tensors of two devices.
    shapes = shapes_of(model.state_dict())
    with FakeTensorMode(), torch.device("cuda"):
        weights = {name: torch.empty(shape) for name, shape in shapes.items()}
        images = torch.empty(2, 3, tiny.IMAGE_SIZE, tiny.IMAGE_SIZE, 3, dtype=torch.uint8)
        prompt, lengths = (torch.empty(shape, dtype=torch.long) for shape in ((2, 7), (2,)))
        state, *chunks = (torch.empty(2, *shape, config.action_dim) for shape in ((), (4,), (4,)))
        committed = torch.empty(2, 4, dtype=torch.bool)
    model.load_state_dict(weights, assign=True)
    with images.fake_mode, Indexing():
        cache = StaticPrefill(model)(images, prompt, lengths)
        path = StaticDenoise(model, 2)(cache, lengths, state, *chunks, committed)
        with pytest.raises(DataDependentOutputException):  # the check can fail
            lengths.tolist()
    assert {part.device.type for part in (*cache, path)} == {"cuda"}
    assert cache[0].shape == (2, 1, 3 * 4 + 7, 6)
    assert path.shape == (3, *chunks[0].shape)
