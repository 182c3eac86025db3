"""Mixtures of experts: routers equal to the references index by index, dispatch, counts, checkpoints.

Whole models under fuzz are in test_parity_deepseek.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import READS, fake_gpu
from families import assert_close, deepseek_v2, deepseek_v3, mixtral, ours, random_tokens, redraw, reference_logits
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import tokenbytoken as tbt
from tokenbytoken.checkpoints import open_source
from tokenbytoken.checkpoints.tensors import Part
from tokenbytoken.layers import MoE, Router, devices, feed_forward, route

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WIDTH = 64
V3_MOE = tbt.MoEConfig(num_experts=256, experts_per_token=8, intermediate_size=8, scoring="sigmoid", scale=2.5,
                       num_groups=8, groups_kept=4, group_score="top2_sum", selection_bias=True)  # fmt: skip


def reference_router(family: str) -> tuple[torch.nn.Module, tbt.MoEConfig]:
    """The router of transformers in the published shape (but the hidden size), and the config that means the same."""
    from transformers import DeepseekV2Config, DeepseekV3Config, JambaConfig, MixtralConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.jamba.modeling_jamba import JambaTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    published = {"v3": "deepseek-v3", "v2": "deepseek-v2", "v2-lite": "deepseek-v2-lite", "mixtral": "mixtral-8x7b",
                 "jamba": "jamba-v0.1"}  # fmt: skip
    layers = tbt.published[published[family]].layers
    moe = next(layer.feed_forward for layer in layers if isinstance(layer.feed_forward, tbt.MoEConfig))
    shape: dict[str, Any] = {"hidden_size": WIDTH, "num_experts_per_tok": moe.experts_per_token}
    deepseek = {**shape, "n_routed_experts": moe.num_experts, "n_group": moe.num_groups, "topk_group": moe.groups_kept,
                "routed_scaling_factor": moe.scale, "norm_topk_prob": moe.normalize}  # fmt: skip
    limited: dict[str, Any] = {"topk_method": "greedy" if family == "v2-lite" else "group_limited_greedy"}
    build: dict[str, Callable[[], torch.nn.Module]] = {
        "v3": lambda: DeepseekV3TopkRouter(DeepseekV3Config(**deepseek)),
        "v2": lambda: DeepseekV2TopkRouter(DeepseekV2Config(**deepseek, **limited)),
        "v2-lite": lambda: DeepseekV2TopkRouter(DeepseekV2Config(**deepseek, **limited)),
        "mixtral": lambda: MixtralTopKRouter(MixtralConfig(**shape, num_local_experts=moe.num_experts)),
        "jamba": lambda: JambaTopKRouter(JambaConfig(**shape, num_experts=moe.num_experts)),
    }
    reference = redraw(build[family]())
    if family == "v3":
        reference.get_buffer("e_score_correction_bias").mul_(0.2)  # narrower than the scores: no expert always wins
    return reference, moe


def same_router(reference: torch.nn.Module, config: tbt.MoEConfig) -> Router:
    router = Router(config, WIDTH).requires_grad_(False)
    router.weight.copy_(reference.get_parameter("weight"))
    if router.selection_bias is not None:
        router.selection_bias.copy_(reference.get_buffer("e_score_correction_bias"))
    return router


def by_index(weights: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference gives no order of the chosen: put both in the order of the experts."""
    chosen, order = chosen.sort(-1)
    return weights.gather(-1, order), chosen


