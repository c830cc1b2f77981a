"""The model card of a folder on the hub: README.md with its YAML header."""

from collections.abc import Sequence

from lantern.methods import METHODS, PROMISES
from lantern.models.folder import Model

HEADING = {
    "transformer": "the autoregressive model over tokens",
    "vqvae": "pixels from tokens",
    "text_encoder": "prompts to embeddings",
    "tokenizer": "the text encoder's tokenizer",
    "drafter": "proposes tokens, for the methods that use EAGLE-1",
}


def model_card(
    model: Model, repository: str, *, parts: Sequence[str], method: str, license: str, base_model: str | None
) -> str:
    """Return the text of README.md for a model whose components ran: its use, its method, what was checked.

    `parts` are the folders of the repository, `method` the default one. `license` and `base_model` are identifiers of
    the hub; `base_model` is the model whose weights these are made from.
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
    subject = ('"a red apple"', '--prompt "a red apple"') if prompted else ("class_labels=0", "--class-label 0")
    methods = (
        "The default method is `auto`, the one that `lantern tune` found fastest on the machine; where nothing was"
        " measured, one that gives the tokens of plain decoding."
        if method == "auto"
        else f"The default method is `{method}`: {METHODS[method].summary}. It gives"
        f" {PROMISES[METHODS[method].promise]}."
    )
    parameters = sum(weight.numel() for weight in model.target.parameters())
    rows, columns = config.raster.rows, config.raster.columns
    defaults = [f"| {key} | {value} |" for key, value in model.generation.items()]
    lines = [
        f"# {repository.split('/')[-1]}",
        "",
        f"An autoregressive image model of {parameters / 1e6:,.4g} million parameters. An image is {rows} rows of"
        f" {columns} tokens out of {config.vocab_size:,}, made from {'a prompt' if prompted else 'a class label'}.",
        "",
        "## How to use",
        "",
        "```python",
        "from lantern import LanternPipeline",
        "",
        f'pipe = LanternPipeline.from_pretrained("{repository}")',
        f'pipe({subject[0]}).images[0].save("image.png")',
        "```",
        "",
        f"On a command line: `lantern-generate --model {repository} {subject[1]}`. With lantern installed,"
        f' `DiffusionPipeline.from_pretrained("{repository}", trust_remote_code=True)` loads the same pipeline.',
        "",
        "## Method",
        "",
        "Tokens are decoded speculatively: a drafter or a window proposes tokens, one pass of the model scores them,"
        " and a verifier keeps those that its rule accepts.",
        methods,
        "",
        *(["| default of a call | value |", "|---|---|", *defaults, ""] if defaults else []),
        "| folder | contents |",
        "|---|---|",
        *(f"| {part} | {HEADING.get(part, 'an add-on: a drafter, a policy or a table')} |" for part in parts),
        "",
        "## What was checked",
        "",
        "- Names, shapes and dtypes of all tensors are those of their classes, and one token went through transformer,"
        " VQ tokenizer and drafter, on the meta device (without values).",
        "- The sizes of the components fit each other.",
        "- `SHA256SUMS` beside weights lists their checksums, which are verified when they are loaded.",
        "- The quality of the images was not measured when this card was written.",
        "",
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines)
