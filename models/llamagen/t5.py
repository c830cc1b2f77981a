"""A T5 encoder and its tokenizer without transformers, whose import takes longer than a small model's first image.

The encoder reads the tensors that transformers names, and gives the same bits as its `T5EncoderModel`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lantern.core.config import one_line, read_json_object
from lantern.core.io import NoInitialisation, check_state, load_tensors
from lantern.core.weights import left_out, weights_kind

PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # others change what tokenizer.json says
PROJECTIONS = ("gated-gelu", "relu")


@dataclass(frozen=True)
class T5Config:
    """The sizes of an encoder; names are those of transformers."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    feed_forward_proj: str = "relu"
    layer_norm_epsilon: float = 1e-6
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128


class Norm(nn.Module):
    """Root mean square normalisation, its mean at least in fp32."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(config.d_model)), config.layer_norm_epsilon

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        """Normalise."""
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * (x * scale).to(self.weight.dtype)


class T5Attention(nn.Module):
    """Attention over valid tokens with a bias of relative places, which the first layer holds for all."""

    def __init__(self, config: T5Config, has_bias: bool) -> None:
        super().__init__()
        width = config.num_heads * config.d_kv
        self.q, self.k, self.v = (nn.Linear(config.d_model, width, bias=False) for _ in range(3))
        self.o, self.heads = nn.Linear(width, config.d_model, bias=False), config.num_heads
        if has_bias:
            buckets = config.relative_attention_num_buckets
            self.relative_attention_bias = nn.Embedding(buckets, config.num_heads)

    def forward(self, x: Float[Tensor, "b t c"], bias: Float[Tensor, "b h t t"]) -> Float[Tensor, "b t c"]:
        """Attend; scores are not scaled."""
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0).transpose(1, 2).flatten(2))


class T5FeedForward(nn.Module):
    """Two layers, the first with ReLU or gated by GELU."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.is_gated = config.feed_forward_proj == "gated-gelu"
        if self.is_gated:
            self.wi_0, self.wi_1 = (nn.Linear(config.d_model, config.d_ff, bias=False) for _ in range(2))
        else:
            self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        """Compute; GELU by its tanh form, in the order of operations that models were trained with."""
        if not self.is_gated:
            return self.wo(self.wi(x).relu())
        gate = self.wi_0(x)
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))
        return self.wo(0.5 * gate * (1.0 + torch.tanh(inner)) * self.wi_1(x))


