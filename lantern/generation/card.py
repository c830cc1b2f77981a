"""The model card of a folder on the hub: README.md with its YAML header."""

from lantern.methods import PROMISES, find
from lantern.models.folder import Model


def model_card(model: Model, repository: str, *, method: str, license: str, base_model: str | None) -> str:
    """Return the text of README.md for a model whose components ran: its use, its method, what was checked.

    `method` is the default one. `license` and `base_model` are identifiers of the hub; `base_model` is the model whose
    weights these are made from.
    """
    from huggingface_hub import ModelCardData

    prompted, config = model.takes_prompts, model.target.config
    data = ModelCardData(
        license=license,
        library_name="diffusers",
        pipeline_tag="text-to-image" if prompted else "unconditional-image-generation",
        tags=["lantern", "llamagen", "autoregressive", "speculative-decoding", "diffusers:LanternPipeline"],
        base_model=base_model,
    )
    python, shell = ('"a red apple"', '--prompt "a red apple"') if prompted else ("class_labels=0", "--class-label 0")
    found = find(method)
    promise = f" It gives {PROMISES[found.promise]}." if method != "auto" else ""
    parameters = sum(weight.numel() for weight in model.target.parameters())
    return f"""---
{data.to_yaml()}
---

# {repository.split("/")[-1]}

An autoregressive image model of {parameters / 1e6:,.4g} million parameters. An image is {config.raster.rows} rows of
{config.raster.columns} tokens out of {config.vocab_size:,}, made from {"a prompt" if prompted else "a class label"}.

## How to use

```python
from lantern import LanternPipeline

pipe = LanternPipeline.from_pretrained("{repository}")
pipe({python}).images[0].save("image.png")
```

On a command line: `lantern-generate --model {repository} {shell}`. With lantern installed,
`DiffusionPipeline.from_pretrained("{repository}", trust_remote_code=True)` loads the same pipeline.

## Method

Tokens are decoded speculatively, by default with `{method}`: {found.summary}.{promise}

## What was checked

- All components were loaded and run over one token on the meta device (without values), and their sizes fit.
- `SHA256SUMS` beside weights lists their checksums, which are verified when they are loaded.
- The quality of the images was not measured when this card was written.
"""
