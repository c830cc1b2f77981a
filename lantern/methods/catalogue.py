"""All methods and trained networks, a paragraph or a line each. Needs no torch: classes are imported when used.

A method is a function of a model's parts and of options that returns a drafter and a verifier, whose modules explain
them; a preset is another method with other values. docs/methods has the results.
"""

import re
from dataclasses import replace
from functools import partial
from typing import Any

from lantern.core.config import MAX_NEIGHBOURS, MAX_NODES
from lantern.methods.method import DRAFTER, Deferred, Made, Parts, add_on, lazy, method, opt, preset

NETWORKS, EAGLE = "lantern.drafters.eagle.networks", "lantern.drafters.eagle.drafter"
VISPEC, COMBINED = "lantern.drafters.eagle.vispec", "lantern.drafters.combined"
HEADS, LOOKUP, POLICIES = "lantern.drafters.heads", "lantern.drafters.lookup", "lantern.drafters.policies"

EagleDrafter, GrowingDrafter, Growth = lazy(EAGLE, "EagleDrafter", "GrowingDrafter", "Growth")
FrSpecDrafter, GrowingFrSpecDrafter = lazy(EAGLE, "FrSpecDrafter", "GrowingFrSpecDrafter")
ViSpecDrafter, GrowingViSpecDrafter = lazy(VISPEC, "ViSpecDrafter", "GrowingViSpecDrafter")
Eagle2, PredictableEagle2, Ddd, Svip = lazy(POLICIES, "Eagle2", "PredictableEagle2", "Ddd", "Svip")
AdtTree, AdtBisection, C2T, Radar = lazy(POLICIES, "AdtTree", "AdtBisection", "C2TPolicy", "RadarPolicy")
named, chain = lazy("lantern.drafters.trees", "named", "chain")
MedusaDrafter, VerticalDrafter, ParallelDrafter = lazy(HEADS, "MedusaDrafter", "VerticalDrafter", "ParallelDrafter")
JacobiDrafter, SjdPacDrafter = lazy("lantern.drafters.windows", "JacobiDrafter", "SjdPacDrafter")
SamDrafter, Repeat = lazy(LOOKUP, "SamDrafter", "RepeatDrafter")
RouterDrafter, SelfCascadeDrafter, Cascade = lazy(COMBINED, "RouterDrafter", "SelfCascadeDrafter", "CascadeDrafter")
Gumbel = lazy("lantern.verifiers.gumbel", "GumbelVerifier")
Rejection = lazy("lantern.verifiers.rejection", "RejectionVerifier")
Coupling = lazy("lantern.verifiers.coupling", "CouplingVerifier")
Traversal = lazy("lantern.verifiers.traversal", "TraversalVerifier")
Greedy, Relaxed = lazy("lantern.verifiers.relaxed", "GreedyVerifier", "RelaxedVerifier")
Lantern, LanternPP = lazy("lantern.verifiers.relaxations.neighbours", "Lantern", "LanternPP")
Bounded, Mixture, Cool, Vvs = lazy("lantern.verifiers.relaxations.distributions", "Bounded", "Mixture", "Cool", "Vvs")
Grouped, Tolerance, Typical = lazy("lantern.verifiers.relaxations.acceptance", "Grouped", "Tolerance", "Typical")

# the trained networks, and what trains them
HORIZON = {"toy": {"depths": 12}, "limits_depth": True}
CLASSIFIER = {"training": "policy", "toy": {"hidden": 8}, "task": "lantern.training.policy:C2TTask"}
RECURRENT = {"training": "policy", "toy": {"beam": 4, "hidden": 8}, "task": "lantern.training.policy:RadarTask"}
COUNTED = "lantern train tables --kind {} --model MODEL --prompts FILE --out MODEL/parts"
SMALL = (
    "lantern train target --config target-small-draft --data DATA --vq MODEL/vqvae "
    "--text-encoder MODEL/text_encoder --tokenizer MODEL/tokenizer --out OUT"
)
LLAMA = ("lantern.models.llamagen.transformer", "Transformer", "TransformerConfig")