class T5(nn.Module):
    """The encoder; `encoder.block.N.layer.M` are its layers, as in files of transformers."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder: Any = nn.Module()
        blocks = []
        for number in range(config.num_layers):
            parts = {"SelfAttention": T5Attention(config, number == 0), "DenseReluDense": T5FeedForward(config)}
            layers = [nn.ModuleDict({name: part, "layer_norm": Norm(config)}) for name, part in parts.items()]
            blocks.append(nn.ModuleDict({"layer": nn.ModuleList(layers)}))
        self.encoder.block, self.encoder.final_layer_norm = nn.ModuleList(blocks), Norm(config)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.shared.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.shared.weight.dtype

    def forward(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
        """Return the encoding of right-padded tokens."""
        x, mask = self.shared(input_ids), attention_mask.bool()[:, None, None]
        bias = self._bias(input_ids.shape[1])
        bias = torch.where(mask, bias, torch.finfo(bias.dtype).min).contiguous()
        for block in self.encoder.block:
            attention, dense = block["layer"]
            x = x + attention["SelfAttention"](attention["layer_norm"](x), bias)
            x = x + dense["DenseReluDense"](dense["layer_norm"](x))
        return self.encoder.final_layer_norm(x)

    def _bias(self, count: int) -> Float[Tensor, "1 h t t"]:
        """Return the bias of scores: half of the buckets are for keys behind the query, the far ones logarithmic."""
        place = torch.arange(count, device=self.device)
        apart = place[None, :] - place[:, None]
        half = self.config.relative_attention_num_buckets // 2
        near = half // 2
        reach = math.log(self.config.relative_attention_max_distance / near)
        far = near + (torch.log(apart.abs().float() / near) / reach * (half - near)).long()
        bucket = torch.where(apart.abs() < near, apart.abs(), far.clamp(max=half - 1)) + (apart > 0) * half
        table = self.encoder.block[0]["layer"][0]["SelfAttention"].relative_attention_bias
        return table(bucket).permute(2, 0, 1)[None]


def widened(model: Any) -> T5 | None:
    """Return a copy in fp64 of an encoder of this kind, ours or of transformers; None for others, and for one with
    hooks or with quantized, parametrized or other layers.
    """
    # by name, since transformers is not imported for an encoder that needs none of it
    if type(model).__name__ not in ("T5", "T5EncoderModel") or left_out(model) or weights_kind(model) != "full":
        return None
    config = vars(model.config)
    if config["feed_forward_proj"] not in PROJECTIONS:
        return None
    with NoInitialisation():
        own = T5(T5Config(**{name: config[name] for name in T5Config.__dataclass_fields__})).double()
    found = own.load_state_dict(model.state_dict(), strict=False)  # transformers names the embeddings twice
    return None if found.missing_keys else own


class Words:
    """A `tokenizer.json` with the calls of a tokenizer of transformers that a text encoder makes.

    Calls change nothing of the tokenizer, so that several threads may make them.
    """

    padding_side = "right"

    def __init__(self, file: Path, *, pad: str, unknown: str | None) -> None:
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_file(str(file))
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self.pad, self.pad_id = pad, self.backend_tokenizer.token_to_id(pad)
        self.unk_token_id = None if unknown is None else self.backend_tokenizer.token_to_id(unknown)

    def get_vocab(self) -> dict[str, int]:
        """Return the number of each token."""
        return self.backend_tokenizer.get_vocab()

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True, max_length: int = 0, **how: Any
    ) -> dict[str, Any]:
        """Return `input_ids` of a text, or tensors `input_ids` and `attention_mask` of texts in `max_length` slots."""
        tokenizer = self.backend_tokenizer
        if isinstance(text, str):
            return {"input_ids": tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}
        left = max_length - add_special_tokens * tokenizer.num_special_tokens_to_add(False)
        found = tokenizer.encode_batch(text, add_special_tokens=False)
        for one in found:
            one.truncate(left)
        found = [tokenizer.post_process(one, None, add_special_tokens) for one in found]
        for one in found:
            one.pad(max_length, pad_id=self.pad_id, pad_token=self.pad)
        named = {"input_ids": [one.ids for one in found], "attention_mask": [one.attention_mask for one in found]}
        return {name: torch.tensor(rows) for name, rows in named.items()}


def load(weights: Path, words: Path, *, dtype: torch.dtype) -> tuple[T5, Words] | None:
    """Load an encoder and its tokenizer; None for files that only transformers reads.

    ValueError names the file of what is damaged.
    """
    file, config = weights / "model.safetensors", read_json_object(weights / "config.json")
    if not (file.is_file() and (words / "tokenizer.json").is_file() and (words / "tokenizer_config.json").is_file()):
        return None
    told = read_json_object(words / "tokenizer_config.json")
    pad, unknown = told.get("pad_token"), told.get("unk_token")
    is_plain = told.get("tokenizer_class") in PLAIN_TOKENIZERS
    is_plain = is_plain and isinstance(unknown, str | None) and told.get("added_tokens_decoder") is None
    fields = {name: config[name] for name in T5Config.__dataclass_fields__ if name in config}
    is_known = config.get("model_type") in ("t5", "mt5") and config.get("feed_forward_proj", "relu") in PROJECTIONS
    is_known = is_known and dtype != torch.float16  # where transformers clamps, and keeps layers in fp32
    if not (isinstance(pad, str) and is_plain and is_known):
        return None
    try:
        with NoInitialisation():
            model = T5(T5Config(**fields))
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise ValueError(f"{weights / 'config.json'}: {one_line(error)}") from error
    expected = model.state_dict()
    state = load_tensors(file, expected)
    if "shared.weight" not in state:
        return None
    check_state(state, expected, source=file)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, assign=True)
    with reading_words(words / "tokenizer.json"):
        tokenizer = Words(words / "tokenizer.json", pad=pad, unknown=unknown)
        if tokenizer.pad_id is None:
            return None
        tokenizer(["a"], max_length=2)
    return model, tokenizer


@contextmanager
def reading_words(file: Path) -> Iterator[None]:
    """Raise errors of a tokenizer, panics of its Rust code too, as ValueError with its file."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{file} holds no tokenizer that loads: {one_line(error)}") from error
