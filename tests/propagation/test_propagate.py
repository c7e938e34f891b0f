"""Each rule against an exact or independent answer; then whole models against draws."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from latedrop.data.rows import row_count
from latedrop.dropout.sampling import sample
from latedrop.errors import LatedropWarning, OutputError, SiteError
from latedrop.network.find_sites import find_sites
from latedrop.network.network import call, read
from latedrop.propagation.propagate import propagate
from latedrop.propagation.rules import Pair
from networks import Net
from rounding import assert_same_doubles
from zoo import ZOO, Case

REFUSED = {
    "lstm": "lstm in 'lstm' (LSTM)",
    "time_major_gru": "gru in 'gru' (GRU)",
    "transformer": "multi_head_attention_forward in 'encoder.layers.0.self_attn' (MultiheadAttention)",
    "attention": "multi_head_attention_forward in 'attention' (MultiheadAttention)",
}
POOLED = {"batchnorm_cnn", "residual_cnn"}
every_case = pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
fine_cases = pytest.mark.parametrize("case", [c for c in ZOO if c.name not in REFUSED], ids=lambda case: case.name)
DOUBLE = torch.float64


def pair_of(shape, dtype=DOUBLE):
    return torch.randn(shape, dtype=dtype), torch.rand(shape, dtype=dtype)


@torch.no_grad()
def run(f, m, v):
    """Mean and variance of `f` on the pair `(m, v)`."""
    out = f(Pair(m.clone(), v.clone()))
    assert isinstance(out, Pair)
    assert out.shape == out.m.shape == out.v.shape
    return out.m, out.v


def close(value, expected, rtol=1e-9, atol=1e-11):
    torch.testing.assert_close(value, expected, rtol=rtol, atol=atol)


# Functions of one unit. The reference is a sum over a fine grid of the Gaussian.
CLOSED = {
    "relu": nn.ReLU(),
    "relu_in_place": nn.ReLU(inplace=True),
    "leaky_relu": nn.LeakyReLU(0.2),
    "prelu": nn.PReLU(init=-0.3),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-0.5, 1.5),
    "hardsigmoid": nn.Hardsigmoid(),
    "abs": torch.abs,
    "clamp_below": lambda x: x.clamp(min=0.3),
    "clamp_above": lambda x: x.clamp(max=0.3),
    "clamp_min": lambda x: torch.clamp_min(x, 0.3),
    "clamp_max": lambda x: torch.clamp_max(x, 0.3),
    "square": torch.square,
    "cube": lambda x: x**3,
    "x_times_x": lambda x: x * x,
    "x_plus_x": lambda x: x + x,
    "affine": lambda x: (3 - 2 * x) / 4 - 1,
}
SMOOTH = {
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "softplus": nn.Softplus(),
    "mish": nn.Mish(),
    "exp": torch.exp,
}
KINKED = {
    "elu": nn.ELU(),
    "elu_in_place": nn.ELU(inplace=True),
    "selu": nn.SELU(),
    "celu": nn.CELU(0.7),
    "hardswish": nn.Hardswish(),
}
FUNCTIONS = [(f, rtol) for table, rtol in ((CLOSED, 1e-6), (SMOOTH, 2e-3), (KINKED, 4e-2)) for f in table.values()]
every_function = pytest.mark.parametrize(("f", "tolerance"), FUNCTIONS, ids=[*CLOSED, *SMOOTH, *KINKED])


@every_function
@torch.no_grad()
def test_functions_of_one_unit_against_a_fine_grid(f, tolerance):
    f = f.double() if isinstance(f, nn.Module) else f
    m = torch.linspace(-7, 7, 57, dtype=DOUBLE)[:, None].expand(57, 4)
    s = torch.tensor([0.01, 0.1, 0.3, 0.5], dtype=DOUBLE).expand(57, 4)
    z = torch.linspace(-9, 9, 40001, dtype=DOUBLE)
    weight = torch.exp(-z.square() / 2)
    weight /= weight.sum()
    values = f(m[..., None] + s[..., None] * z)
    mean = (values * weight).sum(-1)
    variance = ((values - mean[..., None]).square() * weight).sum(-1)
    found_mean, found_variance = run(f, m, s.square())
    assert float(((found_mean - mean).abs() / s).max()) < tolerance
    slope = (variance / s.square()).amax(0)
    assert float(((found_variance - variance).abs() / s.square() / slope).max()) < tolerance


@every_function
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_functions_of_a_unit_without_variance_are_themselves(f, tolerance, dtype):
    f = f.to(dtype) if isinstance(f, nn.Module) else f
    m = torch.cat([torch.linspace(-30, 30, 301), torch.tensor([0.0, 0.3, -0.5, 1.5, 6.0])]).to(dtype)
    mean, variance = run(f, m, torch.zeros_like(m))
    with torch.no_grad():
        expected = f(m.clone())
    if f in KINKED.values() or f in SMOOTH.values() or f in (CLOSED["relu"], CLOSED["relu6"], CLOSED["leaky_relu"]):
        assert torch.equal(mean, expected)  # exactly the function itself where nothing varies
    close(mean, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(variance, torch.zeros_like(variance))


@every_function
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-6, 1.0, 1e4])
def test_functions_stay_finite_and_non_negative_in_float32(f, tolerance, size):
    if f in (torch.exp, CLOSED["cube"], CLOSED["square"], CLOSED["x_times_x"]) and size > 1:
        pytest.skip("overflows by itself")
    f = f.float() if isinstance(f, nn.Module) else f
    m = torch.cat([torch.linspace(-20, 20, 401), torch.linspace(-1e-5, 1e-5, 21)])
    mean, variance = run(f, m, torch.full_like(m, size))
    assert torch.isfinite(mean).all()
    assert torch.isfinite(variance).all()
    assert (variance >= 0).all()


# Linear operators: with J the Jacobian the variance is J^2 v.
LINEAR = {
    "linear": (nn.Linear(6, 4), (3, 6)),
    "linear_without_bias": (nn.Linear(6, 4, bias=False), (3, 6)),
    "linear_on_sequences": (nn.Linear(6, 4), (2, 3, 6)),
    "linear_on_transposed": (lambda x: F.linear(x.transpose(1, 2), torch.ones(4, 3, dtype=DOUBLE)), (2, 3, 6)),
    "matmul_left": (lambda x: torch.linspace(-1, 1, 15, dtype=DOUBLE).view(5, 3) @ x, (2, 3, 4)),
    "einsum": (lambda x: torch.einsum("bcw,cd->bdw", x, torch.linspace(-1, 1, 15, dtype=DOUBLE).view(3, 5)), (2, 3, 4)),
    "conv1d_same_dilated": (nn.Conv1d(4, 6, 3, padding="same", dilation=2), (2, 4, 7)),
    "conv2d_strided": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 2, 6, 5)),
    "conv2d_groups": (nn.Conv2d(4, 4, 3, groups=2, bias=False), (2, 4, 5, 5)),
    "conv2d_circular": (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (1, 2, 4, 4)),
    "conv2d_unbatched": (nn.Conv2d(2, 3, 3), (2, 5, 5)),
    "conv3d": (nn.Conv3d(2, 2, 2), (1, 2, 3, 3, 3)),
    "conv_transpose1d": (nn.ConvTranspose1d(2, 3, 4, stride=2, padding=1), (2, 2, 5)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1, groups=2), (1, 4, 3, 3)),
    "conv_transpose3d": (nn.ConvTranspose3d(2, 1, 2, stride=2), (1, 2, 2, 2, 2)),
    "batch_norm1d": (nn.BatchNorm1d(5), (3, 5)),
    "batch_norm2d": (nn.BatchNorm2d(3), (2, 3, 4, 4)),
    "batch_norm_plain": (nn.BatchNorm2d(3, affine=False), (2, 3, 4, 4)),
    "instance_norm_stored": (nn.InstanceNorm2d(3, track_running_stats=True), (2, 3, 4, 4)),
    "avg_pool1d": (nn.AvgPool1d(3, 2, 1), (2, 2, 7)),
    "avg_pool2d": (nn.AvgPool2d(2), (2, 2, 6, 6)),
    "avg_pool2d_border": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), (1, 2, 5, 6)),
    "avg_pool2d_ceil": (nn.AvgPool2d((3, 2), 2, 1, ceil_mode=True), (1, 2, 6, 5)),
    "avg_pool2d_divisor": (nn.AvgPool2d(2, divisor_override=1), (1, 2, 4, 4)),
    "avg_pool3d": (nn.AvgPool3d(2, padding=1), (1, 1, 4, 4, 4)),
    "adaptive_avg_pool1d": (nn.AdaptiveAvgPool1d(3), (2, 2, 7)),
    "adaptive_avg_pool2d": (nn.AdaptiveAvgPool2d((3, 2)), (1, 2, 5, 7)),
    "global_avg_pool": (nn.AdaptiveAvgPool2d(1), (2, 2, 3, 4)),
    "global_avg_pool_channels_last": (
        lambda x: F.adaptive_avg_pool2d(x.to(memory_format=torch.channels_last), 1),
        (2, 2, 3, 4),
    ),
    "adaptive_avg_pool3d": (nn.AdaptiveAvgPool3d(2), (1, 1, 3, 4, 5)),
    "nearest": (nn.Upsample(scale_factor=2), (1, 2, 3, 3)),
    "nearest_exact": (nn.Upsample(size=(5, 4), mode="nearest-exact"), (1, 2, 3, 3)),
    "linear1d": (nn.Upsample(scale_factor=2, mode="linear"), (1, 2, 5)),
    "bilinear": (nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 3, 4)),
    "bilinear_corners": (nn.Upsample(size=(5, 7), mode="bilinear", align_corners=True), (1, 2, 3, 4)),
    "bilinear_fraction": (partial(F.interpolate, scale_factor=1.7, mode="bilinear"), (1, 2, 4, 5)),
    "bilinear_smooth": (partial(F.interpolate, size=(2, 3), mode="bilinear", antialias=True), (1, 2, 6, 7)),
    "trilinear": (nn.Upsample(scale_factor=2, mode="trilinear"), (1, 1, 2, 2, 3)),
    "bicubic": (nn.Upsample(scale_factor=2, mode="bicubic"), (1, 1, 4, 5)),
    "area": (partial(F.interpolate, size=(2, 3), mode="area"), (1, 2, 5, 7)),
    "pixel_shuffle": (nn.PixelShuffle(2), (1, 4, 2, 3)),
    "pixel_unshuffle": (nn.PixelUnshuffle(2), (1, 1, 4, 4)),
    "channel_shuffle": (nn.ChannelShuffle(2), (1, 4, 2, 2)),
    "unfold": (nn.Unfold(2), (1, 2, 3, 3)),
    "pad_constant": (lambda x: F.pad(x, (1, 2), value=3.0), (2, 3)),
    "pad_reflect": (nn.ReflectionPad2d(1), (1, 1, 3, 3)),
    "pad_replicate": (nn.ReplicationPad1d(2), (1, 2, 3)),
    "pad_zero": (nn.ZeroPad2d(1), (1, 1, 2, 2)),
    "dropout_in_eval": (nn.Dropout(0.5), (2, 3)),
    "mean": (lambda x: x.mean((1, 2)), (2, 3, 4)),
    "mean_of_all": (lambda x: x.mean()[None], (2, 3)),
    "sum": (lambda x: x.sum(1, keepdim=True), (2, 3)),
    "cumsum": (lambda x: x.cumsum(1), (2, 4)),
    "index_add": (lambda x: x.new_zeros(2, 3).index_add(1, torch.tensor([2, 0, 2, 1]), x), (2, 4)),
    "index_add_in_place": (lambda x: x.clone().index_add_(0, torch.tensor([1]), x[:1]), (2, 4)),
    "index_add_to_constant": (
        lambda x: torch.ones(2, 3, dtype=DOUBLE).index_add(1, torch.tensor([2, 0, 2, 1]), x),
        (2, 4),
    ),
    "scatter_add": (lambda x: x.new_zeros(2, 3).scatter_add(1, torch.tensor([[2, 0, 2], [1, 1, 1]]), x), (2, 3)),
    "cat_with_constant": (lambda x: torch.cat([x, torch.ones(2, 1, dtype=DOUBLE), x[:, :1]], 1), (2, 3)),
    "stack": (lambda x: torch.stack([x[0], -x[1]], 1), (2, 3)),
    "reshape_after_permute": (lambda x: x.permute(0, 2, 1).reshape(2, -1), (2, 3, 4)),
    "transpose_view": (lambda x: x.transpose(0, 1).contiguous().view(-1), (2, 3)),
    "slices": (lambda x: x[:, 1:, ::2], (2, 3, 4)),
    "index": (lambda x: x[:, [2, 0]], (2, 3)),
    "select_squeeze": (lambda x: x[:, 1].unsqueeze(0).squeeze(), (2, 3)),
    "chunks": (lambda x: x.chunk(2, 1)[1] + 2 * x.split([2, 2], 1)[0], (2, 4)),
    "unbind": (lambda x: x.unbind(1)[1], (2, 3)),
    "flip_roll": (lambda x: x.flip(1).roll(1, 0), (2, 3)),
    "expand_repeat": (lambda x: x[:, None].expand(2, 3, 2).repeat(1, 1, 2), (2, 2)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (2, 2)),
    "unflatten": (lambda x: x.unflatten(1, (2, 2)).flatten(0, 1), (2, 4)),
    "where": (lambda x: torch.where(torch.tensor([True, False, True]), x, 0.5), (2, 3)),
    "masked_fill": (lambda x: x.masked_fill(torch.tensor([True, False, True]), -torch.inf)[:, 1:2], (2, 3)),
    "channels_last": (lambda x: nn.Flatten()(x.to(memory_format=torch.channels_last) * 2), (2, 3, 2, 2)),
    "constants": (lambda x: (2 * x - 1) / torch.tensor([2.0, 4.0, 8.0], dtype=DOUBLE) + 3 - x.new_ones(3), (2, 3)),
    "broadcast": (lambda x: x + torch.ones(4, 1, 1, dtype=DOUBLE), (2, 3)),
    "in_place": (lambda x: x.clone().mul_(2).add_(1).sub_(3).div_(4).neg_(), (2, 3)),
    "in_place_through_view": (lambda x: write_through_view(x.clone()), (2, 3)),
    "written_into_zeros": (lambda x: write_into_zeros(x), (2, 3)),
    "float32_and_back": (lambda x: x.float().double(), (2, 3)),
}


def write_through_view(x):
    x.view(-1)[1:4].mul_(3)
    x[:, 0] = 7.0
    return x


def write_into_zeros(x):
    out = torch.zeros_like(x)
    out[:, 1:] = x[:, :-1]
    out[:, 0] += x[:, 2]
    return out


@pytest.mark.parametrize(("f", "shape"), LINEAR.values(), ids=LINEAR)
def test_linear_operators_against_their_jacobian(f, shape):
    if isinstance(f, nn.Module):
        f = f.double().eval()
        for buffer in f.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 2)
    m, v = pair_of(shape)
    mean, variance = run(f, m, v)
    expected = f(m)
    jacobian = torch.autograd.functional.jacobian(f, m)
    rough = 1e-6 if f is LINEAR["float32_and_back"][0] else 1e-9
    close(mean, expected.detach(), rtol=rough)
    close(variance, (jacobian.square() * v).flatten(expected.dim()).sum(-1), rtol=rough)


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(5), nn.LayerNorm(5, elementwise_affine=False), nn.InstanceNorm1d(4, affine=True)],
    ids=["layer", "layer_plain", "instance"],
)
def test_norms_take_the_statistics_of_the_mean(norm):
    norm = norm.double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 2)
    m, v = pair_of((3, 4, 5))
    mean, variance = run(norm, m, v)
    weight = norm.weight if norm.weight is not None else torch.ones(5)
    weight = weight[:, None] if isinstance(norm, nn.InstanceNorm1d) else weight
    close(mean, norm(m).detach())
    close(variance, (v * weight.square() / (m.var(2, correction=0, keepdim=True) + norm.eps)).detach())


@pytest.mark.parametrize(
    "op",
    [torch.add, torch.sub, partial(torch.add, alpha=3), torch.mul, lambda a, b: a @ b.mT],
    ids=["add", "sub", "add_three", "mul", "matmul"],
)
def test_two_independent_pairs_against_draws(op):
    (ma, va), (mb, vb) = pair_of((1, 3, 4)), pair_of((1, 3, 4))
    draws = 200_000
    noise = torch.randn(2, draws, 3, 4, dtype=DOUBLE)
    values = op(ma + va.sqrt() * noise[0], mb + vb.sqrt() * noise[1])
    with torch.no_grad():
        out = op(Pair(ma, va), Pair(mb, vb))
    error = values.std(0) / draws**0.5
    assert float(((out.m[0] - values.mean(0)) / error).abs().max()) < 5
    deviations = (values - values.mean(0)).square()
    assert float(((out.v[0] - deviations.mean(0)) / (deviations.std(0) / draws**0.5)).abs().max()) < 5


POOLS = {
    "pair": (nn.MaxPool1d(2), (1, 1, 8), 0.01),
    "2x2": (nn.MaxPool2d(2), (2, 3, 6, 6), 0.3),
    "3x3_overlapping": (nn.MaxPool2d(3, 2, 1), (1, 3, 7, 8), 0.4),
    "dilated": (nn.MaxPool2d((2, 3), 1, 1, dilation=(2, 1)), (1, 2, 6, 6), 0.4),
    "ceil": (nn.MaxPool2d(3, 2, ceil_mode=True), (1, 2, 6, 6), 0.4),
    "3d": (nn.MaxPool3d(2), (1, 2, 4, 4, 4), 0.4),
}
every_pool = pytest.mark.parametrize(("pool", "shape", "worst"), POOLS.values(), ids=POOLS)


@every_pool
def test_max_pooling_against_draws(pool, shape, worst):
    """Two units are exact; of more, the maximum of two is not Gaussian, and Clark's variance comes out low."""
    m, v = pair_of(shape)
    draws, part = 20_000, 500
    noisy = (m + v.sqrt() * torch.randn(part, *shape, dtype=DOUBLE) for _ in range(draws // part))
    values = torch.cat([pool(x.flatten(0, 1)).unflatten(0, (part, -1)) for x in noisy])
    mean, variance = run(pool, m, v)
    off = (variance / values.var(0) - 1).abs()
    assert float(((mean - values.mean(0)) / values.std(0)).abs().max()) < worst / 3 + 5 * draws**-0.5
    assert float(off.max()) < worst + 6 * (2 / draws) ** 0.5
    assert float(off.median()) < 0.12


@every_pool
def test_max_pooling_without_variance_is_max_pooling(pool, shape, worst):
    m = torch.randn(shape).round(decimals=1)
    mean, variance = run(pool, m, torch.zeros(shape))
    assert torch.equal(mean, pool(m))  # a maximum is one of its numbers
    assert not variance.any()


def test_max_unpooling_follows_the_means():
    m, v = pair_of((1, 2, 4, 4))
    pool, unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
    mean, variance = run(lambda x: unpool(*pool(x)), m, v)
    assert torch.equal(mean != 0, unpool(*pool(m)) != 0)
    assert torch.equal(variance != 0, mean != 0)


# Whole models.
def test_exact_before_the_last_linear_layer():
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2)).double()
    x, rate = torch.randn(4, 3, dtype=DOUBLE), 0.3
    moments = propagate(net, x, rate)
    with torch.no_grad():
        hidden = net[:2](x)
        close(moments.mean, net(x))
        close(moments.variance, rate / (1 - rate) * (hidden.square() @ net[2].weight.square().T))
    assert moments.draws == 0
    drawn = sample(net, x, rate, draws=20_000)
    assert float((moments.variance / drawn.variance - 1).abs().max()) < 5 * (2 / 20_000) ** 0.5