add_on(DRAFTER, NETWORKS, "Eagle", "EagleConfig")
add_on("eagle3", NETWORKS, "Eagle3", "Eagle3Config", toy={"layers": 2})
add_on("poss", NETWORKS, "Poss", "PossConfig", toy={"depths": 4, "per_layer": 2}, limits_depth=True)
add_on("vispec", VISPEC, "ViSpec", "ViSpecConfig", toy={"summaries": 2, "recent": 1})
add_on("medusa", HEADS, "Medusa", "MedusaConfig", **HORIZON)
add_on("parallelspec", HEADS, "ParallelSpec", "ParallelSpecConfig", **HORIZON)
add_on("vertical", HEADS, "Vertical", "VerticalConfig", **HORIZON)
add_on("fr-spec", EAGLE, "FrequencyTable", "FrequencyConfig", training=COUNTED.format("fr-spec"))
add_on("sam", LOOKUP, "SamTables", "SamConfig", training=COUNTED.format("sam"))
add_on("small", *LLAMA, training=SMALL, is_target=True)
add_on("c2t", POLICIES, "C2T", "C2TConfig", **CLASSIFIER)
add_on("c2t-paper", POLICIES, "C2T", "C2TConfig", **CLASSIFIER)
add_on("radar", POLICIES, "Radar", "RadarConfig", **RECURRENT)
add_on("radar-paper", POLICIES, "Radar", "RadarConfig", **RECURRENT)

GROWTH = dict(
    nodes=opt(15, 1, MAX_NODES, "drafted nodes of a tree"),
    width=opt(8, 1, MAX_NODES, "nodes that are extended at each depth"),
    depth=opt(6, 1, 12, "depth of a tree"),
    spread=opt(1.25, 0, None, "standard deviation of the target's scores about the drafter's"),
)
ADAPTIVE = dict(adaptive=opt(True, help="whether the policy chooses the size of the next tree; CUDA graphs need false"))
WINDOWS = dict(
    window=opt(16, 2, 10**6, "tokens scored in one pass; longer windows are cut to the image"),
    init=opt("repeat-left", help="first tokens of the window's new places", choices=("random", "repeat-left")),
)
LEAST = "tokens a step, on average over the first 10 steps, below which the rest of the image is decoded plainly"
MATCH = "how contexts are compared: tokens left and above, or the longest common suffix"
SAM = dict(
    match=opt("grid", help=MATCH, choices=("grid", "super", "tokens")),
    sharp=opt(2.0, 0, None, "exponent of the weight of longer matches"),
    least=opt(2, 1, None, "tokens that must match"),
    reach=opt(8, 1, None, "tokens that are compared at most"),
    smooth=opt(0.2, 0, 1, "probability given to tokens that look like those found"),
)
FLOW = dict(
    k=opt(50, 0, MAX_NEIGHBOURS, "nearest tokens that count as alike; 0 is exact"),
    delta=opt(0.2, 0, 1, "largest total variation per token; 0 is exact", sweep=(0.05, 0.1, 0.2)),
    cap=opt(4.0, 1, 1e6, "largest factor by which a token's probability grows; 1 is exact"),
    rounds=opt(2, 1, 100, "rounds in which mass is moved"),
    width=opt(64, 1, 10**6, "tokens that can receive mass"),
)
GROUPS = dict(
    group=opt(10, 0, 10**6, "tokens of a group beside the draft, an even number; 0 is exact", sweep=(2, 10, 24, 50)),
    p_radius=opt(1.0, 0, 1, "largest difference of probabilities within a group"),
    d_radius=opt(1e6, 0, 1e6, "largest distance of codebook vectors within a group"),
)
DRAFTS = ("eagle1", "parallelspec")
REFUSED = "distribution after a refusal: of the paper, of the authors' code, or COOL-SD's of least total variation"
CLAIMS = dict(
    residual=opt("paper", help=REFUSED, choices=("paper", "released", "cool")),
    shared=opt(False, help="whether the siblings of a node share one delta; as published each has its own"),
    drafts=opt("eagle1", help="whose drafts: a pass of EAGLE-1 a depth, or one of ParallelSpec", choices=DRAFTS),
)
ALIKE = "nearest tokens that count as alike, or their share of the codebook; 0 is exact"
GAIN = "largest factor by which a draft's probability grows; 1 is exact"
CLAIM = "largest probability that a draft claims from others"
SAMPLES = opt(2, 1, 10**6, "samples of the target per token; 1 is exact", sweep=(2, 3))
MEASURED = opt(True, help="measure the total variation in passes over the finished image; else it is NaN")
BESIDE = opt(0.25, 0, 1, "weight of the guesses from the row above")
COPIES = opt("chain_4", help="tree that is drafted from similar contexts")
SKIP = opt(1, 0, 32, "tokens of a step that are not verified; 0 is exact", sweep=(1, 2))
REUSE = opt(0.5, 0, 10**6, "least ratio p(x) / q(x) with which a token stays in the window")
SHARE = opt(0.25, 0, 1, "share of the tokens that the head scores")
VALUE = "what a node is ranked by: the chance to match, or the draft's probability"
RATE = "accepted share of the depth from which the next tree is deeper"
COUPLED = "how the moved distribution is sampled: under fixed noise as gumbel-jacobi, or coupled as scd"
DYNAMIC = "eagle2_"  # of names of trees that grow from the drafter's confidence
LEAD = "tokens of the row above before a row begins; a whole row is exact"
PASSES = "passes of the small model per step of the target; 0 is until all tokens of the chain are its own"


