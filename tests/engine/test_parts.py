"""Parts of DTensors in an optimizer: updated as the whole is, with the gradient that it has, and refused otherwise."""

from __future__ import annotations

import pytest

from engine.spec import Spec

WEIGHT = [[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0]]  # on two ranks: two rows, and one


@pytest.fixture
def lay():
    """Numbers and how they lie on two ranks -> a DTensor, as the first has it."""
    torch = pytest.importorskip("torch")
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    yield lambda numbers, placement: distribute_tensor(torch.tensor(numbers), mesh, [placement], src_data_rank=None)
    dist.destroy_process_group()
    _clear_sharding_prop_cache()


@pytest.fixture
def whole(lay):
    import torch
    from torch.distributed.tensor import Shard

    weight = torch.nn.Parameter(lay(WEIGHT, Shard(0)))
    weight.grad = lay([[x * x for x in row] for row in WEIGHT], Shard(0))
    return weight


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_part_is_updated_as_the_whole_would_be(name, whole):
    import torch

    from engine.real.models import optimizer_of
    from engine.real.parts import on_parts, updated, whole_state

    kind, settings = optimizer_of(Spec(optimizer=name, lr=0.1))
    alone = torch.nn.Parameter(torch.tensor(WEIGHT))
    alone.grad = alone.detach().square()
    mine, reference = on_parts(kind, [whole], **settings), kind([alone], **settings)
    for _ in range(2):
        mine.step()
        reference.step()
    assert torch.equal(whole.to_local(), alone[:2])
    part = updated(mine)[whole]
    for key, value in reference.state[alone].items():
        kept = whole_state(part, mine.state[part][key])
        assert kept.shape == value.shape
        assert torch.equal(kept.to_local() if kept.dim() else kept, value[:2] if value.dim() else value)
    mine.zero_grad()
    assert whole.grad is None


def test_a_gradient_that_lies_otherwise_and_a_parameter_that_has_moved_are_refused(whole, lay):
    """The negative controls: such a part would be updated with another one's gradient, or the whole would not be."""
    import torch
    from torch.distributed.tensor import Replicate

    from engine.real.parts import on_parts

    optimizer = on_parts(torch.optim.SGD, [whole], lr=0.1)
    right, whole.grad = whole.grad, lay(WEIGHT, Replicate())
    with pytest.raises(RuntimeError, match="lies as"):
        optimizer.step()
    whole.grad, whole._local_tensor = right, whole._local_tensor.clone()
    with pytest.raises(RuntimeError, match="other memory"):
        optimizer.step()


def test_gradients_are_clipped_through_their_parts(whole, tmp_path):
    """DTensor is asked for norms alone: to find out how all products of a model lie took it a second."""
    from types import SimpleNamespace

    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from engine.real.clip import clip
    from engine.real.recorder import Recorder

    class Asked(TorchDispatchMode):
        names: frozenset[str] = frozenset()

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if DTensor in types:
                self.names |= {op._schema.name}
                return NotImplemented
            return op(*args, **(kwargs or {}))

    before = whole.grad.to_local().clone()
    training = SimpleNamespace(held=lambda: {"weight": whole})
    with Asked() as asked:
        norm = clip(training, Recorder(tmp_path / "spans", 0, 0, enabled=False), 0.5)
    assert "aten::linalg_vector_norm" in asked.names and not any("mul" in name for name in asked.names)
    assert norm == pytest.approx(torch.linalg.vector_norm(before).item())  # nothing is sent by the group of this test
    assert torch.allclose(whole.grad.to_local(), before * 0.5 / norm)
