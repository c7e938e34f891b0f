"""A wrapper that only calls the model changes nothing: neither sites, masks and files, nor what can be reached."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import latedrop
from latedrop import calibrate, find_sites, inject, linearize, propagate, sample
from latedrop.errors import ArgumentError, SiteError
from latedrop.weights import fingerprint
from networks import Net
from rounding import assert_same_up_to_rounding


def made() -> Net:
    """Modules, and a weight without one."""
    body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    return Net(lambda net, x: F.linear(net.body(x), net.head), body=body, head=nn.Parameter(torch.randn(1, 8)))


def compiled(net: Net) -> nn.Module:
    return torch.compile(net, backend="eager")


def part_compiled(net: Net) -> nn.Module:
    net.body = torch.compile(net.body, backend="eager")
    return net


def compiled_in_place(net: Net) -> nn.Module:
    net.body.compile(backend="eager")
    return net


def parallel(net: Net) -> nn.Module:
    net.body = nn.DataParallel(net.body)
    return torch.compile(nn.DataParallel(net), backend="eager")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(params=[compiled, part_compiled, compiled_in_place, parallel], ids=lambda wrap: wrap.__name__)
def wrap(request: pytest.FixtureRequest) -> Callable[[Net], nn.Module]:
    return request.param


def pair(wrap: Callable[[Net], nn.Module]) -> tuple[Net, nn.Module, Tensor]:
    """A net, and one with the same weights in a wrapper that has run already."""
    torch.manual_seed(0)
    net, inner, x = made(), made(), torch.randn(6, 4)
    inner.load_state_dict(net.state_dict())
    wrapped = wrap(inner)
    with torch.no_grad():
        wrapped(x)
    return net, wrapped, x


def check(net: Net, wrapped: nn.Module, x: Tensor, path: Path) -> None:
    sites = find_sites(net, x)
    assert [site.name for site in sites] == ["body.2", "head"]
    assert find_sites(wrapped, x) == sites
    assert fingerprint(wrapped) == fingerprint(net)
    assert_same_up_to_rounding(sample(wrapped, x, 0.2, 10).variance, sample(net, x, 0.2, 10).variance)
    assert_same_up_to_rounding(linearize(wrapped, x).variance_by_site, linearize(net, x).variance_by_site)
    assert_same_up_to_rounding(propagate(wrapped, x, 0.2).variance, propagate(net, x, 0.2).variance)
    with inject(wrapped, sites, 0.2) as ours, inject(net, sites, 0.2) as expected_rows, torch.no_grad():
        for _ in range(3):
            assert_same_up_to_rounding(wrapped(x), net(x))
        assert ours.draw == expected_rows.draw == 3
    x, y = torch.randn(40, 4), torch.randn(40, 1)
    for one, other in ((net, wrapped), (wrapped, net)):
        uq = calibrate(one, (x, y), method=latedrop.Sampling(rates=[0.1, 0.3], draws=20), progress=False)
        uq.save(path)
        assert_same_up_to_rounding(latedrop.load(path, other).predict(x).variance, uq.predict(x).variance)


def test_wrappers_that_only_call(wrap: Callable[[Net], nn.Module], tmp_path: Path) -> None:
    check(*pair(wrap), tmp_path / "c.json")


@pytest.mark.usefixtures("group")
def test_distributed(tmp_path: Path) -> None:
    check(*pair(nn.parallel.DistributedDataParallel), tmp_path / "c.json")


def test_compiled_code_comes_back() -> None:
    runs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        return lambda *args: (runs.append(1), graph(*args))[1]

    net, x = made(), torch.randn(6, 4)
    model = torch.compile(net, backend=backend)
    with torch.no_grad():
        model(x)
        compiled_runs = len(runs)
        assert compiled_runs > 0
        sites = find_sites(model, x)
        sample(model, x, 0.2, 10, sites=sites)
        assert len(runs) == compiled_runs  # all of this ran without compiled code
        with inject(model, sites, 0.2):
            model(x)
        with pytest.raises(RuntimeError, match="stop"), inject(model, sites, 0.2):
            raise RuntimeError("stop")
        assert len(runs) == compiled_runs
        model(x)
        assert len(runs) > compiled_runs


def test_copies_on_several_devices_are_refused() -> None:
    model = nn.DataParallel(made())
    model.device_ids = [0, 1]
    sites = find_sites(model, torch.randn(6, 4))
    with pytest.raises(SiteError, match=r"DataParallel on 2 devices.*inject\(model.module"), inject(model, sites, 0.1):
        pass


def test_a_model_without_its_weights_is_refused(group: None) -> None:
    offload = pytest.importorskip("accelerate").cpu_offload
    with pytest.raises(ArgumentError, match=r"expected weights in memory; found 'head' and 4 others.*Load the whole"):
        find_sites(offload(made(), execution_device=torch.device("cpu")), torch.randn(3, 4))
    sharded = fully_shard(made(), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(SiteError, match="expected a model that can be copied"):
        find_sites(sharded, torch.randn(3, 4))


def test_a_model_that_is_offloaded_after_its_calibration_is_refused() -> None:
    x = torch.randn(70, 4)
    net = made()
    uq = calibrate(net, (x, net(x).detach() + torch.randn(70, 1)), progress=False)
    pytest.importorskip("accelerate").cpu_offload(net, execution_device=torch.device("cpu"))
    with pytest.raises(ArgumentError, match="expected weights in memory"):
        uq.predict(x)