def tree_of(name: str) -> Any:
    """The option of a tree: a static tree's name, or eagle2_NODES_WIDTH_DEPTH."""
    return opt(name, help="draft tree, such as grown_8_2, naive_extend_57 or its nodes, '0 1 0.0'")


TREE = tree_of("grown_8_2")


def published(nodes: int, width: int, depth: int) -> dict[str, Any]:
    """What presets change for a published dynamic tree: its nodes are ranked by q and tested by rejection."""
    return dict(mode="point", nodes=nodes, width=width, depth=depth, spread=1.0)


def drafting(m: Parts, mode: str, relaxed: bool = False) -> dict[str, Any]:
    """What all drafters of trees take. At temperature 0 a sampled draft is the most likely token."""
    mode = "point" if m.greedy and mode == "sampled" else mode
    return dict(mode=mode, sampling=m.sampling, records_log_q=relaxed and mode == "gumbel" and not m.greedy)


def head(m: Parts, drafter: Any, part: str, tree: str, mode: str = "gumbel", **how: Any) -> Deferred:
    """A drafter of static trees by trained heads."""
    return drafter(m.part(part), m.target, tree=named(tree), **how, **drafting(m, mode))


def eagle(
    m: Parts,
    tree: str,
    mode: str = "gumbel",
    part: str = DRAFTER,
    relaxed: bool = False,
    makes: Any = (EagleDrafter, GrowingDrafter),
) -> Deferred:
    """EAGLE's drafter of a static tree, or of a published dynamic one, by its name; `makes` are classes for both."""
    how, (static, growing), module = drafting(m, mode, relaxed), makes, m.part(part)
    if not tree.startswith(DYNAMIC):
        return static(module, m.target, tree=named(tree), **how)
    found = re.fullmatch(r"eagle2_([1-9]\d{0,3})_([1-9]\d{0,3})_([1-9]\d{0,3})", tree)
    if found is None:
        raise ValueError(f'tree is "{tree[:40]}", wanted eagle2_NODES_WIDTH_DEPTH, such as eagle2_59_10_6')
    if relaxed:  # the noise would decide where p is relaxed, and tokens would not follow r
        raise ValueError(f'tree is "{tree}", wanted a static one, such as grown_8_2: a relaxed p needs it')
    growth = Growth(*map(int, found.groups()), 1.0)
    return growing(module, m.target, policy=Eagle2(), growth=growth, **how)


def grown(
    m: Parts, policy: Deferred, mode: str, nodes: int, width: int, depth: int, spread: float, adaptive: bool = False
) -> Deferred:
    """EAGLE's drafter of trees that a policy shapes."""
    growth = Growth(nodes, width, depth, spread, adaptive=adaptive)
    return GrowingDrafter(m.drafter, m.target, policy=policy, growth=growth, **drafting(m, mode))


def windowed(m: Parts, window: int, init: str, keeps: bool = True, least: float = 0.0) -> Deferred:
    """A Jacobi window."""
    return JacobiDrafter(m.target, window=window, init=init, keeps_distributions=keeps, least=least)


def tested(mode: str) -> Deferred:
    """The exact verifier of a draft mode."""
    return Gumbel() if mode == "gumbel" else Rejection()