def test_a_second_site_drops_a_random_input():
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3))).double()
    with torch.no_grad():
        for layer, (weight, bias) in zip(net, [(2, 1), (-3, 2), (0.5, -1)], strict=True):
            layer.weight.fill_(weight)
            layer.bias.fill_(bias)
    first, second = 0.2, 0.4
    moments = propagate(net, torch.ones(1, 1, dtype=DOUBLE), {"1": first, "2": second})
    h, odds = 3.0, second / (1 - second)
    m, v = -3 * h + 2, 9 * h * h * first / (1 - first)
    close(moments.mean, torch.tensor([[0.5 * m - 1]], dtype=DOUBLE))
    close(moments.variance, torch.tensor([[0.25 * (v / (1 - second) + m * m * odds)]], dtype=DOUBLE))


@every_case
def test_every_model_gives_variances_or_names_the_layer(case: Case, recwarn):
    model, x = case.make()
    if case.name in REFUSED:
        with pytest.raises(SiteError, match="method='sample' or method='linear'") as caught:
            propagate(model, x, 0.1, readout=case.readout)
        assert REFUSED[case.name] in str(caught.value)
        return
    moments = propagate(model, x, 0.1, readout=case.readout)
    assert [w.category for w in recwarn] == [LatedropWarning] * (case.name in POOLED)
    with torch.no_grad():
        assert moments.mean.shape == moments.variance.shape == read(call(model, x), case.readout, row_count(x)).shape
    assert torch.isfinite(moments.mean).all()
    assert (moments.variance > 0).all()


