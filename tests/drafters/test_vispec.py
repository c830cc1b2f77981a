"""ViSpec: drafts in the compressed context match training, and the context has the reported length."""

from dataclasses import replace

import torch

from lantern.drafters.eagle.eagle1 import Eagle, EagleConfig
from lantern.drafters.eagle.vispec import ViSpec, ViSpecConfig
from tests.drafters.whole import whole_pictures
from tests.tiny import tiny_target
from tests.tiny_decoder import CONDITION
from tests.tiny_parts import tiny_part

TARGET = tiny_target(block_size=36)


@torch.no_grad()
def test_old_rows_are_seen_only_through_their_tokens() -> None:
    module = tiny_part("vispec", TARGET, recent=1)
    tokens = torch.randint(0, 24, (3, 36), generator=torch.Generator().manual_seed(0))
    given = whole_pictures(TARGET, CONDITION, tokens)
    # Two pairs of row 0 are swapped: a row's token is a sum, which does not depend on their order.
    swapped = list(range(36))
    swapped[1], swapped[2] = 2, 1
    other = replace(given, tokens=tokens[:, swapped], rows=given.rows[:, :, swapped])
    old, new = (module.training_predictions(e, 1)[0].features for e in (given, other))
    assert old is not None and new is not None
    differs = (old - new).abs().amax((0, 2)) > 1e-4
    assert differs[2:12].any()  # rows 0 and 1 see the pairs of row 0
    assert not differs[12:].any()  # rows from 2 on do not


@torch.no_grad()
def test_untrained_module_equals_eagle_without_compression() -> None:
    module = ViSpec(ViSpecConfig.for_target(TARGET.config, summaries=0, recent=6))
    module.init_for(TARGET, torch.Generator().manual_seed(0))
    plain = Eagle(EagleConfig.for_target(TARGET.config))
    plain.load_state_dict({name: x for name, x in module.state_dict().items() if name in plain.state_dict()})
    for layer, twin in zip(module.layers, plain.layers, strict=True):
        layer.attention.wo.weight.data.normal_(generator=torch.Generator().manual_seed(1))
        twin.attention.wo.weight.data.copy_(layer.attention.wo.weight)
    tokens = torch.randint(0, 24, (3, 36), generator=torch.Generator().manual_seed(0))
    given = whole_pictures(TARGET, CONDITION, tokens)
    for ours, theirs in zip(module.training_predictions(given, 3), plain.training_predictions(given, 3), strict=True):
        assert ours.features is not None and theirs.features is not None
        torch.testing.assert_close(ours.features, theirs.features, atol=1e-4, rtol=1e-4)
