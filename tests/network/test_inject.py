import torch

from latedrop import find_sites, inject
from rounding import assert_same_up_to_rounding
from zoo import mlp


def test_each_pass_is_the_next_draw_unless_fixed() -> None:
    model, x = mlp(), torch.randn(4, 5)
    sites = find_sites(model, x)
    with torch.no_grad():
        with inject(model, sites, 0.3) as injection:
            first, second = model(x), model(x)
            injection.draw = 0
            again = model(x)
        with inject(model, sites, 0.3, draw=1):
            fixed = [model(x[:2]), model(x[2:])]
    assert not torch.equal(first, second)
    assert torch.equal(first, again)  # the same call on the same batch
    assert_same_up_to_rounding(torch.cat(fixed), second)


def test_gradients_flow_where_the_caller_wants_them() -> None:
    model, x = mlp(), torch.randn(4, 5)
    with inject(model, find_sites(model, x), 0.3):
        model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
