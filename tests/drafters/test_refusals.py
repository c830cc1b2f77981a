"""Configs and settings of drafters that cannot be are refused in one line."""

from typing import Any

import pytest

from lantern.drafters.eagle.drafter import Growth
from lantern.drafters.eagle.networks import Eagle3Config, EagleConfig, PossConfig
from lantern.drafters.eagle.vispec import ViSpecConfig
from lantern.drafters.heads import MedusaConfig, ParallelSpecConfig, VerticalConfig
from lantern.drafters.policies import AdtTree, C2TConfig, Ddd, Svip
from tests.refusals import refused
from tests.tiny import tiny_eagle, tiny_target
from tests.tiny_decoder import TARGET, tiny_decoder
from tests.tiny_parts import tiny_part, tiny_sam, tiny_table

OTHER, ROWS = tiny_target(vocab_size=30), {"form": "rows"}
NO_TREES = {"nodes": 0, "width": 0, "depth": 13, "spread": 0.0}


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (EagleConfig, {"form": "both"}, "form is"),
        (EagleConfig, {"has_input_norm": True}, "has_input_norm"),
        (EagleConfig, {"cls_token_num": 5}, "cls_token_num is 5"),
        (EagleConfig, {"n_head": 3}, "head size"),
        (Eagle3Config, ROWS, 'wanted "guided"'),
        (Eagle3Config, {"fused": ()}, "fused is"),
        (MedusaConfig, {"depths": 0}, "depths is 0"),
        (PossConfig, {"per_layer": 0}, "per_layer 0"),
        (PossConfig, {"layers": 2}, "wanted 1"),
        *((ParallelSpecConfig, wrong, "wanted") for wrong in ({"depths": 0}, {"depths": 65}, {"anchors": 0}, ROWS)),
        *((VerticalConfig, wrong, "wanted") for wrong in ({"depths": 0}, {"block_size": 15})),
        *((ViSpecConfig, wrong, "wanted") for wrong in ({"recent": 0}, {"summaries": -1}, {"layers": 2}, ROWS)),
        (AdtTree, {"end": 0.0}, "end is 0"),
        (C2TConfig, {"traits": ("colour",)}, "trait 'colour' is unknown"),
        (Ddd, {"alive": 1.0}, "wanted a share between 0 and 1"),
        *((Growth, {name: size}, "wanted at least one node") for name, size in NO_TREES.items()),
        (Svip, {"threshold": 0.0}, "wanted both above 0"),
    ],
)
def test_invalid_configs_raise(config: Any, fields: dict[str, Any], message: str) -> None:
    make = getattr(config, "for_target", None)
    refused(*((config,) if make is None else (make, TARGET.config)), **fields, match=message)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("fr-spec", {"vocabulary": 2, "tree": "narrow_10"}, "vocabulary has 2 tokens, wanted at least 3 for this tree"),
        ("fr-spec", {"add_ons": {"fr-spec": tiny_table(OTHER)}}, "is of 30 tokens, the model has 24"),
        ("sam", {"add_ons": {"sam": tiny_sam(OTHER)}}, r"tables are of \(vocab_size, block_size\) \(30, 16\)"),
        ("eagle1", {"module": tiny_eagle(tiny_target(dim=48))}, "use a drafter trained for it"),
        ("eagle1", {"tree": "grown_99_1", "target": tiny_target(vocab_size=5)}, "children at a node, wanted at most"),
        ("medusa", {"add_ons": {"medusa": tiny_part("medusa", tiny_target(block_size=4))}}, "trained for it"),
        ("medusa", {"add_ons": {"medusa": tiny_part("medusa", TARGET, depths=1)}}, "guesses 1 tokens"),
        ("sam", {"reach": 1}, "reach 1"),
        ("sjd-pac", {"width": 25}, "25 wide"),
        ("sjd-pac", {"width": 3, "levels": 7}, "at most 999 of its nodes at one depth"),  # 3^7 is more
        ("eagle2", {"nodes": 1000}, "wanted a whole number from 1 to 999"),
        ("specmquant", {"width": 10**9}, "width is 1000000000, wanted at most 24"),  # before such a tree is made
        ("vertical", {"share": 1.5}, "wanted a number from 0 to 1"),
    ],
)
def test_invalid_settings_raise(method: str, settings: dict[str, Any], message: str) -> None:
    refused(tiny_decoder, method, **settings, match=message)
