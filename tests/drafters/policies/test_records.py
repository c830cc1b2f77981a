"""Records hold what was drafted and accepted, for every drafter."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lantern.core.types import Generation
from lantern.drafters.policies import TRAITS
from lantern.drafters.records import Recorder, Records, load_records
from tests.refusals import refused
from tests.tiny_decoder import CONDITION, KEYS, plain_tokens, tiny_decoder


@cache
def recorded(name: str, **options: object) -> tuple[Records, Generation]:
    parts = tiny_decoder(name, **options)  # type: ignore[arg-type]
    recorder = Recorder(method=name, target="digest")
    recorder.watch(parts.drafter)
    made = parts.generate(CONDITION, keys=KEYS, callback=recorder)
    return recorder.records(), made


@pytest.mark.parametrize("name", ["eagle1", "eagle2", "c2t", "gumbel-jacobi"])
def test_records_add_up_to_the_statistics_of_the_generation(name: str) -> None:
    records, made = recorded(name)
    assert len(records) == int((made.steps - 1).sum())
    for depth in range(1, made.accepted.shape[1] + 1):
        of_depth = records.depths == depth
        parents = {(s, int(records.parents[s, n])) for s, n in (records.is_tested & of_depth).nonzero().tolist()}
        assert int((records.is_taken & of_depth).sum()) == int(made.accepted[:, depth - 1].sum())
        assert len(parents) == int(made.reached[:, depth - 1].sum())
    assert sorted(set(records.picture.tolist())) == [0, 1, 2]


def test_recorded_traits_do_not_change_tokens() -> None:
    records, made = recorded("eagle2")
    assert torch.equal(made.tokens, plain_tokens())
    assert records.traits is not None and records.traits.shape == (len(records), 16, len(TRAITS))
    assert records.beams is not None and records.beams.shape == (len(records), 5, 8)
    is_node = records.parents >= 0
    assert torch.equal(records.traits[..., TRAITS.index("depth")][is_node], records.depths[is_node].float())
    assert torch.equal(records.traits[..., TRAITS.index("rank")][is_node], records.ranks[is_node].float())
    assert recorded("eagle1")[0].traits is None


def test_saved_records_load_unchanged_and_joined_files_have_consecutive_picture_numbers(tmp_path: Path) -> None:
    wide, narrow = recorded("eagle2")[0], recorded("eagle2", nodes=7, width=4, depth=3)[0]
    for name, records in (("a", wide), ("b", narrow)):
        records.save(tmp_path / f"{name}.safetensors")
    read = Records.load(tmp_path / "a.safetensors")
    for name in ("parents", "depths", "ranks", "is_tested", "is_taken", "start", "length", "picture"):
        assert torch.equal(getattr(read, name), getattr(wide, name))
    assert read.traits is not None and wide.traits is not None
    assert torch.equal(read.traits, wide.traits.half().float()) and wide.about.items() <= read.about.items()
    both = load_records([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert len(both) == len(wide) + len(narrow) and sorted(set(both.picture.tolist())) == list(range(6))
    assert both.parents.shape[1] == 16 and (both.parents[len(wide) :, 8:] == -1).all()
    assert int(both.is_taken.sum()) == int(wide.is_taken.sum() + narrow.is_taken.sum())
    assert both.beams is not None and both.beams.shape[1:] == (5, 8)


def test_other_files_records_of_two_targets_and_none_raise(tmp_path: Path) -> None:
    records, _ = recorded("eagle2")
    records.save(tmp_path / "a.safetensors")
    replace(records, about={"target": "another"}).save(tmp_path / "b.safetensors")
    assert "of 2 different targets" in refused(load_records, [tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    (tmp_path / "x.safetensors").write_bytes(b"no")
    assert "is not a file of records" in refused(Records.load, tmp_path / "x.safetensors")
    save_file({"parents": torch.zeros(1)}, tmp_path / "y.safetensors")
    assert "has no records of version 1" in refused(Records.load, tmp_path / "y.safetensors")
    for about, message in (("[1]", "has no records of version 1"), ("[" * 100_000, "is not a file of records")):
        save_file({"parents": torch.zeros(1)}, tmp_path / "y.safetensors", {"lantern": about})
        refused(Records.load, tmp_path / "y.safetensors", match=message)
    for start in (records.start[:1], records.start[0]):
        replace(records, start=start).save(tmp_path / "y.safetensors")
        refused(Records.load, tmp_path / "y.safetensors", match="has no records of version 1")
    replace(records, **{name: x[:0] for name, x in vars(records).items() if name != "about"}).save(
        tmp_path / "z.safetensors"
    )
    refused(load_records, [tmp_path / "z.safetensors"] * 2, match="has no records of version 1")
    refused(Records.load, tmp_path, match="is not a file of records")
    assert "nothing was drafted" in refused(Recorder().records)