def claimed(
    m: Parts, make: Any, tree: str, k: float, residual: str, shared: bool, drafts: str, **budget: float
) -> tuple[Deferred, Deferred]:
    """Drafts that are tested by a rule that lets a draft claim the probability of its k nearest tokens up to a budget.

    Drafts of a dynamic tree are not sampled, since rejection forbids to drop a sampled token.
    """
    table, mode = m.neighbours(k, spare=residual == "released"), "point" if tree.startswith(DYNAMIC) else "sampled"
    rule = make(table, m.count(k), m.distances(k), residual, shared, **budget)
    is_parallel = drafts == "parallelspec"
    drafter = head(m, ParallelDrafter, "parallelspec", tree, mode) if is_parallel else eagle(m, tree, mode)
    return drafter, Greedy(rule) if m.greedy else Rejection(relaxation=rule)


def moved(m: Parts, rule: Deferred, inner: Deferred) -> Deferred:
    """An exact verifier of a distribution that a relaxation moved; at temperature 0 there is nothing to move."""
    return inner if m.greedy else Relaxed(rule, inner)


@method(page="")
def plain(m: Parts):
    """one token per step; the baseline"""
    return Made()


@method(page="")
def auto(m: Parts):
    """the method that `lantern tune` measured as fastest; without its profile a nearly free window or plain"""
    return Made()


@method(paper="2401.15077")
def eagle1(m: Parts, tree: str = TREE, mode: str = "gumbel", part: str = DRAFTER):
    """EAGLE-1 drafts"""
    return eagle(m, tree, mode, part), tested(mode)


preset("eagle1-rejection", "eagle1", "EAGLE-1 drafts, sampled, tested by multi-round rejection", mode="sampled")


@method(paper="2505.12398", page="eagle1")
def eagle1_traversal(m: Parts, tree: str = TREE):
    """EAGLE-1 drafts, sampled, tested from the leaves up; on a chain it is block verification"""
    how = drafting(m, "sampled")
    return EagleDrafter(m.drafter, m.target, tree=named(tree), **how, is_fresh=how["mode"] == "sampled"), Traversal()


OF_25 = dict(mode="sampled", tree="mc_sim_7b_63")  # EAGLE-1's tree of 25 nodes
preset("eagle1-paper", "eagle1", "EAGLE-1 as published: its static tree of 25 nodes, rejection", **OF_25)


EAGLE3 = dict(part="eagle3", tree="grown_15_4", paper="2503.01840", page="eagle3")
preset("eagle3", "eagle1", "EAGLE-3 drafts, from three layers of the target and by a head of their own", **EAGLE3)

OF_59 = dict(mode="point", tree="eagle2_59_10_6")
TO_8 = dict(mode="point", tree="eagle2_59_10_8")
preset("eagle3-paper", "eagle3", "EAGLE-3 as published: the 59 nodes of highest confidence to depth 8", **TO_8)


POSS = dict(part="poss", tree="grown_15_4", paper="2506.03566", page="poss")
preset("poss", "eagle1", "PosS: drafts by position specialists, a layer for each two depths", **POSS)

TO_7 = dict(mode="point", tree="eagle2_59_10_7")
preset("poss-paper", "poss", "PosS as published: the 59 nodes of highest confidence to depth 7", **TO_7)


@method(paper="2509.15235")
def vispec(m: Parts, tree: str = TREE, mode: str = "gumbel"):
    """ViSpec: EAGLE's trees in a context of a few rows, a token for each older row and for the caption"""
    return eagle(m, tree, mode, "vispec", makes=(ViSpecDrafter, GrowingViSpecDrafter)), tested(mode)


OF_29 = dict(mode="point", tree="eagle2_29_8_4")
preset("vispec-paper", "vispec", "ViSpec as published: the 29 nodes of highest confidence to depth 4", **OF_29)


@method(GROWTH, paper="2406.16858")
def eagle2(m: Parts, value: str = opt("match", help=VALUE, choices=("q", "match")), **growth: Any):
    """EAGLE-2: the nodes likeliest to be the target's own samples, whatever their shape"""
    return grown(m, Eagle2(value), "gumbel", **growth), Gumbel()


EAGLE2 = dict(paper="2406.16858", page="eagle2")
preset("eagle2-paper", "eagle1", "EAGLE-2 as published: the 59 nodes of highest confidence", **OF_59, **EAGLE2)