@every_case
def test_rate_zero_is_the_plain_model_bit_for_bit(case: Case):
    model, x = case.make()
    model.requires_grad_(False)  # torch folds some products in another way where weights ask for gradients
    moments = propagate(model, x, 0.0, readout=case.readout)
    with torch.no_grad():
        # Rate 0 multiplies by 1, on the same batch.
        assert torch.equal(moments.mean, read(call(model, x), case.readout, row_count(x)))
    assert not moments.variance.any()


@fine_cases
@pytest.mark.filterwarnings("ignore:expected units that are not summed")
def test_small_rates_leave_the_mean_alone_and_the_variance_linear(case: Case):
    model, x = case.make()
    small, plain = propagate(model, x, 1e-6, readout=case.readout), propagate(model, x, 0, readout=case.readout)
    close(small.mean, plain.mean, rtol=1e-3, atol=1e-3)
    tiny = propagate(model, x, 1e-7, readout=case.readout)
    close(small.variance, 10 * tiny.variance, rtol=0.05, atol=0)


def test_an_input_is_not_written_to():
    net = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1)))
    x = torch.randn(2, 3)
    before = x.clone()
    propagate(net, x, 0.1)
    assert torch.equal(x, before)


def made(name):
    return next(case for case in ZOO if case.name == name).make()


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, False), (torch.float16, False), (torch.float32, True)]
)
def test_half_precision_models_carry_float32_moments(dtype, autocast):
    model, x = made("unet")
    expected = propagate(model, x, 0.1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        moments = propagate(model.to(dtype), x.to(dtype), 0.1)
    assert moments.mean.dtype == moments.variance.dtype == torch.float32
    close(moments.variance, expected.variance, rtol=0.1, atol=1e-4)


DENSE = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("model", "x", "match"),
    [
        (
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3)),
            torch.randn(2, 1, 8, 8),
            r"'2' drops whole channels.*\(2, 4, 6, 6\).*kind='element'",
        ),
        (DENSE, torch.randn(2, 5, 3), "drops whole channels"),
        (*made("reused"), r"'again' drops whole channels.* 3 times"),
    ],
    ids=["maps", "sequences", "several calls"],
)
def test_channel_masks_over_several_positions_are_refused(model, x, match):
    with pytest.raises(SiteError, match=match):
        propagate(model, x, 0.1, find_sites(model, x, kind="channel"))