def inputs(n: int = 1000, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


# --- routers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, -1.2])
@pytest.mark.parametrize("family", ["v3", "v2", "v2-lite", "mixtral", "jamba"])
def test_a_router_equals_the_reference_to_the_index(family: str, shift: float) -> None:
    reference, config = reference_router(family)
    if family == "v3":  # shifted, nearly every biased score is negative
        reference.get_buffer("e_score_correction_bias").add_(shift)
    x = inputs()
    _, weights, chosen = reference(x)
    want_weights, want_chosen = by_index(weights, chosen)
    got_weights, got_chosen = by_index(*same_router(reference, config)(x))
    assert torch.equal(got_chosen, want_chosen)
    assert_close(got_weights, want_weights, 1e-6)
    assert len(got_chosen.unique()) > config.num_experts // 2  # a real choice, not always the same few


def test_the_routers_differ_as_they_should() -> None:
    totals = {}
    for family in ("v3", "v2", "v2-lite", "mixtral", "jamba"):
        reference, config = reference_router(family)
        totals[family] = same_router(reference, config)(inputs())[0].sum(-1)
    assert_close(totals["v3"], torch.full((1000,), 2.5), 1e-5)
    assert_close(totals["mixtral"], torch.ones(1000), 1e-5)
    for name, scale in {"jamba": 1, "v2-lite": 1, "v2": 16}.items():  # not divided by their sum
        assert 0.3 * scale < totals[name].mean() < 0.9 * scale


def exact(scores: list[float], **config: Any) -> tuple[list[int], list[float]]:
    """Route one token that has exactly these sigmoid scores."""
    bias = config.pop("bias", None)
    defaults = {"num_experts": len(scores), "experts_per_token": 2, "intermediate_size": 1, "scale": 2.5}
    moe = tbt.MoEConfig(**{**defaults, "scoring": "sigmoid", "group_score": "top2_sum", **config})
    logits = torch.tensor([scores], dtype=torch.float64).logit()
    weights, chosen = route(logits, moe, None if bias is None else torch.tensor(bias, dtype=torch.float64))
    return chosen[0].tolist(), [round(weight, 6) for weight in weights[0].tolist()]


def test_the_bias_chooses_and_the_unbiased_score_weighs() -> None:  # C41
    assert exact([0.9, 0.8, 0.3, 0.2], bias=[0, -0.5, 0.6, 0]) in (([0, 2], [1.875, 0.625]), ([2, 0], [0.625, 1.875]))
    assert exact([0.9, 0.8, 0.3, 0.2]) == ([0, 1], [1.323529, 1.176471])


def test_a_group_is_ranked_by_the_sum_of_its_best_two() -> None:  # C42
    groups = {"num_groups": 2, "groups_kept": 1}
    assert exact([0.9, 0.1, 0.6, 0.55], **groups) == ([2, 3], [1.304348, 1.195652])
    assert exact([0.9, 0.1, 0.6, 0.55], **groups, group_score="max")[0] == [0, 1]
    assert exact([0.7, 0.6, 0.01, 0.5, 0.45, 0.44], **groups) == ([0, 1], [1.346154, 1.153846])


def test_one_group_is_the_plain_best_k() -> None:  # C47
    config = dataclasses.replace(V3_MOE, num_groups=1, groups_kept=1)
    generator = torch.Generator().manual_seed(1)
    logits, bias = torch.randn(1000, 256, generator=generator), torch.randn(256, generator=generator)
    _, chosen = route(logits, config, bias)
    assert torch.equal(chosen.sort(-1).values, (logits.sigmoid() + bias).topk(8).indices.sort(-1).values)


def test_ties_go_to_the_lowest_index() -> None:
    _, chosen = route(torch.zeros(5, 256), V3_MOE, torch.zeros(256))
    assert chosen.tolist() == [list(range(8))] * 5
    logits = torch.zeros(1, 256)
    logits[0, 200:202] = 1.0  # group 6 is the best; then 0, 1, 2 of equals
    assert route(logits, V3_MOE, torch.zeros(256))[1].tolist() == [[200, 201, 0, 1, 2, 3, 4, 5]]
    mixtral_like = tbt.MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=1)
    assert route(torch.tensor([[0.0, 1, 0, 1, 1, 0, 0, 0]]), mixtral_like)[1].tolist() == [[1, 3]]