@method(dict(nodes=GROWTH["nodes"], width=GROWTH["width"], depth=replace(GROWTH["depth"], default=4)), **EAGLE2)
def eagle2_rejection(m: Parts, **growth: Any):
    """EAGLE-2 as rejection allows it: numbers of children are chosen before they are sampled"""
    return grown(m, PredictableEagle2(), "sampled", **growth, spread=1.25), Rejection()


@method(GROWTH, ADAPTIVE, paper="2409.00142")
def ddd(
    m: Parts,
    alive: float = opt(0.2, 0, 1, "probability that the target follows the beam, below which drafting stops"),
    check: int = opt(1, 1, None, "depth from which it may stop"),
    mode: str = "gumbel",
    **growth: Any,
):
    """DDD: drafts go on while enough probability is alive"""
    return grown(m, Ddd(alive, check), mode, **growth), tested(mode)


preset("ddd-paper", "ddd", "DDD as published: up to 11 depths of ten nodes, ranked by q", **published(59, 10, 11))


@method(GROWTH, ADAPTIVE, paper="2411.18462")
def svip(
    m: Parts,
    c: float = opt(0.15, 0, None, "factor of the entropy"),
    threshold: float = opt(0.65, 0, None, "square root of c times the entropy above which drafting stops"),
    keeps: bool = False,
    **growth: Any,
):
    """SVIP: nothing is drafted below a distribution that is too uncertain"""
    return grown(m, Svip(c, threshold, keeps), "gumbel", **growth), Gumbel()


CHAIN = dict(nodes=12, width=1, depth=12, threshold=0.3)
BEFORE = "SVIP as published: a chain of up to 12 (paper: 40), until the next distribution has sqrt(H) above 0.3"
preset("svip-paper", "svip", BEFORE, **CHAIN, c=1.0)
AFTER = "SVIP as released: a chain that ends with the first token from a distribution of more than 0.6 nats"
preset("svip-released", "svip", AFTER, **CHAIN, keeps=True)


@method(GROWTH, ADAPTIVE, paper="2502.13652")
def c2t(
    m: Parts,
    threshold: float = opt(0.03, 0, 1, "confidence below which a node is dropped"),
    mode: str = "gumbel",
    part: str = "c2t",
    ranks: bool = True,
    **growth: Any,
):
    """C2T: a small classifier selects the nodes that are worth their time"""
    return grown(m, C2T(m.part(part), threshold, ranks), mode, **growth), tested(mode)


C2T_PAPER = dict(part="c2t-paper", threshold=0.3, ranks=False, **published(150, 15, 10))
preset("c2t-paper", "c2t", "C2T as published: of each of ten depths the best 15 nodes of confidence 0.3", **C2T_PAPER)


@method(GROWTH, ADAPTIVE)
def radar(
    m: Parts,
    threshold: float = opt(0.5, 0, 1, "probability of stopping above which it stops"),
    mode: str = "gumbel",
    part: str = "radar",
    **growth: Any,
):
    """RADAR: a recurrent network decides after each draft pass whether to run another"""
    return grown(m, Radar(m.part(part), threshold), mode, **growth), tested(mode)


RADAR_PAPER = dict(part="radar-paper", **published(59, 10, 8))
preset("radar-paper", "radar", "RADAR as published: up to 8 depths of ten nodes, ranked by q", **RADAR_PAPER)


@method(GROWTH, ADAPTIVE, paper="2512.21857")
def adt_tree(m: Parts, end: float = opt(0.1, 0, 1, "probability of reaching the last depth"), **growth: Any):
    """ADT-Tree: deep and narrow where drafts of the neighbours did well, shallow and wide elsewhere"""
    return grown(m, AdtTree(end, growth["nodes"]), "gumbel", **growth), Gumbel()


SIZES = {name: replace(GROWTH[name], default=size) for name, size in published(58, 20, 10).items() if name in GROWTH}


@method(SIZES, ADAPTIVE, paper="2512.21857", page="adt-tree")
def adt_tree_paper(m: Parts, rate: float = opt(0.5, 0, 1, RATE), **growth: Any):
    """ADT-Tree as published: depth and width inherited and bisected, rejection"""
    return grown(m, AdtBisection(rate, growth["depth"], growth["width"]), "point", **growth), Rejection()


@method(paper="2401.10774")
def medusa(m: Parts, tree: str = TREE):
    """Medusa heads: tokens ahead are guessed from the last feature alone"""
    return head(m, MedusaDrafter, "medusa", tree), Gumbel()