def test_channel_masks_of_features_are_element_masks():
    x = torch.randn(2, 3)
    moments = propagate(DENSE, x, 0.1, find_sites(DENSE, x, kind="channel"))
    assert_same_doubles(moments.variance, propagate(DENSE, x, 0.1).variance)


def applied(f):
    """A function between two layers."""
    return Net(lambda net, x: f(x))


@pytest.mark.parametrize(
    ("f", "match"),
    [
        (lambda x: x.softmax(1), r"aten\._softmax"),
        (lambda x: F.scaled_dot_product_attention(*3 * [x[:, None]]), "softmax|attention"),
        (lambda x: x * torch.sigmoid(x), r"aten\.mul.*same units.*nn\.SiLU"),
        (lambda x: x * F.relu6(x + 3) / 6, "same units"),
        (lambda x: x / x.norm(dim=1, keepdim=True), "norm"),
        (lambda x: 1 / x, "reciprocal"),
        (lambda x: x * (x > 0), r"aten\.gt"),
        (lambda x: x if x.sum() > 0 else -x, r"aten\.gt"),
        (lambda x: x**0.5, "exponent"),
        (lambda x: torch.zeros(x.shape).add_(x), "constant tensor"),
        (lambda x: x.long().float(), "int64"),
        (lambda x: F.rrelu(x), "rrelu"),
        (nn.RMSNorm(4), "rsqrt|rms_norm"),
        (nn.Softmax(1), "_softmax"),
    ],
)
def test_operators_without_a_rule_are_named_with_their_module(f, match):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Sequential(applied(f)))
    with pytest.raises(SiteError, match=f"(?s){match}.*in '2.0.*'.*Use method='sample'"):
        propagate(net, torch.randn(5, 3), 0.1)