def v3_router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    bias_in_weights: bool = False,
    best_of_group: int = 2,
    mask: float = -math.inf,
    scale: float = 2.5,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's router written a second time, with its well-known mistakes as options."""
    scores = (x.to(dtype) @ weight.to(dtype).T).sigmoid()
    choice = scores + bias.to(dtype)
    of_group = choice.view(-1, 8, 32).topk(best_of_group).values.sum(-1)
    kept = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, of_group.topk(4).indices, True)
    masked = torch.where(kept.repeat_interleave(32, 1), choice, torch.tensor(mask, dtype=dtype))
    chosen = masked.topk(8).indices
    weights = (choice if bias_in_weights else scores).gather(1, chosen).float()
    return by_index(weights / weights.sum(-1, keepdim=True) * scale, chosen)


WRONG: dict[str, dict[str, Any]] = {
    "bias in the weights": {"bias_in_weights": True},
    "group score by its best": {"best_of_group": 1},
    "group score by all of it": {"best_of_group": 32},
    "mask with 0": {"mask": 0.0},
    "scaling forgotten": {"scale": 1.0},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_router_is_caught(wrong: str) -> None:
    reference, config = reference_router("v3")
    weight, bias = reference.get_parameter("weight"), reference.get_buffer("e_score_correction_bias")
    bias.sub_(1.2)  # most biased scores are negative
    x = inputs()
    got_weights, got_chosen = by_index(*same_router(reference, config)(x))
    right = v3_router(x, weight, bias)
    assert torch.equal(right[1], got_chosen)
    assert_close(right[0], got_weights, 1e-6)
    weights, chosen = v3_router(x, weight, bias, **WRONG[wrong])
    others = (chosen != got_chosen).any(-1).float().mean()
    if wrong in ("bias in the weights", "scaling forgotten"):
        assert others == 0
        assert (weights - got_weights).abs().max() > 0.01
    else:
        assert others > 0.01  # of the tokens go to other experts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_routes_in_float32(dtype: torch.dtype) -> None:
    reference, config = reference_router("v3")
    router = same_router(reference, config).to(dtype)
    reference.to(dtype)
    reference.e_score_correction_bias = reference.e_score_correction_bias.to(torch.float32)
    _, weights, chosen = reference(inputs().to(dtype))
    got = by_index(*router(inputs().to(dtype)))
    want = by_index(weights, chosen)
    assert torch.equal(got[1], want[1])
    assert got[0].dtype == torch.float32
    assert_close(got[0], want[0], 1e-6)


# --- dispatch ----------------------------------------------------------------------------------------------


def moe(hidden: int = 24, **changes: Any) -> MoE:
    torch.manual_seed(0)
    defaults = {"num_experts": 8, "experts_per_token": 3, "intermediate_size": 16, "scoring": "sigmoid", "scale": 2.5,
                "num_groups": 4, "groups_kept": 2, "group_score": "top2_sum", "selection_bias": True,
                "shared_intermediate_size": 16}  # fmt: skip
    config = tbt.MoEConfig(**{**defaults, **changes})
    return MoE(config, hidden).double().requires_grad_(False)


def one_by_one(block: MoE, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert: what a mixture is."""
    out = torch.zeros_like(x)
    for i, token in enumerate(x):
        weights, chosen = block.router(token[None])
        for weight, e in zip(weights[0], chosen[0].tolist(), strict=True):
            gate, up = block.experts.gate_proj[e] @ token, block.experts.up_proj[e] @ token
            out[i] += weight * (block.experts.down_proj[e] @ (F.silu(gate) * up))
        if block.shared is not None:
            out[i] += block.shared(token)
    return out


@pytest.mark.parametrize("tokens", [0, 1, 2, 50])
@pytest.mark.parametrize("shared", [0, 16])
def test_sorting_tokens_by_expert_equals_the_loop_over_tokens(tokens: int, shared: int) -> None:  # C45
    block = moe(shared_intermediate_size=shared)
    x = torch.randn(tokens, 24, dtype=torch.float64)
    got = block(x)
    assert got.shape == x.shape
    assert torch.allclose(got, one_by_one(block, x), rtol=0, atol=1e-12)
    assert torch.equal(block(x.view(tokens, 1, 24)).view(x.shape), got)


# Ways to mix experts without asking the host: how many tokens, whether torch multiplies groups here, the dtype.
MIXED = {
    "matrices copied": (2, False, torch.float64),
    "matrices copied, as many as there are": (8, False, torch.float64),
    "all on all": (9, False, torch.float64),
    "groups": (50, True, torch.float32),
    "groups of one token": (1, True, torch.float32),
}


@pytest.mark.parametrize("way", MIXED)
def test_mixing_without_the_host_equals_the_loop_over_tokens(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, groups, dtype = MIXED[way]
    monkeypatch.setattr(feed_forward, "_has_grouped_product", lambda weight: groups)
    block = moe(num_experts=24, shared_intermediate_size=0).to(dtype)
    assert block.router.selection_bias is not None
    block.router.selection_bias.uniform_(-0.5, 0.5)
    x = torch.randn(tokens, 24, dtype=dtype)
    got = block.experts.mixed(x, *block.router(x))
    assert got.dtype == dtype
    assert_close(got, one_by_one(block, x), 1e-12 if dtype == torch.float64 else 1e-5)
    assert_close(got, block(x), 1e-12 if dtype == torch.float64 else 1e-5)
    if not way.startswith("all"):  # then no product is in vain
        routed = block.router(x)
        assert tbt.measure.count(lambda: block.experts.mixed(x, *routed)).flops == 2 * tokens * 3 * 3 * 16 * 24


def test_what_an_expert_makes_of_tokens_that_are_not_its_own_counts_for_nothing() -> None:
    block = moe(shared_intermediate_size=0)
    x = torch.randn(50, 24, dtype=torch.float64)
    weights, chosen = block.router(x)
    lonely = int(chosen.flatten().bincount(minlength=8).argmin())
    others = ~(chosen == lonely).any(-1)
    assert others.any()
    want = block(x)
    block.experts.down_proj[lonely] = torch.inf
    assert torch.allclose(block.experts.mixed(x, weights, chosen)[others], want[others], rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups", [False, True])
def test_a_gpu_is_never_asked_who_was_chosen(groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "_has_grouped_product", lambda weight: groups)
    config = moe().config
    with fake_gpu(monkeypatch):
        block = MoE(config, 24).requires_grad_(False)
        for parameter in block.parameters():  # what the product of groups wants; `.to` cannot change a fake one
            parameter.data = torch.empty(parameter.shape, dtype=torch.bfloat16)
        for tokens in (1, 2, 3, 40):
            x = torch.empty(tokens, 1, 24, dtype=torch.bfloat16)
            out = block(x)
            assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
        with pytest.raises(READS):  # so a read would be seen
            block._expert_by_expert(x[:, 0], *block.router(x[:, 0]))


def test_groups_are_multiplied_where_torch_has_a_kernel_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        for device, dtype, capability, width, want in (
            ("cuda", torch.bfloat16, (8, 0), 16, True),
            ("cuda", torch.bfloat16, (9, 0), 16, True),
            ("cuda", torch.bfloat16, (7, 5), 16, False),
            ("cuda", torch.float16, (8, 0), 16, False),
            ("cuda", torch.bfloat16, (8, 0), 12, False),
            ("cpu", torch.bfloat16, (8, 0), 16, False),
        ):
            asked = None if device == "cpu" else capability
            monkeypatch.setattr(devices, "kind", lambda _, asked=asked: devices.Kind("", 0, asked, asked is None))
            weight = torch.empty(8, width, 24, device=device, dtype=dtype)
            assert feed_forward._has_grouped_product(weight) == want


def test_experts_that_cannot_do_without_the_host_are_asked_one_by_one() -> None:
    block = moe()
    x = torch.randn(20, 24, dtype=torch.float64)
    want = block(x)

    class OneByOne(torch.nn.Module):
        """An expert at a time, as the packed ones; and, to be found out, wrong numbers from a way of their own."""

        def __init__(self, experts: torch.nn.Module) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
            return self.experts(x, expert)

    block.experts = OneByOne(block.experts)  # type: ignore[assignment]
    assert torch.equal(block(x), want)


def test_64_equal_tokens_get_64_equal_results() -> None:  # C45
    block = moe()
    token = torch.randn(1, 24, dtype=torch.float64)
    assert torch.allclose(block(token.expand(64, 24)), block(token).expand(64, 24), rtol=0, atol=1e-12)


def test_the_factor_scales_the_routed_experts_once_and_the_shared_one_never() -> None:  # C43
    block = moe()
    x = torch.randn(10, 24, dtype=torch.float64)
    assert block.shared is not None
    shared, y = block.shared(x), block(x)
    block.router.config = dataclasses.replace(block.config, scale=5.0)
    assert torch.allclose((block(x) - shared) / (y - shared), torch.full_like(y, 2.0), rtol=1e-6)
    block.experts.down_proj.zero_()
    assert torch.equal(block(x), shared)


def test_a_mixture_keeps_the_dtype() -> None:  # C44
    block = moe().to(torch.bfloat16)
    assert block(torch.randn(5, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_pass_reads_the_weights_of_the_chosen_experts_alone() -> None:
    block = moe()
    for tokens in (1, 2, 40):
        x = torch.randn(tokens, 24, dtype=torch.float64)
        distinct = len(block.router(x)[1].unique())
        cost = tbt.measure.count(lambda: block(x))  # noqa: B023 (called at once)
        rest = block.router.weight.numel() + 8 + 3 * 16 * 24
        assert cost.weight_bytes == 8 * (rest + distinct * 3 * 16 * 24)
        assert cost.flops == 2 * tokens * (8 * 24 + (3 + 1) * 3 * 16 * 24)
        on_meta = MoE(block.config, 24).to("meta").double()
        assert tbt.measure.count(lambda: on_meta(x.to("meta"))).flops == cost.flops  # noqa: B023


# --- whole models: counts and checkpoints ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "total", "biases"),
    [("deepseek-v3", 671_026_419_200, 14_848), ("deepseek-v2", 235_741_434_880, 0),
     ("deepseek-v2-lite", 15_706_484_224, 0), ("mixtral-8x7b", 46_702_792_704, 0)],
)  # fmt: skip
def test_a_model_at_full_size_has_the_published_number_of_parameters(name: str, total: int, biases: int) -> None:
    with torch.device("meta"):
        model = tbt.Decoder(tbt.published[name])
    # One tensor for each projection, not for each expert: that is what makes building it a matter of a second.
    assert sum("experts" in n for n, _ in model.named_parameters()) == 3 * sum(
        isinstance(layer.feed_forward, MoE) for layer in model.layers
    )
    assert sum(p.numel() for p in model.parameters()) == total
    assert sum(p.numel() for n, p in model.named_parameters() if n.endswith("selection_bias")) == biases
    assert not list(model.buffers())


def test_a_decode_step_of_deepseek_v3_at_full_size_costs_what_the_formula_says() -> None:
    config = tbt.published["deepseek-v3"]
    config = dataclasses.replace(config, layers=config.layers[2:5])  # the last dense one, and two with experts
    with torch.device("meta"):
        model = tbt.Decoder(config).to(torch.bfloat16)
        tokens = torch.zeros(1, 1, dtype=torch.int64)
    state = model.new_state(1, 300)
    state.length = 250  # of what it would have seen
    counted = tbt.measure.count(lambda: model(tokens, state, logits="last"), state=state)
    formula = tbt.pass_cost(config, 1, 250)
    assert counted.flops == formula.flops
    assert counted.weight_bytes == formula.weight_bytes
    assert counted.state_bytes == formula.state_bytes


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {"v3": deepseek_v3, "v2": deepseek_v2, "mixtral": mixtral}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_read_fused_or_one_by_one_and_in_shards(family: str, tmp_path: Path) -> None:
    reference = FAMILIES[family]()
    tokens = random_tokens(1, 16)
    want = reference_logits(reference, tokens)
    saved: dict[str, dict[str, Any]] = {
        "one by one": {"save_original_format": True},
        "fused": {"save_original_format": False},
        "shards": {"max_shard_size": "40KB"},
    }
    for folder, options in saved.items():
        model = ours(reference, tmp_path / folder, **options)
        assert_close(model(tokens), want, 5e-5)
        assert sum(p.numel() for p in model.parameters()) == tbt.count_parameters(model.config).total
    stored = {key for key in saved for name in load_names(tmp_path / key) if "experts.0." in name}
    assert stored == {"one by one", "shards"}
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2


def load_names(folder: Path) -> list[str]:
    return [name for file in folder.glob("*.safetensors") for name in load_file(file)]


def test_a_part_of_the_experts_is_read_the_same_way_from_both_forms(tmp_path: Path) -> None:
    reference = deepseek_v3()
    ours(reference, tmp_path / "alone")
    whole = dict(ours(reference, tmp_path / "fused", save_original_format=False).named_parameters())
    for folder in ("alone", "fused"):
        _, tensors = open_source(tmp_path / folder)
        found = {name: stored for name, stored in tensors if ".experts." in name}
        assert len(found) == 2 * 3
        for name, stored in found.items():
            assert torch.equal(stored.read(None), whole[name])
            for part in (Part(0, 2, 5), Part(1, 3, 11), Part(2, 1, 9)):
                assert torch.equal(stored.read(part), part.of(whole[name]))


def change_checkpoint(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_an_expert_that_is_missing_twice_or_of_another_shape_is_named(tmp_path: Path) -> None:
    ours(deepseek_v3(), tmp_path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    kept = load_file(tmp_path / "model.safetensors")[name]
    change_checkpoint(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=r"lacks tensor layers\.1\.feed_forward\.experts\.3\.up_proj\.weight"):
        tbt.load(tmp_path)
    change_checkpoint(tmp_path, lambda tensors: tensors.update({name: kept[:5].clone()}))
    with pytest.raises(ValueError, match=r"layers\.1\.feed_forward\.experts\.\*\.up_proj\.weight .* shapes"):
        tbt.load(tmp_path)
    change_checkpoint(
        tmp_path,
        lambda tensors: tensors.update({name: kept, name.replace("experts.3", "experts.8"): kept.clone()}),
    )
    with pytest.raises(
        ValueError, match=r"experts\.up_proj has shape \(9, 16, 48\), the config asks for \(8, 16, 48\)"
    ):
        tbt.load(tmp_path)


def test_the_router_bias_stays_float32_in_a_half_precision_model(tmp_path: Path) -> None:
    reference = deepseek_v3()
    ours(reference, tmp_path)
    model = tbt.load(tmp_path, torch.bfloat16)
    router = model.get_submodule("layers.1.feed_forward.router")
    assert isinstance(router, Router)
    assert router.selection_bias is not None
    assert torch.equal(router.selection_bias, reference.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias"))
    assert router.weight.dtype == torch.bfloat16
    assert model(random_tokens(1, 9)).dtype == torch.bfloat16


def test_prediction_modules_stored_past_the_last_layer_are_left_out(tmp_path: Path) -> None:
    model = ours(deepseek_v3(), tmp_path)
    assert model.config.mtp_layers == 1
    tokens = random_tokens(1, 9)
    extra = {"model.layers.3.eh_proj.weight": torch.ones(48, 96), "model.layers.3.mlp.experts.0.up_proj.weight":
             torch.ones(16, 48)}  # fmt: skip
    change_checkpoint(tmp_path, lambda tensors: tensors.update(extra))
    assert torch.equal(tbt.load(tmp_path)(tokens), model(tokens))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"layers\.3\..* no place"):
        tbt.load(tmp_path)