@method(paper="2401.10774", page="medusa")
def medusa_paper(
    m: Parts,
    tree: str = tree_of("grown_63_4"),
    epsilon: float = opt(0.09, 0, 1, "probability from which a draft is always accepted", sweep=(0.3, 0.09)),
    alpha: float = opt(0.3, 0, 1e6, "factor of exp(-entropy) from which a draft is accepted"),
):
    """Medusa as published: a tree of 63 nodes by four of the heads, typical acceptance, then the likeliest token"""
    rule = Typical(epsilon, alpha, m.codebook())
    return head(m, MedusaDrafter, "medusa", tree, "point"), Rejection(relaxation=rule)


@method(paper="2410.21951")
def vadusa(m: Parts, tree: str = TREE, samples: int = SAMPLES):
    """VADUSA (reconstructed): Medusa heads draft; accepted if among several samples of the target"""
    rule = Tolerance(samples, m.codebook())
    return head(m, MedusaDrafter, "medusa", tree, "point"), Rejection(relaxation=rule)


@method(paper="2410.21951")
def tolerance(m: Parts, tree: str = TREE, samples: int = SAMPLES):
    """VADUSA's tolerance (reconstructed) on EAGLE's tree: accepted if among several samples of the target"""
    return eagle(m, tree, "point"), Rejection(relaxation=Tolerance(samples, m.codebook()))


@method(paper="2410.05589")
def parallelspec(m: Parts, tree: str = tree_of("grown_8_3"), mode: str = "gumbel"):
    """ParallelSpec: mask tokens guess all depths in one drafter pass"""
    return head(m, ParallelDrafter, "parallelspec", tree, mode), tested(mode)


preset("parallelspec-paper", "parallelspec", "ParallelSpec as published: EAGLE-1's tree from one pass", **OF_25)


@method(paper="2510.25739")
def vertical(m: Parts, tree: str = TREE, share: float = BESIDE):
    """Hawk: heads along the row, and one for the token below whose guesses wait in a pool"""
    return head(m, VerticalDrafter, "vertical", tree, share=share), Gumbel()


@method(paper="2502.14856")
def fr_spec(
    m: Parts,
    tree: str = TREE,
    vocabulary: int = opt(512, 1, None, "number of most frequent tokens that the head scores"),
):
    """FR-Spec: EAGLE-1 with a head over frequent tokens"""
    how = dict(vocabulary=vocabulary, tree=named(tree), mode="gumbel", sampling=m.sampling)
    return FrSpecDrafter(m.drafter, m.target, m.part("fr-spec"), **how), Gumbel()


@method(paper="2502.14856", page="fr-spec")
def fr_spec_paper(m: Parts, tree: str = tree_of("eagle2_59_10_6"), share: float = SHARE):
    """FR-Spec as published: EAGLE-2's 59 nodes, a head over a quarter of the tokens"""
    growing = partial(GrowingFrSpecDrafter, table=m.part("fr-spec"), share=share)
    return eagle(m, tree, "point", makes=(EagleDrafter, growing)), Rejection()


@method(SAM, paper="2411.10666")
def sam(m: Parts, tree: str = TREE, **matching: Any):
    """no drafter: what followed similar contexts in the image and a small corpus"""
    return SamDrafter(m.part("sam"), m.target, tree=named(tree), **matching), Gumbel()


SUFFIX = dict(tree="chain_40", match="tokens", least=5, reach=40, smooth=0.0)
preset("sam-paper", "sam", "SAM decoding as published: 40 tokens behind the longest suffix of five or more", **SUFFIX)


@method(SAM, paper="2411.10666", page="sam")
def sam_eagle1(m: Parts, tree: str = TREE, copies: str = COPIES, **matching: Any):
    """EAGLE-1's tree with a chain from similar contexts beside it"""
    beside = SamDrafter(m.part("sam"), m.target, tree=named(copies), beside=named(tree), **matching)
    return RouterDrafter(eagle(m, tree), beside), Gumbel()


@method(page="repeat")
def repeat_left(m: Parts, length: int = opt(4, 1, None, "tokens drafted in a step"), side: str = "left"):
    """no drafter: the next tokens are drafted as copies of the last one; a baseline"""
    return Repeat(m.target, side=side, length=length), Gumbel()


ABOVE = "no drafter: the next tokens are drafted as copies of those above them; a baseline"
preset("repeat-above", "repeat-left", ABOVE, side="above")