def test_a_recurrent_layer_after_the_sites_is_refused():
    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 4), "cell": nn.GRUCell(4, 2)}
    model, x = Net(lambda net, x: net.cell(net.second(net.first(x))), **layers), torch.randn(5, 3)
    with pytest.raises(SiteError, match=r"gru_cell in 'cell' \(GRUCell\)"):
        propagate(model, x, 0.1, find_sites(model, x, select="second"))


def test_an_operator_without_a_rule_in_the_readout_says_so():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    with pytest.raises(SiteError, match=r"aten\._softmax\.default in the readout"):
        propagate(net, torch.randn(5, 3), 0.1, readout=lambda out: out.softmax(1))


@pytest.mark.parametrize("total", [lambda m: m.sum((1, 2, 3)), lambda m: m.mean((2, 3)), lambda m: F.avg_pool2d(m, 2)])
def test_a_readout_that_sums_a_map_is_warned_about(total):
    model, x = made("unet")
    with pytest.warns(LatedropWarning, match="the readout sums or averages"):
        propagate(model, x, 0.1, readout=total)


def test_the_variance_of_a_count_is_not_the_sum_of_the_variances():
    """Every unit reaches nine pixels, all with weight 1: the count's variance is nine times what is propagated."""
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 3, padding=2))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    x = torch.rand(2, 1, 6, 6)

    def count(density):
        return density.sum((1, 2, 3))

    with pytest.warns(LatedropWarning, match="the readout sums"):
        propagated = propagate(net, x, 0.1, readout=count).variance
    hidden = net[0](x).detach()
    close(propagated, 9 * (0.1 / 0.9) * hidden.square().sum((1, 2, 3)), rtol=1e-5)
    drawn = sample(net, x, 0.1, 4000, readout=count).variance
    close(drawn, 9 * propagated, rtol=6 * (2 / 4000) ** 0.5, atol=0)


