"""On GPUs too, every layout trains the same parameters: NCCL ranks, one GPU each, as many as there are up to four."""

import itertools

import check_layouts
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_every_layout_trains_the_same_parameters_on_gpus(tmp_path):
    """In float32 to 1e-5, exactly between ranks and for the same layout again; bfloat16 agrees between ranks."""
    num_ranks = min(4, torch.cuda.device_count())
    wanted, handed = check_layouts.layouts(num_ranks), check_layouts.handovers(num_ranks)

    trained, resumed = check_layouts.train_all([*wanted, wanted[0]], handed, tmp_path, device="cuda")

    for layout, of_ranks in zip([*wanted, *handed], [*trained[: len(wanted)], *resumed], strict=True):
        tables = [one.table for one in (layout if isinstance(layout, tuple) else (layout,))]
        if not any("bfloat16" in (one.precision, one.optimizer_dtype, one.parameter_dtype) for one in tables):
            assert check_layouts.difference(of_ranks[0], trained[0][0]) <= check_layouts.BOUND, layout
        assert all(check_layouts.same_bits(one, other) for one, other in itertools.pairwise(of_ranks)), layout
    assert check_layouts.same_bits(trained[-1][0], trained[0][0])