@method(paper="2408.07978")
def self_cascade(m: Parts, tree: str = tree_of("chain_4")):
    """a smaller model drafts under the same noise"""
    return SelfCascadeDrafter(m.part("small"), m.target, tree=named(tree), sampling=m.sampling), Gumbel()


@method(paper="2505.22179")
def specmquant(
    m: Parts,
    length: int = opt(6, 2, 256, "tokens of the chain that the target scores"),
    width: int = opt(2, 1, None, "tokens tried at each place of the chain"),
    steps: int = opt(2, 0, 100, PASSES),
    small_bits: int = opt(0, help="bits of the small model's weights; 0 leaves them as they are", choices=(0, 4)),
):
    """SpecMQuant: EAGLE-1 drafts for a smaller model and that for the target"""
    how = dict(length=length, width=width, rounds=steps, bits=small_bits, sampling=m.sampling)
    return Cascade(m.drafter, m.target, m.part("small"), **how), Gumbel()


UNTIL = dict(width=1, steps=0)
preset("specmquant-paper", "specmquant", "SpecMQuant as published: until a chain of six is the small model's", **UNTIL)


@method(WINDOWS, paper="2410.01699")
def sjd(m: Parts, **window: Any):
    """no drafter: a window is tested and sampled again in every pass (speculative Jacobi)"""
    return windowed(m, **window), Coupling(redraw="independent")


@method(WINDOWS, paper="2510.24211")
def scd(m: Parts, **window: Any):
    """no drafter: as sjd, but tokens of the window are kept wherever they can be (coupled)"""
    return windowed(m, **window), Coupling()


OF_16, OF_64 = dict(window=16, init="random"), dict(window=64, init="random")
preset("sjd-paper", "sjd", "speculative Jacobi as published: windows of 16 tokens that begin with random ones", **OF_16)
preset("scd-paper", "scd", "coupled Jacobi as published: windows of 64 tokens that begin with random ones", **OF_64)


@method(WINDOWS, name="sjd++", paper="2512.07503", page="sjd-pp")
def sjd_pp(m: Parts, reuse: float = REUSE, **window: Any):
    """no drafter: as sjd, but tokens whose probability did not fall much stay (SJD++, reconstructed)"""
    return windowed(m, **window), Coupling(redraw="reuse", reuse=reuse)


@method(WINDOWS | dict(window=replace(WINDOWS["window"], fits=True)), paper="2002.03629")
def gumbel_jacobi(m: Parts, least: float = opt(0.0, 0, 10**6, LEAST), **window: Any):
    """no drafter: a window iterates under fixed noise to the image of plain decoding"""
    return windowed(m, **window, keeps=False, least=least), Gumbel()


@method(paper="2603.18599")
def sjd_pac(
    m: Parts,
    window: int = opt(16, 2, None, "tokens scored in one pass"),
    width: int = opt(3, 1, None, "tokens tried at each place of the front"),
    levels: int = opt(2, 1, None, "depth of the front"),
):
    """no drafter: gumbel-jacobi with a tree of runners-up at the window's front"""
    return SjdPacDrafter(m.target, sampling=m.sampling, window=window, width=width, levels=levels), Gumbel()


@method(WINDOWS)
def bounded_window(
    m: Parts,
    window: int,
    init: str,
    delta: float = replace(FLOW["delta"], default=0.15),
    cap: float = replace(FLOW["cap"], default=1e6),
    mode: str = opt("gumbel", help=COUPLED, choices=("gumbel", "coupled")),
):
    """no drafter: a window whose distributions move toward the last step's, by at most delta"""
    return windowed(m, window, init), moved(m, Mixture(delta, cap), Gumbel() if mode == "gumbel" else Coupling())


MOVED_SCD = "bounded-window with scd's coupled samples; no probability is more than doubled"
preset("bounded-scd", "bounded-window", MOVED_SCD, mode="coupled", cap=2.0, delta=0.4)


@method(FLOW)
def bounded(m: Parts, k: int, tree: str = TREE, **flow: Any):
    """the distribution moves toward the draft between similar tokens, by at most delta; verified exactly"""
    rule = Bounded(m.neighbours(k), k, m.distances(k), **flow)
    return eagle(m, tree, relaxed=True), Greedy(rule) if m.greedy else Relaxed(rule, Gumbel())