def test_a_model_that_averages_a_map_is_warned_about():
    model, x = made("batchnorm_cnn")
    with pytest.warns(LatedropWarning, match=r"'7' \(AdaptiveAvgPool2d\) sums or averages"):
        propagate(model, x, 0.1)


def test_a_readout_before_the_sites_has_no_variance():
    def both(net, x):
        hidden = net.first(x)
        return hidden, net.second(hidden)

    model, x = Net(both, first=nn.Linear(3, 4), second=nn.Linear(4, 1)), torch.randn(5, 3)
    assert not propagate(model, x, 0.1, readout=0).variance.any()
    assert propagate(model, x, 0.1, readout=1).variance.all()


def test_overflow_is_an_error():
    net = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1), applied(lambda x: (x * 100).exp()))
    with pytest.raises(OutputError, match=r"propagated at rate 0\.5"):
        propagate(net, 100 * torch.ones(2, 1), 0.5)


@pytest.mark.parametrize(("name", "rank"), [("unet", 0.9), ("columns", 0.9)])
def test_maps_of_random_networks_agree_with_draws(name, rank):
    model, x = made(name)
    for rate in (0.01, 0.1):
        propagated, drawn = propagate(model, x, rate).variance, sample(model, x, rate, 2000).variance
        assert stats.spearmanr(propagated.flatten(), drawn.flatten()).statistic > rank
        assert 0.85 < float((propagated / drawn).median()) < 1.2


def test_callers_in_inference_mode_get_the_same() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3))
    x = torch.randn(2, 1, 8, 8)
    expected = propagate(net, x, rate=0.1)
    with torch.inference_mode():
        for inputs in (x, x.clone()):
            # The same call on the same batch.
            assert torch.equal(propagate(net, inputs, rate=0.1).variance, expected.variance)
