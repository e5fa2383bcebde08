"""Run by `test_exported.py` in a process of its own: static graphs, compiled and counted."""

from collections import Counter

import pytest
import torch
from tests.models import tiny
from tests.models.static_inputs import inputs_of
from torch.testing import assert_close

from piston.inference.compiled import Buckets, GraphEngine, compile_graphs
from piston.models.integrator import Committed
from piston.models.model import ActOptions
from piston.models.static import StaticDenoise, StaticPrefill

FAMILIES = pytest.mark.parametrize("pi05", [False, True], ids=["π0", "π0.5"])
STEPS = 3


def observed(model, words=(2, 5), cameras=3, seed=1):
    present = [i < cameras for i in range(3)]
    return tiny.observe(model, [present] * len(words), words, seed)


def run(prefill, denoise, model, observation, *chunks):
    images, prompt, lengths, state = inputs_of(model, observation)
    return denoise(prefill(images, prompt, lengths), lengths, state, *chunks)[-1]


@FAMILIES
@torch.no_grad()
def test_each_part_is_one_graph_that_serves_its_bucket(pi05):
    """Whatever is committed, written or seen."""
    model = tiny.flow(pi05=pi05, max_delay=3)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    parts = compile_graphs(model, STEPS, backend)
    noise, previous = tiny.chunk(model, 2), tiny.chunk(model, 2, seed=9)

    def compare(observation, delays):
        committed = Committed(previous, torch.arange(4) < torch.tensor(delays)[:, None])
        found = run(*parts, model, observation, noise, previous, committed.steps)
        expected = model.act(observation, noise, num_steps=STEPS, committed=committed)
        assert_close(found, expected, atol=2e-6, rtol=1e-5)

    compare(observed(model), (0, 0))
    # One layer of the vision tower and one of the VLM; one of the action expert for all steps.
    assert [len(list(graph.children())) for graph in graphs] == [2, 1]
    with torch.compiler.set_stance("fail_on_recompile"):
        for words, delays in (((7, 7), (1, 3)), ((0, 3), (2, 0)), ((1, 6), (0, 0))):
            for seed in (1, 2):
                compare(observed(model, words, seed=seed), delays)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            compare(observed(model, cameras=2), (0, 0))


@torch.no_grad()
def test_an_engine_compiles_all_buckets_and_nothing_later(caplog):
    one = {"vlm": tiny.gemma(depth=1), "action_expert": tiny.gemma(14, depth=1)}
    model = tiny.flow(pi05=True, max_token_len=20, **one)
    graphs = compile_graphs(model, 1, backend="eager")
    buckets = Buckets.of(model.config, (2,), max_batch=2)
    engine = GraphEngine(model, graphs, buckets, 1, device=torch.device("cpu"))
    with torch._dynamo.config.patch(recompile_limit=2):  # fewer than there are buckets
        engine.warm_up()
    present = [(True, True, False), (False, True, True), (True, False, True), (True, True, False)]
    for words in ((0, 16, 20, 18), (17, 5, 3, 1)):
        for rows in (slice(0, 1), slice(1, 2), slice(0, 4)):
            observation = tiny.observe(model, present[rows], words[rows])
            noise = tiny.chunk(model, len(present[rows]))
            found = engine.act_with(observation, ActOptions(noise, num_steps=1)).actions
            expected = model.act(observation, noise, num_steps=1)
            assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert "Not compiled" not in caplog.text


@FAMILIES
@torch.no_grad()
def test_the_graphs_hold_nothing_twice_and_nothing_unused(pi05):
    model = tiny.flow(pi05=pi05)
    images, prompt, lengths, state = inputs_of(model, observed(model))
    prefill, denoise = StaticPrefill(model).eval(), StaticDenoise(model, STEPS).eval()
    cache, noise = prefill(images, prompt, lengths), tiny.chunk(model, 2)
    depth, vision = model.config.vlm.depth, model.config.vision.depth
    counts = counted(prefill, (images, prompt, lengths))
    # The last layer of the VLM computes keys and values only.
    assert counts["scaled_dot_product_attention"] == vision + depth - 1
    assert counts["product"] == 6 * vision + 1 + 7 * (depth - 1) + 2
    assert counts["sin"] == counts["cos"] == 1
    counts = counted(denoise, (cache, lengths, state, noise))
    assert counts["scaled_dot_product_attention"] == depth * STEPS
    # Time and rotary angles once, not once per step; so are the adaptive norms' modulations.
    assert counts["sin"] == counts["cos"] == 2
    once, each_step = (2 + 2 * depth + 1, 2) if pi05 else (1, 5)
    assert counts["product"] == once + STEPS * (7 * depth + each_step)


def counted(module, inputs):
    graph = torch.export.export(module, inputs, strict=False).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    names = {node: node.target.__name__.partition(".")[0] for node in calls}
    # A linear map is added to the residual stream by `addmm`.
    products = dict.fromkeys(("linear", "addmm"), "product")
    names = {node: products.get(name, name) for node, name in names.items()}
    unused = {name for node, name in names.items() if not node.users}
    # Views and empty caches may be unused: they cost nothing, and a compiler drops them.
    assert not unused & {"product", "scaled_dot_product_attention", "rms_norm", "pad", "sin", "cos"}
    return Counter(names.values())