@method(WINDOWS | dict(init=replace(WINDOWS["init"], default="random")), GROUPS, paper="2508.07747", page="grouped")
def gsd(m: Parts, window: int, init: str, **radii: Any):
    """GSD as published: no drafter, tokens of a Jacobi window are tested as groups"""
    return windowed(m, window, init), Coupling(redraw="independent", relaxation=Grouped(m.vectors(), **radii))


@method(GROUPS, paper="2508.07747")
def grouped(m: Parts, tree: str = TREE, **radii: Any):
    """GSD's test on EAGLE's tree: a draft counts as a group of tokens that are alike and as probable"""
    return eagle(m, tree, "sampled"), Rejection(relaxation=Grouped(m.vectors(), **radii))


@method(CLAIMS, paper="2410.03355")
def lantern(
    m: Parts,
    tree: str = tree_of("chain_3"),
    k: float = opt(100, 0, MAX_NEIGHBOURS, ALIKE, is_share=True),
    delta: float = opt(0.1, 0, 1, CLAIM, sweep=(0.05, 0.1, 0.2)),
    **how: Any,
):
    """LANTERN: a draft may claim its k nearest tokens' probability up to delta"""
    return claimed(m, Lantern, tree, k, **how, delta=delta)


OF_58 = dict(k=0.061, delta=0.4, tree="eagle2_58_10_5")  # k is 1,000 of LlamaGen's 16,384
NEAR = "LANTERN as published: EAGLE-2's 58 nodes, delta 0.4, the nearest 6 % of the codebook"
preset("lantern-paper", "lantern", NEAR, **OF_58)
OF_CODE = "LANTERN as released: as lantern-paper, with the residual of the authors' code"
preset("lantern-released", "lantern", OF_CODE, residual="released", **OF_58)


@method(CLAIMS, name="lantern++", paper="2502.06352", page="lantern-pp")
def lantern_pp(
    m: Parts,
    tree: str = TREE,
    k: float = opt(10, 0, MAX_NEIGHBOURS, ALIKE, is_share=True),
    lambda_: float = opt(2.0, 1, 1e6, GAIN, sweep=(1.5, 2.0, 3.0, 5.0)),
    **how: Any,
):
    """LANTERN++: a draft may claim its k nearest tokens' probability up to (lambda - 1) times its own"""
    return claimed(m, LanternPP, tree, k, **how, lambda_=lambda_)


STATIC = dict(tree="naive_extend_57", lambda_=5.0, residual="released")
preset("lantern++-paper", "lantern++", "LANTERN++ as published: its static tree of 57 nodes, lambda 5", **STATIC)


@method(paper="2601.09212")
def cool(
    m: Parts,
    tree: str = TREE,
    omega: float = opt(1.1, 0, 1e6, "mean factor of a draft's probability", sweep=(1.1, 1.5, 2.0)),
    nu: float = opt(0.7, 0, 10, "rate at which the factor falls with depth; 0 is constant"),
):
    """COOL-SD: drafts count omega times, early ones more"""
    return eagle(m, tree, "sampled"), moved(m, Cool(omega, nu, m.codebook()), Rejection())


preset("cool-paper", "cool", "COOL-SD as published: a chain of five tokens", tree="chain_5")


@method(paper="2511.13587")
def vvs(m: Parts, tree: str = tree_of("spine_1_8_2"), skip: int = SKIP):
    """verification skipping, after VVS: the first tokens of each step are not verified, those behind are"""
    return eagle(m, tree, relaxed=True), moved(m, Vvs(skip, m.codebook()), Gumbel())


@method(paper="2412.04062")
def zipar(m: Parts, lead: int = opt(4, 1, None, LEAD, sweep=(8, 4)), measured: bool = MEASURED):
    """ZipAR: no drafter: a row begins when the row above has `lead` tokens; all rows add a token per step"""
    return Made(front=dict(lead=lead, measured=measured))


@method(paper="2606.05703")
def pjd(
    m: Parts,
    lead: int = opt(6, 1, None, LEAD, sweep=(12, 6)),
    drafts: int = opt(3, 0, None, "tokens behind the last one that each row drafts"),
    measured: bool = MEASURED,
):
    """PJD (reconstructed): as zipar, and each row also drafts by Jacobi iteration of its own samples"""
    return Made(front=dict(lead=lead, drafts=drafts, measured=measured))
