"""Text conditioning with a T5 of random weights, and cleaning of captions."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ftfy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lantern.models.llamagen import text as text_module
from lantern.models.llamagen.text import TextEncoder, _repaired, clean_caption, without_markup
from tests.refusals import refused
from tests.tiny_folder import WORDS, tiny_text_encoder


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return tiny_text_encoder()


def test_valid_embeddings_equal_a_right_padded_run(encoder: TextEncoder) -> None:
    prompts = ["a red apple", "two cat and a dog", "blue"]
    batch = encoder.tokenizer(prompts, max_length=12, padding="max_length", return_tensors="pt")
    want = encoder.model(**{k: batch[k] for k in ("input_ids", "attention_mask")}).last_hidden_state
    got, mask = encoder.encode(prompts, slots=12)
    for row, n in enumerate(batch["attention_mask"].sum(1).tolist()):
        torch.testing.assert_close(got[row, 12 - n :], want[row, :n], atol=1e-6, rtol=1e-5)
        assert mask[row].tolist() == [False] * (12 - n) + [True] * n
        assert got[row, : 12 - n].eq(0).all()


def test_embedding_does_not_depend_on_the_batch_and_on_batched_passes_to_rounding_only(encoder: TextEncoder) -> None:
    prompts = ["a dog and a cat", "red cat", "apple"]
    together = encoder.encode(prompts, slots=8)[0]
    assert torch.equal(encoder.encode(prompts[1:2], slots=8)[0][0], together[1])
    batched = encoder.encode(prompts, slots=8, batch_size=3)[0]
    torch.testing.assert_close(batched, together, atol=1e-6, rtol=1e-5)


def test_long_and_unusual_prompts_are_encoded(encoder: TextEncoder) -> None:
    got, mask = encoder.encode(["red " * 2000], slots=6)
    want, _ = encoder.encode(["red red red red red"], slots=6)
    assert mask.all() and torch.equal(got, want)
    assert encoder.encode(["red & apple"], slots=8)[1].sum() == 3
    assert encoder.encode(["red \ud83d cat"], slots=8)[0].isfinite().all()  # a lone surrogate
    assert "wanted a list" in refused(encoder.encode, "red apple")


@pytest.mark.parametrize("prompt", ["", "   ", "...", "png", "一只猫"])
def test_prompt_without_content_is_refused(encoder: TextEncoder, prompt: str) -> None:
    refused(encoder.encode, [prompt], match="empty")


@pytest.mark.parametrize("layout", ["one folder", "two folders", "named", "parent"])
def test_saved_encoder_loads_to_the_same_embeddings(encoder: TextEncoder, tmp_path: Path, layout: str) -> None:
    weights, words = tmp_path / "text_encoder", tmp_path / "tokenizer"
    encoder.save_pretrained(weights, None if layout == "one folder" else words)
    if layout == "parent":
        loaded = TextEncoder.from_pretrained(tmp_path)
    else:
        loaded = TextEncoder.from_pretrained(weights, words if layout == "named" else None)
    before, after = (e.encode(["a red apple"], slots=6) for e in (encoder, loaded))
    assert torch.equal(before[0], after[0])


def test_encoder_of_a_whole_t5_loads(encoder: TextEncoder, tmp_path: Path) -> None:
    from transformers import T5ForConditionalGeneration

    whole = T5ForConditionalGeneration(encoder.model.config)
    whole.save_pretrained(tmp_path)
    encoder.tokenizer.save_pretrained(tmp_path)
    loaded = TextEncoder.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.get_input_embeddings().weight, whole.shared.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("projection", ["gated-gelu", "relu"])
def test_own_encoder_equals_transformers(
    encoder: TextEncoder, tmp_path: Path, projection: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import T5Config, T5EncoderModel

    sizes: dict[str, Any] = {"vocab_size": len(WORDS), "d_model": 24, "d_kv": 8, "d_ff": 32}
    sizes |= {"num_layers": 3, "num_heads": 2}
    model = T5EncoderModel(T5Config(**sizes, feed_forward_proj=projection))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(generator=torch.Generator().manual_seed(weight.numel())).mul_(0.3)
    TextEncoder(model, encoder.tokenizer).save_pretrained(tmp_path)
    ours, theirs = TextEncoder.load(tmp_path, dtype=dtype), TextEncoder.from_pretrained(tmp_path, dtype=dtype)
    assert type(ours.model).__module__ == "lantern.models.llamagen.t5" and ours.width == theirs.width == 24
    prompts = ["a red apple", "two cat and a zebra </s> <pad> dog", "blue " * 300, "a" * 500]
    wide = {slots: ours.encode(prompts, slots=slots)[0] for slots in (4, 40, 150)}
    assert all(torch.equal(theirs.encode(prompts, slots=slots)[0], found) for slots, found in wide.items())
    monkeypatch.setattr(text_module, "WIDE", 0)
    for slots, batch in ((4, 1), (40, 1), (150, 3)):
        got, want = (one.encode(prompts, slots=slots, batch_size=batch) for one in (ours, theirs))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        # in fp64, which transformers computes but for the mean of a norm
        expected = TextEncoder(theirs.model.double(), theirs.tokenizer).encode(prompts, slots=slots)[0]
        theirs.model.to(dtype)
        torch.testing.assert_close(wide[slots], expected.float(), rtol=1e-6, atol=1e-6)
    assert [ours.knows(text) for text in ("zebra", "dog")] == [theirs.knows(text) for text in ("zebra", "dog")]


def test_hooks_and_adapters_of_an_encoder_take_effect(encoder: TextEncoder, tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    encoder.save_pretrained(tmp_path)
    ours, seen = TextEncoder.load(tmp_path, dtype=torch.float32), list[torch.dtype]()
    expected = ours.encode(["a red apple"], slots=8)[0]
    dense = ours.model.encoder.block[0]["layer"][1]["DenseReluDense"]
    inner = dense.wo.forward
    dense.wo.forward = lambda x: seen.append(x.dtype) or inner(x)
    torch.testing.assert_close(ours.encode(["a red apple"], slots=8)[0], expected, rtol=1e-5, atol=1e-5)
    del dense.wo.forward
    assert seen == [torch.float32]
    dense.wo.__class__ = Scaled
    assert not torch.allclose(ours.encode(["a red apple"], slots=8)[0], expected, rtol=1e-3)
    dense.wo.scale = 1.0
    torch.testing.assert_close(ours.encode(["a red apple"], slots=8)[0], expected, rtol=1e-5, atol=1e-5)
    dense.wo.__class__ = nn.Linear
    weight_norm(dense.wo)  # whose weight has another name
    torch.testing.assert_close(ours.encode(["a red apple"], slots=8)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("load", [TextEncoder.load, TextEncoder.from_pretrained])
def test_threads_share_a_tokenizer(encoder: TextEncoder, tmp_path: Path, load: Any) -> None:
    encoder.save_pretrained(tmp_path)
    shared = load(tmp_path, dtype=torch.float32)

    def is_right(number: int) -> bool:
        if number % 2:
            return shared.unread("red " * 8, 3) == 6
        words = number % 9 + 1
        return int(shared.encode(["red " * words], slots=6)[1].sum()) == min(words + 1, 6)  # with the end

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(is_right, range(1000)))
    finally:
        sys.setswitchinterval(before)


def test_encoders_that_only_transformers_reads_are_loaded_by_it(encoder: TextEncoder, tmp_path: Path) -> None:
    encoder.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": {}}))
    assert type(TextEncoder.load(tmp_path, dtype=torch.float32).model).__module__.startswith("transformers.")
    assert type(TextEncoder.load(tmp_path, dtype=torch.float16).model).__module__.startswith("transformers.")


def test_missing_files_and_other_kinds_are_refused_by_name(encoder: TextEncoder, tmp_path: Path) -> None:
    encoder.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (tmp_path / name).unlink()
        refused(TextEncoder.from_pretrained, tmp_path, match=f"{name} is missing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert "bert" in refused(TextEncoder.from_pretrained, tmp_path)


TABLE = json.loads((Path(__file__).parents[1] / "data" / "captions_clean.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("caption", "cleaned"), TABLE, ids=range(len(TABLE)))
def test_cleaning_agrees_with_the_reference(caption: str, cleaned: str) -> None:
    assert clean_caption(caption) == cleaned


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(), max_size=60))
def test_any_text_is_cleaned_to_a_stripped_text(text: str) -> None:
    cleaned = clean_caption(text)
    assert cleaned == cleaned.strip()


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60))
def test_printable_ascii_needs_no_repair(text: str) -> None:
    assert _repaired(text) == ftfy.fix_text(text)


@pytest.mark.parametrize(
    "unit", ["a", "a.", "-", "<", '"', "\ud800\x00x", "&", " ", "1", "1.", "<![", "%ff", "猫", "x.png"]
)
def test_ten_thousand_characters_are_cleaned(unit: str) -> None:
    assert len(clean_caption(unit * (10_000 // len(unit)))) <= 20_000


def test_plain_ascii_needs_no_ftfy_and_markup_leaves_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_markup("a <b>red</b> &lt;cat<!-- x --><script>y</script>&xb;") == "a red <cat&xb"
    assert "cat" in without_markup("cat <![x dog")
    monkeypatch.setitem(sys.modules, "ftfy", None)
    assert clean_caption("A red apple, on a table!") == "a red apple, on a table!"
    assert "ftfy" in refused(clean_caption, "a café", error=ImportError)
